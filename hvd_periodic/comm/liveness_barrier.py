"""Barrier of the ranks of one host, which needs no MPI and detects dead ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_periodic.comm.base import awaited
from hvd_periodic.comm.window import WindowMemory

_NUMBER_BITS = 32
"""Low bits of a word, which hold the number the rank waits for; the bits above hold the barrier, counted from 1."""


class LivenessBarrier:
    """Liveness barrier: every rank holds a lock, its seat, which the operating system frees however the process ends.

    MPI's collectives would wait forever for a dead rank; this barrier does not.

    A rank has two words, which it uses in turn, for the number it waits for: it enters the next barrier but one only
    after all ranks have entered the next, when none of them still reads the word. A third word marks a regular end.

    Args:
        memory: shared memory of :meth:`nbytes` bytes, which all ranks have opened.
        rank: this rank, which has its seat when this returns; all must have theirs before any rank calls a method.
        size: number of ranks.
    """

    def __init__(self, memory: WindowMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._words = memory.buffer.view(np.int64).reshape(size, 3)
        self._assemblies = 0
        memory.hold_liveness_lock(rank)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that ``size`` ranks need."""
        return 24 * size

    def leave(self) -> None:
        """Mark the end of this rank's process as regular."""
        self._words[self._rank, 2] = 1

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended without :meth:`leave`."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if not self._memory.is_alive(rank) and not self._words[rank, 2]]

    def begin_idle_barrier(self, number: int) -> Callable[[], int | None]:
        """Start to wait for all live ranks; as :meth:`Communicator.begin_idle_barrier`."""
        self._assemblies += 1
        mine, place = self._assemblies, self._assemblies % 2
        self._words[self._rank, place] = mine << _NUMBER_BITS | number

        def look() -> int | None:
            numbers = []
            for rank in range(self._size):
                word = int(self._words[rank, place])
                if word >> _NUMBER_BITS == mine:
                    numbers.append(word & (1 << _NUMBER_BITS) - 1)
                elif self._memory.is_alive(rank):
                    return None
            return awaited(numbers)

        return look
