"""The interface of placements, which determine where the center lives: on every rank, on the root, or sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.spellings import rename_members
from hvd_periodic.vectors.layout import Bucket, Layout


class Placement(ABC):
    """Determines which elements of every bucket this rank holds, and moves them between ranks.

    The *share* (shard) of a rank is the layout of the elements that it holds: it has as many buckets as the whole, and
    each is a part of the bucket with the same index.

    Args:
        communicator: the ranks.
        root: the rank that holds the center, if only one does.

    Attributes:
        name: the users' name for the placement.
        everywhere: every rank holds the whole center, and can read it without the others.
        reduces: collectives sum the messages of ranks.
    """

    name: ClassVar[str]
    everywhere: ClassVar[bool] = False
    reduces: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_members(cls, bytes_to_hand_out="bytes_to_publish")

    def __init__(self, communicator: Communicator, root: int) -> None:
        self.join(communicator, root)

    def join(self, communicator: Communicator, root: int) -> None:
        """Replace the ranks; a center that is everywhere keeps its values."""
        self._rank, self._size, self._root = communicator.rank, communicator.size, root

    @property
    def holders(self) -> list[int]:
        """The ranks without which a part of the center is missing."""
        return []

    @abstractmethod
    def bounds(self, bucket: Bucket) -> tuple[int, int]:
        """Return the first and past-the-last element that this rank holds, counted within the bucket."""

    def of_vector(self, key: str) -> Placement:
        """Return the placement of a vector that is kept with the center, by name: by default this one."""
        return self

    def share(self, layout: Layout) -> Layout:
        """Return the layout of the elements that this rank holds."""
        return layout.share(self.bounds)

    @abstractmethod
    def fetch(self, communicator: Communicator, share: Any, bucket: Bucket, name: str, out: Any) -> Any:
        """Return a whole bucket, given this rank's share of it; may be written into ``out``.

        Collective, unless the center is everywhere.
        """

    @abstractmethod
    def reduce(self, communicator: Communicator, buffer: Any, name: str, op: str) -> Callable[[], Any]:
        """Start to reduce over ranks; the returned function waits for the result, or this rank's share of it."""

    def bytes_to_publish(self, bytes_of_bucket: int) -> int:
        """Return the bytes that :meth:`fetch` hands to a collective."""
        return 0

    def gather(self, communicator: Communicator, state: Any, name: str) -> Any:
        """Return the state of the center optimizer for a checkpoint, given this rank's state; may be collective."""
        return state

    def united(self, states: Mapping[int, Any]) -> Any:
        """Return what :meth:`gather` returns, given the states of all holders by rank; without communication."""
        return next(iter(states.values()), None)

    def select(self, saved: Any) -> Any:
        """Return this rank's state of the center optimizer, given what :meth:`gather` returned.

        Raises:
            ValueError: it was saved under another placement, or on another number of ranks.
        """
        if isinstance(saved, dict) and saved.get("sharded") is not None:
            raise ValueError(
                f"The state of the center optimizer was saved with center='sharded' on {len(saved['sharded'])} ranks: "
                "load it with the same placement and number of ranks, or start from the saved center"
            )
        return saved


rename_members(Placement, bytes_to_hand_out="bytes_to_publish")


def reduced(communicator: Communicator, buffer: Any, name: str, op: str, root: int) -> Callable[[], Any]:
    """Start to reduce a buffer over all ranks, or broadcast that of the root."""
    if op != "root":
        return communicator.allreduce(buffer, name, op)
    received = communicator.broadcast(buffer, name, root)
    return lambda: received
