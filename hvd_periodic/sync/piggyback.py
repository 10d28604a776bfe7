"""Sends small messages along with the handshake, so that an exchange takes one collective instead of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.comm.membership import Membership
from hvd_periodic.participation import policies_of
from hvd_periodic.replica import Replica
from hvd_periodic.sync.fragment_plan import DueFragments
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.vectors.layout import Bucket

V = TypeVar("V")

_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "max": np.maximum}


class PiggybackedMessages(Generic[V]):
    """Sends the messages of an exchange along with the handshake if they are small in total, and delivers their sums.

    If ranks are in different calls, as at the end of training, all exchange as usual: the records tell every rank
    whether all have sent messages of the same exchange. Messages are summed in rank order.

    Args:
        groups: the exchanged tensors.
        replica: the replica of this rank.
        membership: the ranks.
    """

    def __init__(self, groups: TensorGroups[V], replica: Replica[V], membership: Membership) -> None:
        self._groups, self._replica, self._root = groups, replica, membership.root
        self._packed: tuple[DueFragments, list[np.ndarray]] | None = None
        communicator = membership.communicator
        nbytes = sum(bucket.nbytes for group in groups for bucket in group.values.layout.buckets)
        self.possible = (
            communicator.size > 1
            and all(policy.known_early for policy in policies_of(replica))
            and nbytes * communicator.size <= communicator.piggyback_limit_bytes
            and replica.in_host_memory
            and all(group.can_piggyback for group in groups)
        )

    def pack(self, due: DueFragments) -> np.ndarray | None:
        """Return the messages of due fragments as integers, without side effects; None if they cannot be formed."""
        self._packed = None
        try:
            messages = [self._replica.to_host(group.preview(*sent), sent[0]).copy() for group, *sent in self._sent(due)]
        except Exception:  # The exchange will raise it again, and report it to the other ranks.
            return None
        self._packed = due, messages
        return as_integers(messages)

    def deliver(self, records: Sequence[Record], piggybacks: Sequence[np.ndarray]) -> None:
        """Deliver the sums of the messages if all ranks have sent theirs for the same exchange."""
        places = {(record.purpose, record.pending, record.period, record.piggyback_length) for record in records}
        if self._packed is None or len(places) > 1 or records[0].purpose != Purpose.EXCHANGE:
            return
        (due, messages), self._packed = self._packed, None
        memory = [integers.view(np.uint8) for integers in piggybacks]
        start = 0
        for message, (group, bucket, _) in zip(messages, self._sent(due), strict=True):
            of_ranks = [part[start : start + message.nbytes].view(message.dtype) for part in memory]
            start += message.nbytes + -message.nbytes % 8
            reduction = group.algorithm.reduction
            total = of_ranks[self._root] if reduction == "root" else reduce(_REDUCTIONS[reduction], of_ranks)
            group.error_feedback.received_totals[bucket.index] = self._replica.from_host(np.array(total), bucket)

    def _sent(self, due: DueFragments) -> Iterator[tuple[TensorGroup[V], Bucket, Any]]:
        """Yield the group, bucket and exchange of every message, in order."""
        if due.completes:
            for group in self._groups.statistics:
                for bucket in group.values.layout.buckets:
                    yield group, bucket, due.turns[-1].exchange
        for turn in due.turns:
            for bucket in turn.fragment.buckets:
                yield self._groups.parameters, bucket, turn.exchange


def as_integers(messages: Sequence[np.ndarray]) -> np.ndarray:
    """Pack messages into 64-bit integers, each message padded to a multiple of eight bytes.

    Example:
        >>> as_integers([np.zeros(3, np.float32), np.ones(1, np.int64)])
        array([0, 0, 1])
    """
    words = [-(-message.nbytes // 8) for message in messages]
    packed, start = np.zeros(sum(words), np.int64), 0
    for message, count in zip(messages, words, strict=True):
        packed[start : start + count].view(np.uint8)[: message.nbytes] = message.reshape(-1).view(np.uint8)
        start += count
    return packed
