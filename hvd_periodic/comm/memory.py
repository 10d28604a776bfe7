"""Memory that all ranks see, with locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import numpy as np


class NoSharedMemoryError(RuntimeError):
    """Ranks of one host cannot share so much memory; raised on all of them."""


class SharedMemory(ABC):
    """The same bytes on all ranks, zeros at first.

    Attributes:
        buffer: the bytes, as a ``uint8`` array.
        description: what it is, for the log.
    """

    buffer: np.ndarray
    description: str

    @abstractmethod
    def lock(self, start: int, count: int = 1) -> AbstractContextManager[object]:
        """Hold locks ``start`` to ``start + count`` inside the block; waiting for them takes no processor time.

        Locks are numbers, not places in the buffer. A rank holds one block at a time.
        """

    def close(self) -> None:
        """Release what the system has lent; the buffer must not be used afterwards. Collective."""


class LocalMemory(SharedMemory):
    """Memory of the only rank."""

    description = "memory of this process"

    def __init__(self, nbytes: int) -> None:
        self.buffer = np.zeros(nbytes, np.uint8)

    def lock(self, start: int, count: int = 1) -> AbstractContextManager[object]:
        """Nobody else is there."""
        return nullcontext()
