"""Where the center lives: on every rank, on the root alone, or a part of it on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket, Layout


class Placement(ABC):
    """Says which elements of every bucket this rank holds, and moves them between ranks.

    A *share* is what one rank holds: a layout with as many buckets as the whole, each of them a part of its namesake.

    Args:
        communicator: the ranks.
        root: the rank that holds the center, where one does.

    Attributes:
        name: what users call it.
        everywhere: every rank holds the whole, so that reading needs no other rank.
    """

    name: ClassVar[str]
    everywhere: ClassVar[bool] = False

    def __init__(self, communicator: Communicator, root: int) -> None:
        self.join(communicator, root)

    def join(self, communicator: Communicator, root: int) -> None:
        """Be among these ranks, and no longer those before; where the center is everywhere, it stays what it is."""
        self._rank, self._size, self._root = communicator.rank, communicator.size, root

    @property
    def holders(self) -> list[int]:
        """The ranks without which a part of the center is missing."""
        return []

    @abstractmethod
    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return the first and the past-the-last element that this rank holds, counted within the bucket."""

    def share(self, layout: Layout) -> Layout:
        """Return the layout of what this rank holds."""
        whole = all(self.bounds(bucket) == (0, bucket.size) for bucket in layout.buckets)
        return layout if whole else layout.restrict(self.bounds)

    @abstractmethod
    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Return a whole bucket, given this rank's share of it; may be written into ``out``.

        Unless the center is everywhere, all ranks have to call this.
        """

    @abstractmethod
    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """Start to reduce over ranks; what is returned waits for the result, of this rank's share at least."""

    def bytes_to_publish(self, bytes_of_bucket: int) -> int:
        """Return the bytes that :meth:`fetch` hands to a collective."""
        return 0

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return what a checkpoint holds of the center optimizer, given its state on this rank."""
        return state

    def united(self, states: Mapping[int, Any]) -> Any:
        """Return what :meth:`gather` would, given the states of its holders by rank."""
        return next(iter(states.values()), None)

    def select(self, saved: Any) -> Any:
        """Return this rank's state of the center optimizer, out of what :meth:`gather` returned.

        Raises:
            ValueError: it was saved under another placement, or on another number of ranks.
        """
        if isinstance(saved, dict) and saved.get("sharded") is not None:
            raise ValueError(
                f"The state of the center optimizer was saved with center='sharded' on {len(saved['sharded'])} ranks: "
                "load it with the same placement and number of ranks, or start anew from the saved center"
            )
        return saved


def reduced(communicator: Communicator, buffer: Any, name: str, op: str, root: int) -> Callable[[], Any]:
    """Start to reduce a buffer on all ranks, or to broadcast that of the root."""
    if op != "root":
        return communicator.allreduce(buffer, name, op)
    received = communicator.broadcast(buffer, name, root)
    return lambda: received
