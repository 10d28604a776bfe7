"""Bounds on the norm of what each rank sends, and on that of the mean from which the center steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import require_real
from hvd_periodic.centers.base import Placement
from hvd_periodic.comm.membership import Membership
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket

V = TypeVar("V")

MEDIAN = "median"
"""The bound on the norms of messages that is their median over ranks."""


class NormBounds(NamedTuple):
    """The largest norms that an exchange lets pass.

        m_i ← m_i min(1, R_w / ‖m_i‖)        the message of a rank, before the error of its wire is added
        ḡ   ← ḡ min(1, R / ‖ḡ‖)              the mean of the messages, before the outer step

    Attributes:
        message: R_w, or ``"median"``, the median of the norms of this exchange; None: no bound.
        mean: R; None: no bound.
    """

    message: float | str | None = None
    mean: float | None = None


def as_norm_bounds(message: float | str | None, mean: float | None) -> NormBounds | None:
    """Return the bounds, validated; None if there are none.

    Raises:
        TypeError: a bound is not a number, and not ``"median"``.
        ValueError: a bound is not positive.

    Example:
        >>> as_norm_bounds("median", 10)
        NormBounds(message='median', mean=10.0)
    """
    if isinstance(message, str) and message != MEDIAN:
        raise ValueError(f"`max_message_norm` must be a positive number or {MEDIAN!r}. Received: {message!r}")
    if message is not None and message != MEDIAN:
        message = require_real(message, "`max_message_norm`", positive=True)
    if mean is not None:
        mean = require_real(mean, "`max_mean_norm`", positive=True)
    return None if message is None and mean is None else NormBounds(message, mean)


def factor(norm: float, limit: float | None) -> float | None:
    """Return the factor that reduces a vector of a norm to a limit; None if it is within it, or there is none."""
    return limit / norm if limit is not None and norm > limit else None


class Sender(Protocol):
    """The group of tensors whose messages are cut, as far as that goes."""

    algorithm: Algorithm
    placement: Placement

    def preview(self, bucket: Bucket, exchange: Exchange, published: Any = None) -> Any:
        """Return the message of a bucket, given the published center if the caller has it."""

    def holds_part_of(self, bucket: Bucket) -> bool:
        """Return whether this rank holds any element of a bucket of the center."""


class NormLimiter(Generic[V]):
    """Cuts the messages of a group of tensors, and their mean, to bounds; norms are over all that is exchanged at once.

    Squares are summed in float64, bucket by bucket, so that the norm is known only once every message is: a first pass
    forms the messages for their norms, and a second one forms them again, which costs less than memory for all of them.

    Args:
        bounds: the bounds.
        group: the group.
        replica: provides the verbs.
        membership: the ranks.
    """

    def __init__(self, bounds: NormBounds, group: Sender, replica: Replica[V], membership: Membership) -> None:
        self.bounds, self._group, self._space, self._membership = bounds, group, replica.space, membership
        self._squares: dict[str, float] = {}

    def limit_message(
        self, exchange: Exchange, buckets: Sequence[Bucket], published: Sequence[V] = ()
    ) -> tuple[Exchange, int]:
        """Return the exchange with the factor for this rank's messages, and the bytes handed to collectives.

        Args:
            exchange: the exchange.
            buckets: the buckets.
            published: the published center, bucket by bucket, if the caller has it.
        """
        group, bound, sent = self._group, self.bounds.message, 0
        if bound is None:
            return exchange, 0
        squares = 0.0
        for bucket, center in zip_longest(buckets, published):
            squares += self._space.square(group.preview(bucket, exchange, center))
            if group.algorithm.reads_before:
                sent += group.placement.bytes_to_publish(bucket.nbytes)
        norm = math.sqrt(squares) / group.algorithm.share_of_worker(exchange)
        self._note("message_norm", norm)
        limit = self._median(norm, exchange) if isinstance(bound, str) else bound
        return replace(exchange, cut=factor(norm, limit)), sent

    def _median(self, norm: float, exchange: Exchange) -> float:
        """Return the median of the norms of the ranks that count; collective."""
        own = norm if exchange.weight is None or exchange.weight > 0 else None
        found = self._membership.communicator.allgather_object(own, f"{self._membership.name}.norms")
        return float(median(each for each in found if each is not None))

    def limit_mean(self, totals: Sequence[tuple[Bucket, V]], exchange: Exchange) -> list[V]:
        """Return the totals of all buckets, of which this rank has its parts, with the mean that they are cut.

        Collective, unless the center is everywhere: the squares of the parts are added over ranks.
        """
        group, share, limit = self._group, self._group.algorithm.share_of_mean(exchange), self.bounds.mean
        if limit is None or share is None:
            return [total for _, total in totals]
        squares = sum(self._space.square(total) for bucket, total in totals if group.holds_part_of(bucket))
        if not group.placement.everywhere:
            name = f"{self._membership.name}.squares"
            squares = math.fsum(self._membership.communicator.allgather_object(squares, name))
        norm = share * math.sqrt(squares)
        self._note("mean_norm", norm)
        scale = factor(norm, limit)
        return [total if scale is None else self._space.scale(scale, total) for _, total in totals]

    def _note(self, name: str, norm: float) -> None:
        self._squares[name] = self._squares.get(name, 0.0) + norm * norm

    def reported(self) -> dict[str, float]:
        """Return the norms since the last call, by name: of several fragments, of all that they exchanged."""
        norms, self._squares = {name: math.sqrt(squares) for name, squares in self._squares.items()}, {}
        return norms
