"""Memory that all ranks share, with locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import numpy as np


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
