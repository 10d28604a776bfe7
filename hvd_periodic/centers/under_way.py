"""Exchanges that travel while training goes on: what begins at one step and is taken some steps later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.centers.tensor_group import Pending, TensorGroup
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.fragments import Fragment

V = TypeVar("V")


@dataclass
class UnderWay(Generic[V]):
    """The exchange of one group of tensors, between its beginning and the step at which the replica takes it.

    The center moves as soon as somebody looks: before the next exchange nothing but the pull of the replica reads it,
    so that looking early changes nothing about training.

    Args:
        group: whose exchanges last; its center is on every rank.
        communicator: the ranks.
        exchange: which it is.
        prefix: of the names of its collectives.
        fragment: what travels.
        pending: what :meth:`TensorGroup.begin` has returned of the buckets; nothing where the center has moved.

    Attributes:
        sent: bytes handed to collectives.
    """

    group: TensorGroup[V]
    communicator: Communicator
    exchange: Exchange
    prefix: str
    fragment: Fragment
    pending: list[Pending[V]] = field(default_factory=list)
    sent: int = 0

    def begin(self) -> UnderWay[V]:
        """Let all messages travel; return this."""
        for bucket in self.fragment.buckets:
            pending, sent = self.group.begin(bucket, self.communicator, self.exchange, self.prefix)
            pending.forget_replica()
            self.pending.append(pending)
            self.sent += sent
        return self

    def arrive(self) -> None:
        """Wait for what travels, and move the center; once."""
        if not self.pending:
            return
        while self.pending:  # Each only once, also where one of them fails.
            self.group.arrive(self.pending.pop(0), self.exchange)
        self.group.move_by_outer_optimizer(self.fragment.index)

    def land(self, moved_on: bool) -> None:
        """Let the replica take what has come.

        Args:
            moved_on: local steps have been taken since the exchange began; otherwise the replica pulls as at once.
        """
        self.arrive()
        group = self.group
        if not group.algorithm.reads_after:
            return
        for bucket in self.fragment.buckets:
            handed_out = group.handed_out(self.communicator, bucket, self.exchange, self.prefix)
            (group.pull_late if moved_on else group.pull)(bucket, handed_out, self.exchange)
