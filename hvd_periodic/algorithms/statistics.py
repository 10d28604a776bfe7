"""The mean of statistics, which may be temporarily infinite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from hvd_periodic.algorithms.averaging import Averaging
from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class Statistics(Averaging):
    """Replace every replica, and the center, with the mean of the replicas; an infinity lasts only one exchange.

        f   = c where c is finite, 0 elsewhere
        c   ← f + 1/n Σ_i (x_i − f)
        x_i ← c where c is finite, x_i elsewhere

    For finite values this is :class:`Averaging`. Elements that are infinite on all workers, such as those of a mask,
    do not change. If only one worker has an infinity or a NaN, the center is not finite at that exchange, all replicas
    keep their own values, and the first exchange at which all are finite sets the center to their mean.

    Args:
        one_worker: only one worker exchanges at a time: a center that is not finite takes this worker's value.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> space, two, center = VectorSpace(), Exchange(size=2, period=1), np.array([0.0, 0.0])
        >>> message, _ = Statistics().message(space, np.array([1.0, -np.inf]), {}, center, two)
        >>> Statistics().move(space, {"center": center}, message + np.array([3.0, -np.inf]), two)
        {'center': array([  2., -inf])}
    """

    one_worker: bool = False

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the mean that recovers from a center that is not finite."""
        return replace(self, one_worker=True)

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the displacement from the finite part of the center."""
        return space.sub(x, _finite(space, center), out=out), {}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the finite part by the mean displacement."""
        old = center["center"]
        moved = space.axpy(1.0 / exchange.size, total, _finite(space, old))
        return {"center": space.where_finite(old, moved, total) if self.one_worker else moved}

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the center where it is finite, the replica elsewhere."""
        return space.where_finite(center, center, x), {}


def _finite(space: VectorSpace[V], center: V) -> V:
    return space.where_finite(center, center, 0.0)
