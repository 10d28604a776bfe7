"""Bytes that workers show to each other without a collective, in which a worker that has died would be missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from hvd_periodic.asynchronous.slots import fence
from hvd_periodic.comm.transports import SharedMemory

ROOM = 2**22
"""Most bytes that a worker shows in shared memory; they have memory once it shows some."""


class Board(Protocol):
    """Holds what each worker has shown last.

    Workers count the calls in which they show something: what is shown in one call is not taken for that of another.
    """

    def post(self, call: int, data: bytes, reader: int) -> bool:
        """Show some bytes in a call, at least to one worker; return whether there was room for them."""

    def posted(self, call: int) -> dict[int, bytes]:
        """Return what workers have shown in a call, by worker; nothing on a rank that does not see it."""


class BoardInMemory:
    """The board in memory that all workers share, in which all of them see everything.

    Args:
        allocate: returns shared memory of a given number of bytes, and more that has no memory at first.
        rank: this worker.
        workers: number of workers.
    """

    def __init__(self, allocate: Callable[[int, int], SharedMemory], rank: int, workers: int) -> None:
        self._rank, self._first = rank, 16 * workers
        self._memory = allocate(self._first, workers * ROOM)
        self._words = self._memory.buffer[: self._first].view(np.int64).reshape(workers, 2)
        """By worker: the call in which it has shown something, and the number of bytes."""

    def post(self, call: int, data: bytes, reader: int) -> bool:
        """Show some bytes to all workers, unless there is no memory for them."""
        start = self._start(self._rank)
        if len(data) > ROOM or (data and not self._memory.reserve(start, start + len(data))):
            return False
        self._memory.buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
        fence()
        self._words[self._rank] = call, len(data)
        return True

    def posted(self, call: int) -> dict[int, bytes]:
        """Return what workers have shown in a call."""
        found, words = {}, self._words.tolist()
        fence()
        for worker, (of_call, nbytes) in enumerate(words):
            if of_call == call:
                start = self._start(worker)
                found[worker] = self._memory.buffer[start : start + nbytes].tobytes()
        return found

    def close(self) -> None:
        """Release the memory."""
        del self._words
        self._memory.close()

    def _start(self, worker: int) -> int:
        return self._first + worker * ROOM
