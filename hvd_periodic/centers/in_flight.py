"""Exchanges whose messages are all in flight: during local steps, or until the norm of their mean is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.centers.tensor_group import Pending, TensorGroup
from hvd_periodic.vectors.fragments import Fragment

V = TypeVar("V")


@dataclass
class InFlightExchange(Generic[V]):
    """The exchange of one fragment of a group, between its start and the step at which it is applied to the replica.

    The center moves as soon as it is read. Until the next exchange only the pull of the replica reads it, so that
    reading it early does not change training. Without local steps in between, the exchange is an ordinary one.

    Args:
        group: the group, whose center is on every rank.
        exchange: the exchange.
        fragment: the fragment.
        pending: the buckets in flight; empty once the center has moved.

    Attributes:
        sent: bytes handed to collectives.
    """

    group: TensorGroup[V]
    exchange: Exchange
    fragment: Fragment
    pending: list[Pending[V]] = field(default_factory=list)
    sent: int = 0

    def begin(self) -> InFlightExchange[V]:
        """Send all messages; return this exchange."""
        if self.group.limiter is not None:
            self.exchange, self.sent = self.group.limiter.limit_message(self.exchange, self.fragment.buckets)
        for bucket in self.fragment.buckets:
            pending, sent = self.group.begin(bucket, self.exchange)
            pending.forget_replica()
            self.pending.append(pending)
            self.sent += sent
        return self

    def wait_and_update_center(self) -> None:
        """Wait for the messages and move the center, unless it has moved."""
        if not self.pending:
            return
        if self.group.limiter is not None and self.group.limits_mean:
            totals = [(pending.bucket, pending.wait()) for pending in self.pending]
            for pending, total in zip(self.pending, self.group.limiter.limit_mean(totals, self.exchange), strict=True):
                pending.wait = partial(_known, total)
        while self.pending:  # Each is waited for once, even if one of them fails.
            self.group.wait_and_update_center(self.pending.pop(0), self.exchange)
        self.group.step_outer_optimizer(self.exchange, self.fragment.index)

    def apply_to_replica(self, stepped: bool) -> None:
        """Pull the replica, which may have ``stepped`` since the exchange began."""
        self.wait_and_update_center()
        group = self.group
        if not group.algorithm.reads_after:
            return
        for bucket in self.fragment.buckets:
            center = group.published_center(bucket, self.exchange)
            (group.pull_late if stepped else group.pull)(bucket, center, self.exchange)
            self.sent += group.placement.bytes_to_publish(bucket.nbytes)


def _known(total: V) -> V:
    """Return a total for which nobody has to wait."""
    return total
