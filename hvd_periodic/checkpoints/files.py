"""Atomic files: written under another name, flushed to disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from threading import Thread
from typing import IO, Any

import numpy as np

from hvd_periodic.checkpoints.tree import TREE, Content
from hvd_periodic.vectors.lending import Deferred

_PIECE_BYTES = 16 * 2**20
"""Bytes written and read at once."""

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Write a file with ``write``; after a crash at any moment the file is complete or absent.

    Returns:
        The number of its bytes, and their SHA-256.

    Raises:
        OSError: the file cannot be written, for example because the disk is full; names it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    stream = _Digesting()
    try:
        with partial.open("wb", buffering=0) as file:
            stream.file = file
            write(stream)  # type: ignore[arg-type]
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        cause = stream.failure or error  # torch.save replaces it with its own error.
        if isinstance(cause, OSError) and cause.errno is not None and cause.filename is None:
            cause.filename = str(path)
        if cause is not error:
            raise cause from error
        raise
    sync_folder(path.parent)
    return stream.size, stream.digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_content(path: Path, content: Content) -> tuple[int, str]:
    """Write the named arrays, and the tree as JSON, to an ``.npz`` for numpy; return its bytes and SHA-256."""

    def write(stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            tree = np.frombuffer(json.dumps(content.tree).encode(), np.uint8)
            arrays: Mapping[str, np.ndarray | Deferred] = {**content.arrays, **content.deferred, TREE: tree}
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    _write_array(entry, array)

    return write_whole(path, write)


_PARSING = threading.Lock()
"""numpy parses the headers of arrays as literals, at which CPython 3.11 may fail in two threads at once (gh-106905)."""


def read_content(path: Path) -> Content:
    """Return the content that was passed to :func:`write_content`.

    Raises:
        ValueError: another kind of file, or a file that contains a pickle, which is not loaded; names it.
    """
    with _PARSING, open_regular(path) as file, naming(path), zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        arrays = {
            entry.filename.removesuffix(".npy"): _read_array(archive, entry, size) for entry in archive.infolist()
        }
        return Content(json.loads(arrays.pop(TREE).tobytes()), arrays)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        ValueError: it is a pipe or a device, on which a reader might block, or a folder; names it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # So that opening a pipe does not wait for a writer.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is damaged: it is not a regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors that a file of another kind may cause into a ValueError that names the file."""
    try:
        yield
    except MemoryError:  # The file is intact, but this process has no room for it.
        raise
    except Exception as error:  # Parsers of zip archives raise errors of many kinds.
        raise ValueError(f"{path} is not a checkpoint of hvd_periodic: {error}") from error


def digest_of(path: Path) -> tuple[int, str]:
    """Return the number of bytes and the SHA-256 of a file."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _write_array(entry: IO[bytes], array: np.ndarray | Deferred) -> None:
    """Write an array as numpy does, but without its copies; the GIL is released while a piece goes to disk."""
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_2_0(entry, header)
    for part in array.parts if isinstance(array, Deferred) else [np.ascontiguousarray(array)]:
        data = _bytes_of(part)
        for start in range(0, len(data), _PIECE_BYTES):
            entry.write(data[start : start + _PIECE_BYTES])


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, size: int) -> np.ndarray:
    """Return an array from an archive of ``size`` bytes; allocate memory only if the array's bytes are there."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"{entry.filename} is in version {version} of numpy's format")
        shape, column_major, dtype = _HEADERS[version](stream)
        if dtype.hasobject:
            raise ValueError(f"{entry.filename} is a pickle, which is not loaded")
        needed, there = math.prod(shape) * dtype.itemsize, min(entry.file_size, size) - stream.tell()
        if needed != there:
            raise ValueError(f"{entry.filename} needs {needed} bytes for {dtype}{list(shape)}, and has {there}")
        array = np.empty(shape[::-1] if column_major else shape, dtype)
        data = _bytes_of(array)
        while data:
            read = stream.read(min(len(data), _PIECE_BYTES))
            if not read:
                raise EOFError(f"{entry.filename} ends early")
            data[: len(read)] = read
            data = data[len(read) :]
    return array.T if column_major else array


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a row-major array."""
    return memoryview(array.reshape(-1).view(np.uint8) if array.nbytes else b"")  # type: ignore[arg-type]


class _Digesting:
    """An append-only file, whose digest is known when writing ends."""

    file: FileIO
    failure: OSError | None = None

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Append."""
        left = memoryview(data).cast("B")
        self.size += len(left)
        if len(left) < _PIECE_BYTES // 16:
            self.digest.update(left)
            digesting = None
        else:  # Both release the GIL.
            digesting = Thread(target=self.digest.update, args=(left,))
            digesting.start()
        try:
            while left:  # An unbuffered file may accept only a part.
                left = left[self.file.write(left) :]
        except OSError as error:
            self.failure = error
            raise
        finally:
            if digesting is not None:
                digesting.join()
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
