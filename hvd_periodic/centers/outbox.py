"""What leaves a rank: the messages of a group of tensors, as a wire encodes them, and what it could not send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.encoded import row_length
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")

UNSENT = "unsent"
"""Name of the worker's vector that holds what a lossy wire has left of its messages."""

UNSENT_SUMS = "unsent_sums"
"""Name of what it has left of the sums that this rank has formed."""


class Outbox(Generic[V]):
    """Sends messages.

    Args:
        name: of the group.
        layout: of its values.
        placement: where the center lives, and so how messages are summed.
        replica: knows the verbs of the front end.
        algorithm: says how messages are reduced, and who keeps what is not sent of them.
        wire: how messages are encoded.
        communicator: the ranks, if the wire is to form sums on them.
        lasting: local steps go on while messages travel.

    Attributes:
        wire: as given.
        unsent: what this rank has not sent of its messages, and adds to the next ones; None where nothing is kept.
        unsent_sums: the same of the sums that it forms for others, of one size on all ranks; None where it forms none.
        saved_sums: under which name those are saved, which no other rank has.
        delivered: sums that are here before messages are sent, by the index of their bucket.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        placement: Placement,
        replica: Replica[V],
        algorithm: Algorithm,
        wire: Wire = Plain(),  # noqa: B008
        communicator: Communicator | None = None,
        lasting: bool = False,
    ) -> None:
        self.wire, self._placement, self._replica, self._reduction = wire, placement, replica, algorithm.reduction
        self.delivered: dict[int, V] = {}
        self.unsent: Store[V] | None = None
        if wire.lossy and algorithm.uses_error_feedback:
            self.unsent = replica.new_store(layout, f"{name}.{UNSENT}")
        self.unsent_sums: Store[V] | None = None
        self.saved_sums = ""
        self._name, self._layout, self._lasting = name, layout, lasting
        if communicator is not None:
            self.join(communicator)

    def join(self, communicator: Communicator) -> None:
        """Form sums for these ranks, if the wire is to form any; nothing is left of those for another number."""
        if not self.wire.forms_sums(communicator, self._lasting):
            return
        rows = self._layout.restrict(lambda bucket: (0, row_length(bucket.size, communicator.size)))
        if self.unsent_sums is None or self.unsent_sums.layout.specs != rows.specs:
            self._replica.drop_store(f"{self._name}.{UNSENT_SUMS}")
            self.unsent_sums = self._replica.new_store(rows, f"{self._name}.{UNSENT_SUMS}")
        self.saved_sums = f"{UNSENT_SUMS}.{communicator.rank}.{communicator.size}"

    def send(self, communicator: Communicator, bucket: Bucket, message: V, name: str) -> Sent[V]:
        """Let a message travel, with what was left of earlier ones; may overwrite it."""
        if bucket.index in self.delivered:
            total = self.delivered.pop(bucket.index)
            return Sent(lambda: total, None, bucket.nbytes)

        def reduce(buffer: Any, name: str) -> Callable[[], Any]:
            return self._placement.reduce(communicator, buffer, name, self._reduction)

        space, sums = self._replica.space, self.unsent_sums
        remembered = None if sums is None else _OfBucket(sums, sums.layout.buckets[bucket.index])
        link = Link(communicator, name, bucket.size, bucket.nbytes, reduce, space.coding, remembered)
        if self.unsent is None:
            return self.wire.start(link, message)
        left = self.unsent.read(bucket)
        message = space.axpy(1.0, left, message)
        sent = self.wire.start(link, message)
        decoded = message if sent.decoded is None else sent.decoded
        self.unsent.write(bucket, space.sub(message, decoded, out=left))
        return sent

    def forget(self) -> None:
        """Forget what was not sent."""
        self.delivered.clear()
        self._clear(self.unsent)
        self.forget_sums()

    def forget_sums(self) -> None:
        """Forget what was not sent of sums."""
        self._clear(self.unsent_sums)

    def _clear(self, store: Store[V] | None) -> None:
        if store is not None:
            for bucket in store.layout.buckets:
                _OfBucket(store, bucket).write(self._replica.space.zeros_like(store.read(bucket)))


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
