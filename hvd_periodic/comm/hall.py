"""Where the ranks of one host wait for each other without MPI, and notice who has died."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_periodic.comm.base import awaited
from hvd_periodic.comm.window import WindowMemory

_NUMBER_BITS = 32
"""Of a word: above them the assembly, counted from 1, and in them what the rank waits for."""


class Hall:
    """Every rank has a seat, which the operating system frees when its process ends, however it ends.

    MPI's collectives would wait for a rank that has died, forever; here nobody does.

    A rank writes what it waits for into its word for every other assembly: it comes to the next but one only after all
    have been to the next, so that nobody still reads the word. A third word says that it has left as it should.

    Args:
        memory: of :meth:`nbytes` bytes, which all ranks have opened.
        rank: this one; it has taken its seat when this returns, and all have to have before one of them asks.
        size: number of ranks.
    """

    def __init__(self, memory: WindowMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._words = memory.buffer.view(np.int64).reshape(size, 3)
        self._assemblies = 0
        memory.take_seat(rank)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that so many ranks need."""
        return 24 * size

    def leave(self) -> None:
        """Say that the process of this rank ends as it should."""
        self._words[self._rank, 2] = 1

    def lost(self) -> list[int]:
        """Return the ranks whose processes have ended otherwise."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if not self._memory.is_taken(rank) and not self._words[rank, 2]]

    def assembly(self, number: int) -> Callable[[], int | None]:
        """Start to wait for all ranks that live; as :meth:`Communicator.assembly`."""
        self._assemblies += 1
        mine, place = self._assemblies, self._assemblies % 2
        self._words[self._rank, place] = mine << _NUMBER_BITS | number

        def look() -> int | None:
            numbers = []
            for rank in range(self._size):
                word = int(self._words[rank, place])
                if word >> _NUMBER_BITS == mine:
                    numbers.append(word & (1 << _NUMBER_BITS) - 1)
                elif self._memory.is_taken(rank):
                    return None
            return awaited(numbers)

        return look
