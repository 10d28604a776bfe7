"""A single rank, which has no other rank to exchange with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.launchers import started_alone
from hvd_periodic.comm.memory import LocalMemory, SharedMemory
from hvd_periodic.logs import logger, set_up


class LocalCommunicator(Communicator):
    """The communicator of a job with one process.

    Example:
        >>> LocalCommunicator().allgather_object("me", "names")
        ['me']
    """

    rank = 0
    size = 1
    description = "one process"
    processes = False

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the buffer itself."""
        return buffer

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the buffer itself."""
        return buffer

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Return the buffer itself."""
        return lambda: (buffer, [len(buffer)])

    def tile(self, buffer: Any, times: int) -> Any:
        """Return the buffer itself: there is one rank, and one copy per rank."""
        return buffer

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the one value."""
        return [value]

    def shares_memory(self) -> bool:
        """Return that the only rank shares memory with itself."""
        return True

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return memory of this process."""
        return LocalMemory(nbytes)


def only_rank() -> LocalCommunicator | None:
    """Return the communicator of this process as its job's only rank; None if a launcher has started others."""
    return _only_rank() if started_alone() else None


@cache
def _only_rank() -> LocalCommunicator:
    """Return the one communicator that numbers all optimizers of this process; log once that it trains alone."""
    set_up()
    logger.warning("No launcher has started other processes: this one trains alone, as the only rank")
    return LocalCommunicator()
