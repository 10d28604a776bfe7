"""Buffers of a front end over a communicator that carries another kind: through arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from hvd_periodic.comm.collectives import Collectives


class Memory(Protocol):
    """Converts the buffers of a front end to host arrays and back."""

    def to_host(self, buffer: Any) -> np.ndarray:
        """Return the values of a buffer as a writable array, in the buffer's own memory if that is in the host's."""

    def from_host(self, array: np.ndarray, like: Any) -> Any:
        """Return an array as a buffer of the kind and on the device of ``like``; may share the array's memory."""


class ArrayMemory:
    """The memory of a front end whose buffers are arrays."""

    def to_host(self, buffer: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return buffer

    def from_host(self, array: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return array


class Staged(Collectives):
    """Base of communicators that carry buffers of a front end by the collectives of their other base class.

    Each buffer is converted to an array in host memory, which is converted to a buffer of the other class, and the
    result takes the same way back. Buffers that the other class carries itself pass unchanged. A subclass sets
    :attr:`memory` and derives from this class first.

    Attributes:
        memory: the memory of the front end.

    Example:
        >>> from hvd_periodic.comm.local import LocalCommunicator
        >>> class Texts:
        ...     def to_host(self, buffer):
        ...         return np.frombuffer(buffer.encode(), np.uint8).copy()
        ...     def from_host(self, array, like):
        ...         return array.tobytes().decode()
        >>> class TextCommunicator(Staged, LocalCommunicator):
        ...     memory = Texts()
        >>> TextCommunicator().broadcast("a text", "texts", 0)
        'a text'
    """

    memory: ClassVar[Memory]

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce."""
        return self._received(self._carrier.allreduce(self._sent(buffer), name, op), buffer)

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast."""
        result = self._carrier.broadcast(self._sent(buffer), name, root)
        return self._received(lambda: result, buffer)()

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to reduce and scatter."""
        return self._received(self._carrier.reducescatter(self._sent(buffer), name), buffer)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into a new buffer."""
        given = out if self._carries(buffer) and _writable(out) else None
        result = self._carrier.allgather(self._sent(buffer), name, given)
        return self._received(lambda: result, buffer)()

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to gather into a new buffer."""
        sent = self._sent(buffer)
        given = out if self._carries(buffer) and _writable(out) else self._carrier.tile(sent, self.size)
        return self._received(self._carrier.begin_allgather(sent, name, given), buffer)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to exchange parts."""
        return self._received(self._carrier.alltoall(self._sent(buffer), name), buffer)

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Start to send each rank its part."""
        wait = self._carrier.scatter(self._sent(buffer), counts, name)

        def finish() -> tuple[Any, Sequence[int]]:
            received, given = wait()
            return self._received(lambda: received, buffer)(), given

        return finish

    def carries(self, kind: type) -> bool:
        """Return True: any buffers of the front end."""
        return True

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Do nothing: buffers of any device pass through host memory."""

    def tile(self, buffer: Any, times: int) -> Any:
        """Return ``times`` concatenated copies of a buffer."""
        return self._received(lambda: self._carrier.tile(self._sent(buffer), times), buffer)()

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum."""
        return self._received(lambda: self._carrier.maximum(self._sent(x), self._sent(y)), x)()

    @property
    def _carrier(self) -> Any:
        """The collectives of the other base class."""
        return super()

    def _carries(self, buffer: Any) -> bool:
        return isinstance(buffer, self.native)

    def _sent(self, buffer: Any) -> Any:
        """Return a buffer that the other base class carries, and may overwrite."""
        if not _writable(buffer):
            buffer = buffer.copy()
        return buffer if self._carries(buffer) else self.of_array(self.memory.to_host(buffer))

    def _received(self, wait: Callable[[], Any], buffer: Any) -> Callable[[], Any]:
        """Return a function that waits for a result, and returns it as a buffer of the kind that was sent."""
        if self._carries(buffer):
            return wait
        return lambda: self.memory.from_host(np.asarray(wait()), buffer)


def _writable(buffer: Any) -> bool:
    """Return False for an array that represents memory which nothing may change, such as that of a variable."""
    return not isinstance(buffer, np.ndarray) or buffer.flags.writeable
