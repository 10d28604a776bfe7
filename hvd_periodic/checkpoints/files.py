"""Files that are whole or not there: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvd_periodic.checkpoints.tree import TREE, Content

_PIECE_BYTES = 16 * 2**20
"""Written at once."""


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Let ``write`` fill a file, so that after a crash at any moment it is there as a whole, or not at all.

    Returns:
        The number of its bytes, and their SHA-256.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            stream = _Digesting(file)
            write(stream)  # type: ignore[arg-type]
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return stream.size, stream.digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_content(path: Path, content: Content) -> tuple[int, str]:
    """Write an ``.npz`` that numpy reads, of the arrays by name and the tree as JSON; return its bytes and SHA-256."""

    def write(stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in (content.arrays | {TREE: _as_bytes(content.tree)}).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    _write_array(entry, array)

    return write_whole(path, write)


def read_content(path: Path) -> Content:
    """Return what :func:`write_content` was given.

    Raises:
        ValueError: another kind of file, or one with a pickle inside, which is not loaded; names it.
    """
    with naming(path), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
        return Content(json.loads(arrays.pop(TREE).tobytes()), arrays)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what a file of another kind may raise into a ValueError that names it."""
    try:
        yield
    except (ValueError, LookupError, AttributeError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no checkpoint of hvd_periodic: {error}") from error


def digest_of(path: Path) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _as_bytes(tree: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(tree).encode(), np.uint8)


def _write_array(entry: IO[bytes], array: np.ndarray) -> None:
    """Write an array as numpy does, but for its copies: Python's lock is free while a piece goes to the disk."""
    whole = np.ascontiguousarray(array).reshape(array.shape)
    np.lib.format.write_array_header_2_0(entry, np.lib.format.header_data_from_array_1_0(whole))
    data = memoryview(whole.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    for start in range(0, len(data), _PIECE_BYTES):
        entry.write(data[start : start + _PIECE_BYTES])


class _Digesting:
    """A file that can only be appended to, so that a digest of it is known at its end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Append."""
        left = memoryview(data).cast("B")
        self.digest.update(left)
        self.size += len(left)
        while left:  # A file without a buffer of its own may take a part.
            left = left[self._file.write(left) :]
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
