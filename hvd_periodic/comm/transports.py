"""Transports of asynchronous exchange: memory that all ranks share, and messages between two ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

SHORT, LONG = 5e-5, 2e-3
"""Polling intervals in seconds: of a message in flight, and after nothing has arrived for a while.

A rank that waits sleeps: waiting inside MPI would take a core from ranks that compute.
"""


class NoSharedMemoryError(RuntimeError):
    """The ranks of one host cannot share that much memory; raised on all of them."""


class SharedMemory(ABC):
    """Bytes that all ranks share, initially zero.

    Attributes:
        buffer: the bytes, as a ``uint8`` array.
        description: human-readable description for the log.
    """

    buffer: np.ndarray
    description: str

    @abstractmethod
    def lock(self, start: int, count: int = 1) -> AbstractContextManager[object]:
        """Hold locks ``start`` to ``start + count`` inside the ``with`` block; waiting for them takes no CPU time.

        Locks are numbers, not positions in the buffer. A rank holds one range of locks at a time.
        """

    def close(self) -> None:
        """Release the system's resources; the buffer must not be used afterwards. Collective."""


class LocalMemory(SharedMemory):
    """Memory of the only rank."""

    description = "memory of this process"

    def __init__(self, nbytes: int) -> None:
        self.buffer = np.zeros(nbytes, np.uint8)

    def lock(self, start: int, count: int = 1) -> AbstractContextManager[object]:
        """Return a context that locks nothing: there is no other rank."""
        return nullcontext()


@dataclass(frozen=True)
class Arrival:
    """A message that has arrived but has not been received yet.

    Attributes:
        source: the rank that sent it.
        tag: its tag.
        receive: receives it into an array of its size.
    """

    source: int
    tag: int
    receive: Callable[[np.ndarray], None]


class Messages:
    """Sends and receives arrays through mpi4py; messages from one rank arrive in the order in which they were sent.

    Args:
        comm: a communicator that nothing else uses.

    Attributes:
        rank: this rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()

    def send(self, data: np.ndarray, rank: int, tag: int) -> Any:
        """Start to send; return a request for :meth:`wait` or :meth:`done`. The data must stay unchanged until then."""
        return self._comm.Isend(data, rank, tag)

    def receive(self, out: np.ndarray, rank: int, tag: int) -> Any:
        """Start to receive into ``out``; return the request for :meth:`wait`."""
        return self._comm.Irecv(out, rank, tag)

    def done(self, request: Any) -> bool:
        """Return whether a request is complete."""
        return bool(request.Test())

    def wait(self, request: Any) -> None:
        """Wait for a request, sleeping."""
        pause = SHORT
        while not request.Test():
            time.sleep(pause)
            pause = min(LONG, pause * 1.1)

    def next(self) -> Arrival | None:
        """Return the next message that has arrived from any rank, or None."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            return None
        return Arrival(status.Get_source(), status.Get_tag(), lambda out: self.wait(message.Irecv(out)))

    def receive_bytes(self, rank: int, tag: int) -> bytes:
        """Wait for a message of unknown length."""
        from mpi4py import MPI

        pause, status = SHORT, MPI.Status()
        while (message := self._comm.Improbe(rank, tag, status)) is None:
            time.sleep(pause)
            pause = min(LONG, pause * 1.1)
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.wait(message.Irecv(data))
        return data.tobytes()

    def barrier(self) -> None:
        """Wait for all ranks, sleeping."""
        self.wait(self._comm.Ibarrier())

    def alive(self) -> bool:
        """Return whether MPI has not ended."""
        from mpi4py import MPI

        return not MPI.Is_finalized()

    def abort(self) -> None:
        """End all processes of the job."""
        self._comm.Abort(1)

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()
