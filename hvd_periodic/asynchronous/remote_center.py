"""Placements of a center that workers reach through a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket


class Reader(Protocol):
    """A worker that reads the center, see :class:`.Worker`."""

    @property
    def communicator(self) -> Communicator:
        """All workers."""

    def number(self, part: int, key: str, bucket: Bucket) -> int:
        """Return the number of a bucket of a vector."""

    def read(self, index: int, bucket: Bucket) -> Any:
        """Return the bucket of a number."""


class RemoteCenter(Placement):
    """The center is reached through a transport; each rank reads it without the others.

    Args:
        communicator: the ranks.
        root: the rank that starts and restores the center.
        worker: has the transport to the center.
        part: number of the part.
        key: name of the vector.
    """

    name = "asynchronous"
    reduces = False

    def __init__(self, communicator: Communicator, root: int, worker: Reader, part: int, key: str = "center") -> None:
        super().__init__(communicator, root)
        self._worker, self._part, self._key = worker, part, key

    def of_vector(self, key: str) -> Placement:
        """Return where another vector of the center lives."""
        return type(self)(self._worker.communicator, self._root, self._worker, self._part, key)

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return empty bounds: no element is on this side of the transport."""
        return 0, 0

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Read a bucket through the transport."""
        return self._worker.read(self._worker.number(self._part, self._key, bucket), bucket)

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """Raise: there are no reductions."""
        raise NotImplementedError("Nothing is reduced in asynchronous exchange")


class CenterOfRounds(RemoteCenter):
    """The center is in one piece, in shared memory or on the root; each rank reads it without the others."""

    name = "root"
