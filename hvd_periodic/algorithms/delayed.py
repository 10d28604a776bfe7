"""Momentum that moves once in n pushes, for workers that exchange one at a time."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import ClassVar, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")

GATHERED = "gathered"
"""Name of the vector D."""

_MOST = 256
"""Number of workers up to which stability is computed: the time grows with its cube."""


class Delayed(Consensus):
    """Workers exchange one at a time: every push moves the center at once, but the momentum only with every n-th.

        worker   g = h_i − x_i                h_i: the replica as it was after this worker's last pull
        center   D ← D + g/n                  and every vector of the center moves as the subclass says:
                 first n − 1 pushes:          c takes a step along g/n, without momentum
                 the n-th push:               c and the momentum take a step along g/n and D;  D ← 0
        worker   x_i ← the published center, after its own push;  h_i ← x_i

    The momentum of a step at every push would count the same past n times. The displacement is from what the worker
    took, since x_i − c would take away again what others have pushed since. If n workers have taken the same center,
    their pushes, in any order, amount to one synchronous exchange. With one worker it is that exchange, to the bit.

    A mix-in: it comes before the synchronous algorithm among the bases of a class.

    References:
        Liu et al.: Asynchronous Local-SGD Training for Language Modeling. arXiv 2401.09135 (2024), Algorithm 3.
    """

    reads_before: ClassVar[bool] = False
    taken_state: ClassVar[str | None] = "taken"
    takes_outer_optimizer: ClassVar[bool] = False

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return this algorithm."""
        return self

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm as text, under the name that users know."""
        return super().in_force(exchange).removeprefix("Delayed")

    def init_worker(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return what the worker has taken, ``h = x``."""
        return {"taken": space.copy(x)}

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the displacement ``x − h`` from what the worker took."""
        return space.sub(x, worker["taken"], out=out), {}


@lru_cache
def growth(algorithm: Algorithm, size: int) -> float:
    """Return the factor by which a turn of n equal workers multiplies a deviation, in the long run.

    Every period takes a worker all the way from h_i to the minimum of a quadratic, x_i = 0, and the workers push one
    after another. A turn, n pushes, is a linear map of c, the vectors kept with it, and h_1 … h_n; the factor is the
    largest absolute value of its eigenvalues.

    Args:
        algorithm: an asynchronous variant.
        size: number of workers.

    Example:
        >>> from hvd_periodic.algorithms.diloco import DelayedDiLoCo
        >>> [round(growth(DelayedDiLoCo(rate), 8), 2) for rate in (0.4, 0.7)]
        [0.96, 1.04]
    """
    space: VectorSpace[np.ndarray] = VectorSpace()
    names = list(algorithm.init_center(space, np.zeros(1)))
    start = list(np.eye(len(names) + size))
    center, taken = dict(zip(names, start, strict=False)), start[len(names) :]
    for worker in range(size):
        exchange = Exchange(size, period=1, learning_rate=1.0, completes=worker == size - 1)
        center |= algorithm.move(space, dict(center), -taken[worker], exchange)
        taken[worker] = algorithm.publish(space, center, exchange)
    return float(np.abs(np.linalg.eigvals(np.stack([*center.values(), *taken]))).max())


def stable(algorithm: Delayed, size: int, advice: str) -> Delayed:
    """Return an algorithm; warn if a turn of equal workers does not reduce deviations, see :func:`growth`."""
    if size <= _MOST and (factor := growth(algorithm, size)) >= 1:
        warnings.warn(
            f"`{algorithm.in_force(Exchange(size, period=1))}` is not stable in asynchronous training of n={size} "
            f"workers: where every period takes them to their minima, a turn multiplies deviations by {factor:.4g}. "
            f"{advice}",
            stacklevel=1,  # Python shows a text from one line once, however often an optimizer checks its rate.
        )
    return algorithm
