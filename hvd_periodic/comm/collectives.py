"""The collectives of a communicator: the part that moves data, and all that an extender writes."""

from __future__ import annotations

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np


class Collectives(ABC):
    """Collectives over a fixed set of ranks.

    A subclass sets :attr:`rank` and :attr:`size` and defines the five abstract methods. The other methods follow from
    these; override one if the library has a faster way, or, for :meth:`tile`, :meth:`maximum` and :meth:`alltoall`, if
    buffers have other methods than numpy arrays.

    All ranks call the same methods in the same order with the same names. Buffers are contiguous one-dimensional arrays
    of the communicator's kind (numpy arrays, tensors), with fewer than 2³¹ elements.

    Attributes:
        rank: this process within the set, from 0.
        size: number of ranks in the set.
        sums: 16-bit types that collectives can sum: ``"f2"``, float16; ``"bf2"``, bfloat16.
        native: the class of the buffers, if another front end's are to be converted: see :meth:`of_array`.
    """

    rank: int
    size: int
    sums: ClassVar[frozenset[str]] = frozenset()
    native: type = np.ndarray
    piggyback_limit_bytes: int = 0
    """Largest size in bytes, over all ranks, of messages that are sent along with the handshake."""
    busy_waits: bool = False
    """Whether waiting for a collective takes CPU time from the cores that train."""
    description: str = "a communicator of the user"
    """Human-readable description."""

    @abstractmethod
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce ``buffer`` over ranks; call the returned function to wait for the result.

        The result is bitwise identical on all ranks, and may have replaced the contents of ``buffer``.

        Args:
            buffer: this rank's values; must not be used until the result has arrived.
            name: name of the collective; the same on all ranks, unique among collectives in flight.
            op: ``"sum"`` or ``"max"``.
        """

    @abstractmethod
    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the values of rank ``root``; may overwrite ``buffer``."""

    @abstractmethod
    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to sum ``buffer`` over ranks; the returned function waits for this rank's chunk of the result.

        Chunks are cut by :func:`hvd_periodic.vectors.layout.chunk`.

        Args:
            buffer: this rank's values, of the same size on all ranks; must not be used until the result has arrived.
            name: as in :meth:`allreduce`.
        """

    @abstractmethod
    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the concatenated buffers of all ranks, whose sizes may differ; may write them into ``out``."""

    @abstractmethod
    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start :meth:`allgather` of buffers of equal size; the returned function waits. By default, gather at once."""
        gathered = self.allgather(buffer, name, out)
        return lambda: gathered

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to send each rank its part of ``buffer``; the returned function waits for this rank's parts from all.

        Args:
            buffer: n parts of equal size, in rank order; may be overwritten.
            name: as in :meth:`allreduce`.
        """
        everything = self.allgather(buffer, name)
        return lambda: everything.reshape(self.size, self.size, -1)[:, self.rank].reshape(-1)

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Start to send each rank its part of ``buffer``: parts of ``counts`` elements, in rank order.

        The returned function waits for the received elements, in rank order, and their number from each rank.
        """
        gathered = self.allgather_object((np.array(buffer), counts), name)
        parts = [np.split(values, np.cumsum(given)[:-1])[self.rank] for values, given in gathered]
        return lambda: (np.concatenate(parts), [len(part) for part in parts])

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the integers of all ranks, in rank order, as int64; their number may differ between ranks."""
        return np.concatenate(self.allgather_object(values, name))

    def broadcast_object(self, value: object, name: str, root: int) -> Any:
        """Return the picklable value of rank ``root``; the values of the others are not sent."""
        return self.allgather_object(value if self.rank == root else None, name)[root]

    def send_object(self, value: object, to: int, name: str) -> dict[int, Any]:
        """Send a picklable value to one rank; return the values that ranks have sent to this one, by sender."""
        given = enumerate(self.allgather_object((to, value), name))
        return {rank: value for rank, (receiver, value) in given if receiver == self.rank}

    def tile(self, buffer: Any, times: int) -> Any:
        """Return ``times`` concatenated copies of a buffer; local."""
        return np.tile(buffer, times)

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum; local."""
        return x.clip(y)

    def of_array(self, array: np.ndarray) -> Any:
        """Return an array as a buffer of these collectives, which may share its memory; local."""
        return array

    def carries(self, kind: type) -> bool:
        """Return whether the collectives carry buffers of a class, such as ``torch.Tensor``, in host memory."""
        return True

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Raise a ValueError if the collectives cannot carry tensors of a kind of device, such as ``"cuda"``."""


MAX_BYTES = 2**30
"""Maximum number of bytes, over all ranks, that one collective gathers for an object."""


def gather_objects(value: object, allgather: Callable[[np.ndarray, str], np.ndarray], name: str) -> list[Any]:
    """Return the picklable values of all ranks, in rank order, sent in as many pieces as necessary.

    ``allgather`` returns the concatenated arrays of all ranks, whose sizes may differ.
    """
    data = pickled(value)
    sizes = np.asarray(allgather(np.array([data.size], dtype=np.int64), f"{name}.sizes"))
    piece = max(MAX_BYTES // len(sizes), 1)
    if sizes.max() <= piece:
        parts = np.split(np.asarray(allgather(data, f"{name}.data")), np.cumsum(sizes)[:-1])
        return [pickle.loads(part.data) for part in parts]
    whole = [np.empty(size, np.uint8) for size in sizes]
    for start in range(0, int(sizes.max()), piece):
        held = [one[start : start + piece] for one in whole]
        gathered = np.asarray(allgather(data[start : start + piece], f"{name}.data"))
        for mine, part in zip(held, np.split(gathered, np.cumsum([len(one) for one in held])[:-1]), strict=True):
            mine[:] = part
    del data
    return [pickle.loads(whole.pop(0).data) for _ in sizes]  # Keep few copies of large objects.


def pickled(value: object) -> np.ndarray:
    """Return a picklable value as bytes."""
    stream = io.BytesIO()
    pickle.dump(value, stream)
    return np.frombuffer(stream.getbuffer(), dtype=np.uint8)
