"""What leaves a rank: the messages of a group of tensors, as a wire encodes them, and what it could not send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.encoded import row_bounds
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")

UNSENT_SUMS = "unsent_sums"


class Outbox(Generic[V]):
    """Sends messages.

    Args:
        name: of the group.
        layout: of its values.
        placement: where the center lives, and so how messages are summed.
        replica: knows the verbs of the front end.
        reduction: ``"sum"``, ``"max"`` or ``"root"``.
        wire: how messages are encoded.
        communicator: the ranks, if the wire is to form sums on them.
        lasting: local steps go on while messages travel.

    Attributes:
        unsent: what this rank has not sent of the sums that it has formed; None where it forms none.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        placement: Placement,
        replica: Replica[V],
        reduction: str = "sum",
        wire: Wire = Plain(),  # noqa: B008
        communicator: Communicator | None = None,
        lasting: bool = False,
    ) -> None:
        self.wire, self._placement, self._replica, self._reduction = wire, placement, replica, reduction
        self.unsent: Store[V] | None = None
        if communicator is not None and wire.forms_sums(communicator, lasting):
            rank, size = communicator.rank, communicator.size
            own = layout.restrict(lambda bucket: row_bounds(bucket.size, rank, size))
            self.unsent = replica.new_store(own, f"{name}.{UNSENT_SUMS}")

    def send(self, communicator: Communicator, bucket: Bucket, message: V, name: str) -> Sent[V]:
        """Let a message travel; may overwrite it."""

        def reduce(buffer: Any, name: str) -> Callable[[], Any]:
            return self._placement.reduce(communicator, buffer, name, self._reduction)

        remembered = None if self.unsent is None else _OfBucket(self.unsent, self.unsent.layout.buckets[bucket.index])
        coding = self._replica.space.coding
        return self.wire.start(
            Link(communicator, name, bucket.size, bucket.nbytes, reduce, coding, remembered), message
        )

    def forget(self) -> None:
        """Forget what was not sent of sums."""
        if self.unsent is not None:
            for bucket in self.unsent.layout.buckets:
                if bucket.size:
                    self.unsent.write(bucket, self._replica.space.zeros_like(self.unsent.read(bucket)))


@dataclass(frozen=True)
class _OfBucket(Generic[V]):
    """A bucket of a store."""

    store: Store[V]
    bucket: Bucket

    def read(self) -> V:
        """Return its values."""
        return self.store.read(self.bucket)

    def write(self, value: V) -> None:
        """Set them."""
        if self.bucket.size:
            self.store.write(self.bucket, value)
