"""The asynchronous center as a file, which is there when nobody is any more."""

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
from hvd_periodic.comm.base import Communicator

_ALIGNMENT = 64
_NAMES = {"f4": "F32", "f8": "F64", "i4": "I32", "i8": "I64"}
"""What safetensors calls numpy's dtypes; of others the file has the bytes."""


class CenterFile:
    """A file whose pages are the memory in which the center moves: what ends the ranks, also all at once, leaves it.

    It is a safetensors file at every moment, also while it changes. A bucket on which a rank dies may be moved in part.
    The system brings pages to the disk in its own time, so that a host that loses power loses some seconds.

    Until the root's first exchange it has the name ``PATH.unfinished``; then it takes its own, and a file that had that
    one, such as that of the job before, from which training may have begun, the name ``PATH.previous``.

    Args:
        path: of the file.
        communicator: the ranks.
        root: the rank that makes it.
        parts: what is exchanged.

    Attributes:
        release: lets other optimizers have the path, now that training is over.
    """

    def __init__(self, path: Path, communicator: Communicator, root: int, parts: Sequence[ExchangedTensors]) -> None:
        self.path = path
        self._communicator, self._root, self._parts = communicator, root, parts
        self._appeared = False
        self.release: Callable[[], object] = lambda: None

    def open(self, name: str, everywhere: bool) -> np.ndarray | None:
        """Make the file, and return its center as bytes; collective.

        Args:
            name: of the collectives.
            everywhere: all ranks map it, which are on one host; otherwise the root alone.

        Raises:
            RuntimeError: it cannot be made, or some rank sees another file or none; on all ranks.
        """
        communicator, problem = self._communicator, ""
        center: np.ndarray | None = None
        header = _header(self._parts, "")
        if communicator.rank == self._root:
            try:
                header = _header(self._parts, uuid.uuid4().hex)
                center = self._make(header)
            except OSError as error:
                problem = str(error)
        told = communicator.allgather_object((problem, header), f"{name}.made")
        if everywhere and communicator.rank != self._root and not told[self._root][0]:
            try:
                center = self._find(told[self._root][1])
            except OSError as error:
                problem = str(error)
        problems = communicator.allgather_object(problem, f"{name}.mapped")
        found = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)
        if found is not None:
            raise RuntimeError(
                f"`center_file` must be a path in a folder that is there, on a disk with room for the center that all "
                f"ranks of the host see. Received: {str(self.path)!r}, and of {found}"
            )
        return center

    def appear(self) -> None:
        """Let the file have its name; on the root."""
        if self._appeared:
            return
        if self.path.exists():
            previous = Path(f"{self.path}.previous")
            previous.unlink(missing_ok=True)
            previous.hardlink_to(self.path)  # The file keeps its name until the new one takes it.
        self._unfinished.replace(self.path)
        self._appeared = True

    @property
    def _unfinished(self) -> Path:
        return Path(f"{self.path}.unfinished")

    def _make(self, header: bytes) -> np.ndarray:
        if self.path.is_dir():
            raise IsADirectoryError("it is a folder")
        for used in filter(Path.exists, (self.path, self._unfinished)):
            os.close(_locked(used))
        self._unfinished.unlink(missing_ok=True)  # That of a job that ended before its first step.
        with self._unfinished.open("x+b") as file:
            self.release = finalize(self, os.close, _locked(self._unfinished))
            # What is missing is an error here; on a page that has no place on the disk it would end the process.
            os.posix_fallocate(file.fileno(), 0, len(header) + self._nbytes)
            file.write(header)
        return self._map(len(header))

    def _find(self, header: bytes) -> np.ndarray:
        with self._unfinished.open("rb") as file:
            if file.read(len(header)) != header:
                raise FileNotFoundError(f"{self._unfinished} is not the file that the root has made")
        return self._map(len(header))

    def _map(self, start: int) -> np.ndarray:
        return np.asarray(np.memmap(self._unfinished, np.uint8, "r+", offset=start, shape=(self._nbytes,)))

    @property
    def _nbytes(self) -> int:
        return CenterInMemory.nbytes(self._parts, [part.layout for part in self._parts])


def _locked(path: Path) -> int:
    """Return a descriptor by which a file is locked.

    Raises:
        BlockingIOError: another optimizer has it, of this job or of another.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError("another optimizer is using it: give each a file of its own") from error
    except OSError:  # A disk without locks.
        return descriptor
    return descriptor


def _header(parts: Sequence[ExchangedTensors], token: str) -> bytes:
    """Return how the file begins: the length of a JSON object, and the object, which says where each tensor is.

    In the format every byte belongs to a tensor, so that there are some of bytes that mean nothing.
    """
    tensors: dict[str, object] = {"__metadata__": {"format": "hvd_periodic", "token": token}}
    end = 0
    for name, dtype, shape, start, stop in sorted(_tensors(parts), key=lambda tensor: tensor[3:]):
        if start > end:
            tensors[f"hvd_periodic.unused.{end}"] = _entry("U8", (start - end,), end, start)
        tensors[name] = _entry(dtype, shape, start, stop)
        end = stop
    total = CenterInMemory.nbytes(parts, [part.layout for part in parts])
    if total > end:
        tensors[f"hvd_periodic.unused.{end}"] = _entry("U8", (total - end,), end, total)
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _tensors(parts: Sequence[ExchangedTensors]) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Yield name, dtype, shape, and the first and past-the-last byte of every tensor of the center."""
    layouts = [part.layout for part in parts]
    for part, kind, first in CenterInMemory.arenas(parts, layouts):
        layout = layouts[part]
        for index, spec in enumerate(layout.specs):
            if spec.kind == kind:
                _, start, stop = layout.span(index)
                dtype = np.dtype(kind.split()[0])
                begin, end = (first + element * dtype.itemsize for element in (start, stop))
                named = _NAMES.get(dtype.str[1:])
                yield spec.name, named or "U8", (*spec.shape, *(() if named else (dtype.itemsize,))), begin, end
