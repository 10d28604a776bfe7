"""The computation of a round: the center moves by what those who take part have sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory
from hvd_periodic.centers.norm_bounds import factor
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.outer.framework import OuterOptimizer


@dataclass
class Contribution:
    """What a worker comes with.

    Attributes:
        record: its record.
        rates: learning rates of its tensors, if the algorithm uses them.
        payloads: its replica or message, bucket by bucket.
        seen: the number of the round after which it read the center; -1: any.
        norm: the norm of its message before that was encoded; NaN: the holder of the center measures it.
    """

    record: Record
    rates: list[float]
    payloads: list[np.ndarray]
    seen: int = -1
    norm: float = math.nan


@dataclass(frozen=True)
class Closed:
    """The result of a round; lists are in the order of its members.

    Attributes:
        moved: whether the center has moved.
        pulled: the vectors that members pull, bucket by bucket; if the center has not moved, those who are left out.
        staleness: of each member, the rounds since it took the center.
        norms: the norm of its message before that was cut; NaN if messages are not bounded.
        cuts: the factor by which its message was cut; NaN if it was not.
        mean_norm: the norm of the mean before that was cut; NaN if it is not bounded.
    """

    moved: bool
    pulled: Sequence[np.ndarray]
    staleness: Sequence[int]
    norms: Sequence[float]
    cuts: Sequence[float]
    mean_norm: float


class Closing:
    """Moves a center in rounds.

    Args:
        center: the whole center.
        optimizer: optimizer of the center, if there is one.
        workers: number of all workers.
        root: the worker whose learning rates count, if it is in a round; otherwise those of the lowest one in it.
    """

    def __init__(self, center: CenterInMemory, optimizer: OuterOptimizer, workers: int, root: int) -> None:
        self._center, self._optimizer, self._workers, self._root = center, optimizer, workers, root

    def close(self, members: Sequence[int], taking: Sequence[Contribution]) -> Closed:
        """Move the center by what the members of a round have sent, and count the round.

        It does not move if nobody counts, or if all are leaving and have nothing left. Members that are left out take
        it anyway.
        """
        center, records = self._center, [each.record for each in taking]
        staleness = center.ledger.staleness(members)
        exchanges = self._exchanges_of(members, taking, staleness)
        rest = all(record.purpose == Purpose.LEAVE and not record.pending for record in records)
        norms, mean = [math.nan] * len(members), math.nan
        pulled: list[np.ndarray] = []
        left_out = [worker for worker, record in zip(members, records, strict=True) if record.left_out]
        moves = not rest and any(exchange.weight != 0 for exchange in exchanges)
        if moves:
            leading = members.index(self._root) if self._root in members else 0
            payloads = zip(*(each.payloads for each in taking), strict=True)
            counted = [[None if r.left_out else p for p, r in zip(of_all, records, strict=True)] for of_all in payloads]
            exchanges, norms = self._limit_messages(counted, exchanges, [each.norm for each in taking])
            totals, mean = self._limit_mean(counted, exchanges, leading)
            pulled = [center.close(i, total, exchanges[leading]) for i, total in enumerate(totals)]
            if center.optimized:
                self._optimizer.step()
                pulled[: center.optimized] = [center.read(i) for i in range(center.optimized)]
            center.ledger.close(members)
        elif left_out:
            pulled = [center.published(i, exchanges[0]) for i in range(center.count)]
            center.ledger.take(left_out)
        cuts = [math.nan if exchange.cut is None else exchange.cut for exchange in exchanges]
        return Closed(moves, pulled, staleness, norms, cuts, mean)

    def _limit_messages(
        self, payloads: Sequence[Sequence[np.ndarray | None]], exchanges: Sequence[Exchange], told: Sequence[float]
    ) -> tuple[list[Exchange], list[float]]:
        """Return the exchanges with the factors for messages that are too long, and the norms; NaN without a bound.

        As :class:`~.norm_bounds.NormLimiter`, here with the messages of all: of the parameters, before weights, the
        median over those who count. Of an encoded message, its worker tells the norm.
        """
        center, bounds = self._center, self._center.parts[0].bounds
        if bounds is None or bounds.message is None:
            return list(exchanges), [math.nan] * len(exchanges)
        share, norms = center.parts[0].algorithm.share_of_worker, []
        for place, exchange in enumerate(exchanges):
            of_worker = [(i, payloads[i][place]) for i in range(len(center.parts[0].layout.buckets))]
            squares = (center.space.square(center.message(i, p, exchange)) for i, p in of_worker if p is not None)
            norm = math.sqrt(sum(squares)) if math.isnan(told[place]) else told[place]
            norms.append(norm / share(exchange))
        counted = [norm for norm, exchange in zip(norms, exchanges, strict=True) if exchange.weight != 0]
        limit = float(median(counted)) if isinstance(bounds.message, str) else bounds.message
        return [replace(each, cut=factor(norm, limit)) for norm, each in zip(norms, exchanges, strict=True)], norms

    def _limit_mean(
        self, payloads: Sequence[Sequence[np.ndarray | None]], exchanges: Sequence[Exchange], leading: int
    ) -> tuple[Iterable[np.ndarray | None], float]:
        """Return the totals of all buckets, with the mean of the parameters within its bound; and its norm, or NaN."""
        center, bounds = self._center, self._center.parts[0].bounds
        totals = (center.total_of_round(i, of_all, exchanges) for i, of_all in enumerate(payloads))
        share = center.parts[0].algorithm.share_of_mean(exchanges[leading])
        if bounds is None or bounds.mean is None or share is None:
            return totals, math.nan
        count = len(center.parts[0].layout.buckets)
        limited = [next(totals) for _ in range(count)]
        norm = share * math.sqrt(sum(center.space.square(total) for total in limited if total is not None))
        scale = factor(norm, bounds.mean)
        if scale is not None:
            limited = [None if total is None else center.space.scale(scale, total) for total in limited]
        return chain(limited, totals), norm

    def _exchanges_of(
        self, members: Sequence[int], taking: Sequence[Contribution], staleness: Sequence[int]
    ) -> list[Exchange]:
        """Return what an algorithm knows about the round and each of its members.

        n is the number of all workers, and in a mean those who are not members, or left out, have weight 0:
        w_i n/Σ_j w_j with w_i = (1, or the weight told) (1 + s_i)^−p.
        """
        power, size = self._center.parts[0].staleness_power, self._workers
        told = [1.0 if each.record.weight is None else each.record.weight for each in taking]
        weights = [
            0.0 if each.record.left_out else weight * (1 + missed) ** -power
            for each, weight, missed in zip(taking, told, staleness, strict=True)
        ]
        total, plain = math.fsum(weights), len(members) == size and len(set(weights)) == 1
        exchanges = []
        for each, missed, weight in zip(taking, staleness, weights, strict=True):
            exchange = Exchange(size, max(each.record.period, 1), rates=each.rates, staleness=missed)
            share = weight * (size / total) if total else 0.0
            exchanges.append(exchange if plain and total else replace(exchange, weight=share))
        return exchanges
