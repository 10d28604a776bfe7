"""Where the center lives: on every rank, on the root alone, or a part of it on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.layout import Bucket, Layout, chunk


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
        self._rank, self._size, self._root = communicator.rank, communicator.size, root

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

    def moves(self, bytes_of_bucket: int) -> int:
        """Return the bytes that :meth:`fetch` hands to a collective."""
        return 0

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return what a checkpoint holds of the center optimizer, given its state on this rank."""
        return state

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


class Replicated(Placement):
    """Every rank holds the whole center and moves it by the same arithmetic."""

    name = "replicated"
    everywhere = True

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Everything."""
        return 0, bucket.size

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """It is here."""
        return share

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """All-reduce, or broadcast from the root."""
        return _reduced(communicator, buffer, name, op, self._root)


class Root(Placement):
    """The root alone holds the center, and broadcasts it. Horovod has no reduction to one rank: it reduces to all."""

    name = "root"

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Everything on the root, nothing elsewhere."""
        return 0, bucket.size if self._rank == self._root else 0

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Broadcast from the root."""
        return communicator.broadcast(share if self._rank == self._root else out, name, self._root)

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """All-reduce, or broadcast from the root."""
        return _reduced(communicator, buffer, name, op, self._root)

    def moves(self, bytes_of_bucket: int) -> int:
        """The root sends all of it."""
        return bytes_of_bucket if self._rank == self._root else 0

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Give all ranks the root's state, so that any of them may save."""
        return communicator.allgather_object(state if self._rank == self._root else None, name)[self._root]

    def select(self, saved: Any) -> Any:
        """Return all of it on the root."""
        saved = super().select(saved)
        return saved if self._rank == self._root else None


class Sharded(Placement):
    """Rank k holds the k-th chunk of every bucket: reduce-scatter, move, all-gather."""

    name = "sharded"

    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """One n-th."""
        return chunk(bucket.size, self._rank, self._size)

    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """All-gather."""
        return communicator.allgather(share, name, out=out)

    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """Reduce-scatter."""
        if op != "sum":
            raise ValueError(f"Only sums can be scattered over ranks. Received: {op!r}")
        return communicator.reducescatter(buffer, name)

    def moves(self, bytes_of_bucket: int) -> int:
        """One n-th."""
        start, stop = chunk(bytes_of_bucket, self._rank, self._size)
        return stop - start

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return the states of all ranks."""
        return {"sharded": communicator.allgather_object(state, name)}

    def select(self, saved: Any) -> Any:
        """Return the state of this rank."""
        states = saved.get("sharded") if isinstance(saved, dict) else None
        if saved is not None and (states is None or len(states) != self._size):
            raise ValueError(
                f"The state of the center optimizer was not saved with center='sharded' on {self._size} ranks: load it "
                "with the placement and the number of ranks that it was saved with, or start anew from the saved center"
            )
        return None if states is None else states[self._rank]


def _reduced(communicator: Communicator, buffer: Any, name: str, op: str, root: int) -> Callable[[], Any]:
    if op != "root":
        return communicator.allreduce(buffer, name, op)
    received = communicator.broadcast(buffer, name, root)
    return lambda: received


PLACEMENTS: dict[str, type[Placement]] = {placement.name: placement for placement in (Replicated, Root, Sharded)}
"""The placements by the name that users give them."""


def placement_of(center: object) -> type[Placement]:
    """Return the placement of this name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(center, str) or center not in PLACEMENTS:
        raise ValueError(f"`center` must be one of {tuple(PLACEMENTS)}. Received: center={center!r}")
    return PLACEMENTS[center]
