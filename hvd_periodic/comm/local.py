"""A single rank: nothing to exchange with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.memory import LocalMemory, SharedMemory


class LocalCommunicator(Communicator):
    """The communicator of a job of one process.

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

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the one value."""
        return [value]

    def shares_memory(self) -> bool:
        """Return that the only rank shares memory with itself."""
        return True

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return memory of this process."""
        return LocalMemory(nbytes)
