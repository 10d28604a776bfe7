"""What every communicator provides."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from hvd_periodic.arguments import require_int
from hvd_periodic.comm.memory import SharedMemory
from hvd_periodic.comm.messages import LONG, Messages


class Communicator(ABC):
    """Collectives over a fixed set of ranks.

    All ranks call the same methods in the same order with the same names. Buffers are contiguous one-dimensional arrays
    of the communicator's own kind (numpy arrays, tensors), with fewer than 2³¹ elements.

    Attributes:
        rank: this process within the set, from 0.
        size: number of ranks in the set.
        processes: whether ranks are processes of their own.
    """

    rank: int
    size: int
    processes: ClassVar[bool] = True
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

    def shares_memory(self) -> bool:
        """Return whether :meth:`shared_memory` is possible. Collective.

        Raises:
            RuntimeError: this communicator is for synchronous exchange only, or not as the job was launched.
        """
        raise RuntimeError(f"{type(self).__name__} cannot exchange asynchronously")

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return memory that all ranks see. Collective."""
        raise RuntimeError(f"The ranks of {type(self).__name__} share no memory")

    def messages(self) -> Messages:
        """Return messages between two of these ranks, apart from all others. Collective.

        Raises:
            RuntimeError: as :meth:`shares_memory`.
        """
        raise RuntimeError(f"{type(self).__name__} has no messages between two ranks")

    def meeting(self, agreed: bool) -> Callable[[], bool | None]:
        """Start to wait for all ranks; return what tells whether all agreed, and None until all are there."""
        everybody = all(self.allgather_object(agreed, "hvd_periodic.meeting"))
        return lambda: everybody

    def meet(self, agreed: bool = True) -> bool:
        """Wait for all ranks, for hours if need be, without taking a core; return whether all agreed."""
        look = self.meeting(agreed)
        while (everybody := look()) is None:
            time.sleep(LONG)
        return everybody

    def alive(self) -> bool:
        """Return whether ranks can still reach each other."""
        return True

    def abort(self) -> None:
        """End the processes of all ranks, if they are processes."""

    def wait_for_job(self) -> None:
        """Wait for all ranks of the job, where it is divided into groups of which all exchange."""

    def depart(self) -> None:
        """Wait until all processes of the job are about to end, where the end of one ends the others' connections."""

    def rank_of(self, global_rank: int | None) -> int:
        """Return the rank within this set of a rank that the job knows as ``global_rank``; of None, the lowest.

        Raises:
            TypeError: it is not an int.
            ValueError: it is not in the set.
        """
        if global_rank is None:
            return 0
        if require_int(global_rank, "`root_rank`", minimum=0) >= self.size:
            raise ValueError(f"`root_rank` must be one of the ranks 0 to {self.size - 1}. Received: {global_rank!r}")
        return global_rank
