"""What every communicator provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hvd_periodic.arguments import require_int


class Communicator(ABC):
    """Collectives over a fixed set of ranks.

    All ranks call the same methods in the same order with the same names. Buffers are contiguous one-dimensional arrays
    of the communicator's own kind (numpy arrays, tensors), with fewer than 2³¹ elements.

    Attributes:
        rank: this process within the set, from 0.
        size: number of ranks in the set.
    """

    rank: int
    size: int
    _names = 0

    def unique_name(self) -> str:
        """Return a prefix for the names of collectives: the k-th call returns the same on every rank."""
        self._names += 1
        return f"hvd_periodic.{self._names}"

    @abstractmethod
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce ``buffer`` over ranks; call what is returned to wait for the result.

        The result is identical to the bit on all ranks, and may have replaced the contents of ``buffer``.

        Args:
            buffer: this rank's values; not to be touched until the result is there.
            name: names the collective; the same on all ranks, unique among those in flight.
            op: ``"sum"`` or ``"max"``.
        """

    @abstractmethod
    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the values of rank ``root``; may overwrite ``buffer``."""

    @abstractmethod
    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to sum ``buffer`` over ranks; what is returned waits for this rank's chunk of the result.

        Chunks are those of :func:`hvd_periodic.layout.chunk`.

        Args:
            buffer: this rank's values, of the same size on all ranks; not to be touched until the result is there.
            name: as in :meth:`allreduce`.
        """

    @abstractmethod
    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the buffers of all ranks, one after another; their sizes may differ. May be written into ``out``."""

    @abstractmethod
    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""

    def rank_of(self, global_rank: int) -> int:
        """Return the rank within this set of a rank that the job knows as ``global_rank``.

        Raises:
            TypeError: it is not an int.
            ValueError: it is not in the set.
        """
        if require_int(global_rank, "`root_rank`", minimum=0) >= self.size:
            raise ValueError(f"`root_rank` must be one of the ranks 0 to {self.size - 1}. Received: {global_rank!r}")
        return global_rank
