"""Sends the messages of a group of tensors, and keeps the parts that a lossy wire did not send (error feedback)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.base import Communicator
from hvd_periodic.participation.rows import TouchedRows
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Link, Residual, Sent, Wire
from hvd_periodic.wires.encoded import Encoded, row_length

V = TypeVar("V")

RESIDUAL = "unsent"
"""Key of the worker's vector that holds the residual of its messages, in saved states."""

SECOND_HOP_RESIDUAL = "unsent_sums"
"""Prefix of the key of the residual of the sums that this rank forms for the others."""


class Packed(NamedTuple, Generic[V]):
    """A message for one receiver.

    Attributes:
        payload: its bytes.
        decoded: the message as the receiver sees it.
        residual: the part that was not sent; None if none is kept.
    """

    payload: V
    decoded: V
    residual: V | None


class ErrorFeedback(Generic[V]):
    """Sends messages; the residual of each, the part that a lossy wire did not send, is added to the next one.

        m = message + β e,   e ← m − sent

    Args:
        name: name of the group.
        layout: layout of its values.
        placement: where the center lives, which determines how messages are summed.
        replica: provides the verbs of the front end, and memory.
        algorithm: determines how messages are reduced, and whether their residuals are kept here or in the replica.
        wire: encoding of the messages.
        communicator: the ranks, on which the wire may form sums.
        overlapped: local steps continue while messages are in flight.
        error_decay: β, the part of a residual that is added to the next message; the rest is forgotten.

    Attributes:
        wire: as given.
        residual: the residual of this rank's messages; None if none is kept.
        second_hop_residual: the residual of the sums that this rank forms for the others, of the same size on all
            ranks; None if it forms none.
        second_hop_key: key of this residual in saved states; no other rank has the same.
        untouched: what is known of rows that no gradient has reached; None except for tables in elastic averaging.
        received_totals: totals that are known before their messages are sent, by the index of the bucket.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        placement: Placement,
        replica: Replica[V],
        algorithm: Algorithm,
        wire: Wire,
        communicator: Communicator,
        overlapped: bool,
        error_decay: float = 1.0,
    ) -> None:
        self.wire, self._placement, self._replica, self._reduction = wire, placement, replica, algorithm.reduction
        self._touched = TouchedRows.of_parameters(name, wire, replica, layout, algorithm, communicator)
        self.untouched = None if self._touched is None else self._touched.untouched
        self.received_totals: dict[int, V] = {}
        self._decay = error_decay
        self.residual: Store[V] | None = None
        if wire.lossy and algorithm.uses_error_feedback:
            self.residual = replica.new_store(layout, f"{name}.{RESIDUAL}")
        self.second_hop_residual: Store[V] | None = None
        self.second_hop_key = ""
        self._name, self._layout, self._lasting = name, layout, overlapped
        self.join(communicator)

    def join(self, communicator: Communicator) -> None:
        """Form sums for these ranks, if the wire forms any; the residual is lost if their number has changed."""
        if self.untouched is not None:
            self.untouched.join(communicator)
        if not self.wire.forms_sums(communicator, self._lasting):
            return
        rows = self._layout.restrict(
            lambda bucket: (0, 0 if self._of_table(bucket) else row_length(bucket.size, communicator.size))
        )
        if self.second_hop_residual is None or self.second_hop_residual.layout.specs != rows.specs:
            self._replica.drop_store(f"{self._name}.{SECOND_HOP_RESIDUAL}")
            self.second_hop_residual = self._replica.new_store(rows, f"{self._name}.{SECOND_HOP_RESIDUAL}")
        self.second_hop_key = f"{SECOND_HOP_RESIDUAL}.{communicator.rank}.{communicator.size}"

    def send(
        self,
        communicator: Communicator,
        bucket: Bucket,
        message: V,
        name: str,
        exchange: Exchange,
        weights: Sequence[tuple[int, int, float | None]] = (),
    ) -> Sent[V]:
        """Send a message together with the residual of earlier ones; may overwrite it.

        Args:
            communicator: the ranks.
            bucket: the bucket.
            message: the message, with zeros where this worker is absent: there its residual waits; anything if the
                total has been received.
            name: name of the collective.
            exchange: the exchange.
            weights: the ranges in which this worker has one weight, 0 where it is absent; None where all are, so that
                the residual of sums waits as well.
        """
        if bucket.index in self.received_totals:
            total = self.received_totals.pop(bucket.index)
            return Sent(lambda: total, None, bucket.nbytes)

        def reduce(buffer: Any, name: str) -> Callable[[], Any]:
            return self._placement.reduce(communicator, buffer, name, self._reduction)

        space, sums = self._replica.space, self.second_hop_residual
        of_sums = None
        if sums is not None and not self._of_table(bucket):
            row = sums.layout.buckets[bucket.index]
            first = communicator.rank * row.size
            unmoved = [(start - first, stop - first) for start, stop, weight in weights if weight is None]
            within = [(max(start, 0), min(stop, row.size)) for start, stop in unmoved]
            of_sums = Residual(sums, row, space, [each for each in within if each[0] < each[1]])
        link = Link(communicator, name, bucket.size, bucket.nbytes, reduce, space.coding, of_sums)
        if self.residual is None:
            return self._start(link, bucket, message, exchange)
        of_message = Residual(
            self.residual, bucket, space, [(start, stop) for start, stop, weight in weights if not weight]
        )
        residual = of_message.read()
        message = space.axpy(self._decay, residual, message)
        sent = self._start(link, bucket, message, exchange)
        decoded = message if sent.decoded is None else sent.decoded
        of_message.write(space.sub(message, decoded, out=residual))
        return sent

    def pack(self, bucket: Bucket, message: V, ranks: int) -> Packed[V]:
        """Return a message, with the residual of earlier ones if any are kept, for one receiver.

        Residuals do not change, see :meth:`keep`. May overwrite the message.

        Args:
            bucket: the bucket.
            message: the message.
            ranks: the number of messages that the receiver sums.
        """
        space = self._replica.space
        if self.residual is not None:
            message = space.axpy(self._decay, self.residual.read(bucket), message)
        payload, decoded = cast(Encoded, self.wire).pack(space.coding, message, ranks)
        return Packed(payload, decoded, None if self.residual is None else space.sub(message, decoded))

    def keep(self, bucket: Bucket, packed: Packed[V]) -> None:
        """Set the residual of a bucket, if one is kept, once its message has entered the center."""
        if self.residual is not None and packed.residual is not None:
            Residual(self.residual, bucket, self._replica.space).write(packed.residual)

    def _start(self, link: Link[V], bucket: Bucket, message: V, exchange: Exchange) -> Sent[V]:
        """Start to sum messages; those of tables in the rows that are touched."""
        if self._touched is None or bucket not in self._touched:
            return self.wire.start(link, message)
        return self._touched.start(link, bucket, message, exchange)

    def _of_table(self, bucket: Bucket) -> bool:
        return self._touched is not None and bucket in self._touched

    def reset(self) -> None:
        """Set all residuals to zeros; replicas are equal to the center."""
        self.received_totals.clear()
        if self.untouched is not None:
            self.untouched.reset()
        self._clear(self.residual)
        self.reset_second_hop()

    def reset_second_hop(self) -> None:
        """Set the residual of sums to zeros."""
        self._clear(self.second_hop_residual)

    def stores(self) -> dict[str, Store[V]]:
        """Return what this rank keeps besides vectors of the worker and the center, by keys that no other rank has."""
        stores = {} if self.second_hop_residual is None else {self.second_hop_key: self.second_hop_residual}
        return stores if self.untouched is None else stores | self.untouched.stores()

    def touch(self, bucket: Bucket | None = None) -> None:
        """Note that the replica, or a bucket of it, has changed otherwise than by local steps and exchanges."""
        if self.untouched is not None:
            self.untouched.touch(bucket)

    def _clear(self, store: Store[V] | None) -> None:
        if store is not None:
            for bucket in store.layout.buckets:
                space = self._replica.space
                Residual(store, bucket, space).write(space.zeros_like(store.read(bucket)))
