"""Transports of asynchronous exchange: memory that all ranks share, and messages between two ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, in rank order; collective."""

SHORT, LONG = 5e-5, 2e-3
"""Polling intervals in seconds: of a message in flight, and after nothing has arrived for a while.

A rank that waits sleeps: waiting inside MPI would take a core from ranks that compute.
"""


RECORD = 4
"""64-bit integers of a record in the log of a shared memory."""


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
    def reserve(self, start: int, stop: int) -> bool:
        """Provide memory for bytes that had none at first; return whether there is enough."""

    @abstractmethod
    def try_lock(self, number: int) -> bool:
        """Hold a lock, unless another rank does; return whether this one holds it now.

        Locks are numbers, not positions in the buffer.
        """

    @abstractmethod
    def unlock(self, number: int) -> None:
        """Release a lock."""

    @abstractmethod
    def append(self, record: list[int]) -> None:
        """Append a record of :data:`RECORD` 64-bit integers to the log of the memory: all of it, or nothing.

        Records of all ranks come one after the other, in an order in which all read them.
        """

    @abstractmethod
    def records(self, start: int) -> list[list[int]]:
        """Return records of the log from one on, perhaps not all; none if there are no more.

        There are zeros in place of those that have been forgotten.
        """

    @abstractmethod
    def forget(self, stop: int) -> None:
        """Release the memory of records before this one, or of most of them; this rank must hold no lock."""

    def close(self) -> None:
        """Release the system's resources; the buffer must not be used afterwards. Collective."""


class LocalMemory(SharedMemory):
    """Memory of the only rank."""

    description = "memory of this process"

    def __init__(self, nbytes: int) -> None:
        self.buffer = np.zeros(nbytes, np.uint8)
        self._log: list[list[int]] = []
        self._forgotten = 0
        self._of_log = Lock()

    def reserve(self, start: int, stop: int) -> bool:
        """Return True: a process gets memory when it is used."""
        return True

    def try_lock(self, number: int) -> bool:
        """Return True."""
        return True

    def unlock(self, number: int) -> None:
        """Do nothing."""

    def append(self, record: list[int]) -> None:
        """Append to a list."""
        with self._of_log:
            self._log.append(record)

    def records(self, start: int) -> list[list[int]]:
        """Return part of the list."""
        with self._of_log:
            if start < self._forgotten:
                return [[0] * RECORD]
            return self._log[start - self._forgotten :]

    def forget(self, stop: int) -> None:
        """Remove records from the list."""
        with self._of_log:
            stop = max(self._forgotten, stop)
            self._log, self._forgotten = self._log[stop - self._forgotten :], stop


@dataclass(frozen=True)
class Arrival:
    """A message that was received.

    Attributes:
        source: the rank that sent it.
        tag: its tag.
        data: its elements.
    """

    source: int
    tag: int
    data: np.ndarray


class PeerLostError(RuntimeError):
    """Another rank has ended, or its connection is broken: what it was to send, or to receive, is lost."""


class Request(Protocol):
    """A message that is being sent or received."""

    def done(self) -> bool:
        """Return whether it has been sent or received, or never will be."""

    def wait(self) -> None:
        """Wait until it has been sent or received; waiting takes no CPU time.

        Raises:
            PeerLostError: the other rank has ended, where that can be noticed.
        """


class Messages(ABC):
    """Sends arrays to other ranks, and receives them.

    Messages from one rank arrive in the order in which they were sent, and are received in that order: one that is not
    received may hold up those after it. The receiver provides the memory; it knows the dtype and the size of every
    message from its tag. A rank sends nothing to itself.

    Attributes:
        rank: this rank.
    """

    rank: int

    @abstractmethod
    def send(self, data: np.ndarray, rank: int, tag: int) -> Request:
        """Start to send; the data must stay unchanged until the request is done."""

    @abstractmethod
    def receive(self, out: np.ndarray, rank: int, tag: int) -> Request:
        """Start to receive into ``out``, which has the dtype and the size of the message, and is contiguous."""

    @abstractmethod
    def next(self, allocate: Callable[[int], np.ndarray]) -> Arrival | None:
        """Return the next message from any rank that :meth:`receive` does not wait for, or None.

        Args:
            allocate: returns memory for a message, given its tag; raises a ValueError if no message has this tag.
        """

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Sleep for about that long; implementations that notice the arrival of a message wake up."""

    @abstractmethod
    def alive(self) -> bool:
        """Return whether messages can still travel."""

    @abstractmethod
    def abort(self) -> None:
        """End this process, and the job with it."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, once all messages have been received; collective."""
