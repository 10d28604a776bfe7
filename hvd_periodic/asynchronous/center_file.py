"""Keeps the asynchronous center in a file that outlives the job."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from weakref import finalize

import numpy as np

from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors
from hvd_periodic.comm.membership import Membership

_ALIGNMENT = 64
_NAMES = {"f4": "F32", "f8": "F64", "i4": "I32", "i8": "I64"}
"""Names of numpy dtypes in safetensors; other dtypes are stored as bytes."""


class CenterFile:
    """A file whose pages show the center: whatever ends the ranks, even all at once, the file remains.

    It is a valid safetensors file at all times, even while it changes. They are the memory of a center that has one
    holder; in shared memory, each worker copies what it has moved. If a rank dies in a transaction, the bucket may be
    moved in part. The system flushes pages to disk in its own time: a host that loses power loses some seconds.

    Until the root's first exchange the file is named ``PATH.unfinished``; then it is renamed to ``PATH``, and an older
    file of that name, such as the previous job's, from which training may have begun, to ``PATH.previous``.

    Args:
        path: path of the file.
        membership: the ranks; the root creates it.
        parts: tensors that are exchanged.

    Attributes:
        release: makes the path available to other optimizers, once training is over.
    """

    def __init__(self, path: Path, membership: Membership, parts: Sequence[ExchangedTensors]) -> None:
        self.path, self._membership, self._parts = path, membership, parts
        self._published = False
        self.release: Callable[[], object] = lambda: None

    def open(self, name: str, everywhere: bool) -> np.ndarray | None:
        """Create the file, and return its center as bytes; collective.

        Args:
            name: prefix of the names of the collectives.
            everywhere: all ranks map the file, which requires one host; otherwise only the root does.

        Raises:
            RuntimeError: it cannot be created, or some rank sees another file or none; on all ranks.
        """
        communicator, root, problem = self._membership.communicator, self._membership.root, ""
        center: np.ndarray | None = None
        header = _header(self._parts, self._workers, "")
        if communicator.rank == root:
            try:
                header = _header(self._parts, self._workers, uuid.uuid4().hex)
                center = self._make(header)
            except OSError as error:
                problem = str(error)
        gathered = communicator.allgather_object((problem, header), f"{name}.made")
        if everywhere and communicator.rank != root and not gathered[root][0]:
            try:
                center = self._find(gathered[root][1])
            except OSError as error:
                problem = str(error)
        problems = communicator.allgather_object(problem, f"{name}.mapped")
        found = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)
        if found is not None:
            raise RuntimeError(
                "`center_file` must be a path in an existing folder, on a disk with room for the center that all ranks "
                f"of the host can access. Received: {str(self.path)!r}; {found}"
            )
        return center

    def publish(self) -> None:
        """Rename the file to its final name; on the root."""
        if self._published:
            return
        if self.path.exists():
            previous = Path(f"{self.path}.previous")
            previous.unlink(missing_ok=True)
            previous.hardlink_to(self.path)  # The file keeps its name until the new one takes it.
        self._unfinished.replace(self.path)
        self._published = True

    @property
    def _unfinished(self) -> Path:
        return Path(f"{self.path}.unfinished")

    def _make(self, header: bytes) -> np.ndarray:
        if self.path.is_dir():
            raise IsADirectoryError("it is a folder")
        for used in filter(Path.exists, (self.path, self._unfinished)):
            os.close(_locked(used))
        self._unfinished.unlink(missing_ok=True)  # Left by a job that ended before its first step.
        with self._unfinished.open("x+b") as file:
            self.release = finalize(self, os.close, _locked(self._unfinished))
            # A full disk is an error here; later, writing to a page without disk space would end the process.
            os.posix_fallocate(file.fileno(), 0, len(header) + self._nbytes)
            file.write(header)
        return self._map(len(header))

    def _find(self, header: bytes) -> np.ndarray:
        with self._unfinished.open("rb") as file:
            if file.read(len(header)) != header:
                raise FileNotFoundError(f"{self._unfinished} is not the file that the root has created")
        return self._map(len(header))

    def _map(self, start: int) -> np.ndarray:
        return np.asarray(np.memmap(self._unfinished, np.uint8, "r+", offset=start, shape=(self._nbytes,)))

    @property
    def _nbytes(self) -> int:
        return CenterInMemory.nbytes(self._parts, [part.layout for part in self._parts], self._workers)

    @property
    def _workers(self) -> int:
        return self._membership.communicator.size


def _locked(path: Path) -> int:
    """Return a descriptor that holds the lock of a file.

    Raises:
        BlockingIOError: another optimizer, of this job or of another, has locked it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError("another optimizer uses it: give each optimizer its own file") from error
    except OSError:  # A file system without locks.
        return descriptor
    return descriptor


def _header(parts: Sequence[ExchangedTensors], workers: int, token: str) -> bytes:
    """Return the header of the file: the length of a JSON object, and the object, which gives the place of each tensor.

    In this format every byte belongs to a tensor, so unused bytes form tensors of their own.
    """
    tensors: dict[str, object] = {"__metadata__": {"format": "hvd_periodic", "token": token}}
    end = 0
    for name, dtype, shape, start, stop in sorted(_tensors(parts, workers), key=lambda tensor: tensor[3:]):
        if start > end:
            tensors[f"hvd_periodic.unused.{end}"] = _entry("U8", (start - end,), end, start)
        tensors[name] = _entry(dtype, shape, start, stop)
        end = stop
    total = CenterInMemory.nbytes(parts, [part.layout for part in parts], workers)
    if total > end:
        tensors[f"hvd_periodic.unused.{end}"] = _entry("U8", (total - end,), end, total)
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _tensors(parts: Sequence[ExchangedTensors], workers: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Yield name, dtype, shape, first byte and past-the-last byte of every tensor of the center."""
    layouts = [part.layout for part in parts]
    for part, kind, first in CenterInMemory.arenas(parts, layouts, workers):
        layout = layouts[part]
        for index, spec in enumerate(layout.specs):
            if spec.kind == kind:
                _, start, stop = layout.span(index)
                dtype = np.dtype(kind.split()[0])
                begin, end = (first + element * dtype.itemsize for element in (start, stop))
                named = _NAMES.get(dtype.str[1:])
                yield spec.name, named or "U8", (*spec.shape, *(() if named else (dtype.itemsize,))), begin, end
