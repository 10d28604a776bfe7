"""Exchanges that travel while training goes on: what begins at one step and is taken some steps later."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from hvd_periodic.algorithms.base import Exchange, State
from hvd_periodic.centers.tensor_group import Pending, TensorGroup
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica

V = TypeVar("V")


@dataclass
class UnderWay(Generic[V]):
    """The exchange of one group of tensors, between its beginning and the step at which the replica takes it.

    The center moves as soon as somebody looks: before the next exchange nothing but the pull of the replica reads it,
    so that looking early changes nothing about training.

    Args:
        group: whose exchanges last.
        communicator: the ranks.
        exchange: which it is.
        prefix: of the names of its collectives.
        pending: what :meth:`TensorGroup.begin` has returned of the buckets; nothing where the center has moved.

    Attributes:
        sent: bytes handed to collectives.
    """

    group: TensorGroup[V]
    communicator: Communicator
    exchange: Exchange
    prefix: str
    pending: list[Pending[V]] = field(default_factory=list)
    sent: int = 0
    _moved: list[State[V] | None] = field(default_factory=list)

    def begin(self) -> UnderWay[V]:
        """Let all messages travel; return this."""
        for bucket in self.group.values.layout.buckets:
            pending, sent = self.group.begin(bucket, self.communicator, self.exchange, self.prefix)
            self.pending.append(pending)
            self.sent += sent
        return self

    def arrive(self) -> None:
        """Wait for what travels, and move the center; once."""
        if self.pending:
            self._moved = [self.group.arrive(pending, self.exchange) for pending in self.pending]
            self.pending = []
            self.group.move_by_outer_optimizer()

    def land(self) -> None:
        """Let the replica take what has come."""
        self.arrive()
        group, buckets = self.group, self.group.values.layout.buckets
        if not group.algorithm.reads_after:
            return
        for bucket, moved in zip(buckets, self._moved or [None] * len(buckets), strict=True):
            handed_out = group.handed_out(self.communicator, bucket, self.exchange, self.prefix, moved)
            group.catch_up(bucket, handed_out, self.exchange)

    def save(self, replica: Replica[V]) -> dict[str, Any] | None:
        """Return what is left to be done, once the center has moved; None where that is nothing."""
        if self.group.snapshot is None:
            return None
        return {"exchange": asdict(self.exchange), "snapshot": replica.save(self.group.snapshot)}

    @classmethod
    def load(
        cls, saved: dict[str, Any], group: TensorGroup[V], communicator: Communicator, prefix: str, replica: Replica[V]
    ) -> UnderWay[V]:
        """Return what :meth:`save` has said of a group."""
        if group.snapshot is not None:
            replica.load(group.snapshot, saved["snapshot"])
        return cls(group, communicator, Exchange(**saved["exchange"]), prefix)
