"""Slow momentum on top of local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.algorithms.delayed import GATHERED, Delayed, stable
from hvd_periodic.arguments import require_momentum, require_real
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class SlowMo(Consensus):
    """Average, then move the center further by a slow momentum of the averages.

        g   = c − 1/n Σ_i x_i
        u   ← β u + g/γ
        c   ← c − α γ u
        x_i ← c

    γ is the learning rate of the local optimizers at the exchange, separately for each parameter group. u is in
    units of gradients: it is not rescaled when γ changes. If γ is zero, as at the end of a cosine schedule, c becomes
    the mean and u stays as it is. With α = 1 and β = 0 this is model averaging; with one worker and β = 0,
    Lookahead(α). In asynchronous exchange the momentum waits for n pushes: see :class:`DelayedSlowMo`.

    Args:
        slow_momentum: β in [0, 1).
        slow_learning_rate: α > 0, in units of the local learning rate.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> two = Exchange(size=2, period=3, learning_rate=0.1)
        >>> center = {"center": np.array([0.0]), "slow_momentum": np.array([-10.0])}
        >>> SlowMo().move(VectorSpace(), center, np.array([2.0]), two)
        {'center': array([1.5]), 'slow_momentum': array([-15.])}

    References:
        Wang, Tantia, Ballas, Rabbat: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum.
        arXiv 1910.00643 (2019).
        Zhang, Lucas, Hinton, Ba: Lookahead Optimizer: k steps forward, 1 step back. arXiv 1907.08610 (2019).
    """

    slow_momentum: float = 0.5
    slow_learning_rate: float = 1.0

    uses_learning_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        momentum = require_momentum(self.slow_momentum, "`SlowMo(slow_momentum=...)`")
        object.__setattr__(self, "slow_momentum", momentum)
        rate = require_real(self.slow_learning_rate, "`SlowMo(slow_learning_rate=...)`", positive=True)
        object.__setattr__(self, "slow_learning_rate", rate)

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the algorithm whose momentum waits for n pushes; warn if it is not stable."""
        if type(self) is not SlowMo:  # Subclasses may compute something else.
            return super().asynchronous_variant(size)
        delayed = DelayedSlowMo(self.slow_momentum, self.slow_learning_rate)
        return stable(delayed, size, "Lower `slow_momentum` or `slow_learning_rate`")

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center and u = 0."""
        return {"center": space.copy(x), "slow_momentum": space.zeros_like(x)}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by its momentum."""
        rate, c, u = exchange.learning_rate, center["center"], center["slow_momentum"]

        def slowly() -> tuple[V, V]:
            momentum = space.axpy(-1.0 / (rate * exchange.size), total, space.scale(self.slow_momentum, u))
            return space.axpy(-self.slow_learning_rate * rate, momentum, c), momentum

        def mean() -> tuple[V, V]:
            return space.axpy(1.0 / exchange.size, total, c), u

        moved, momentum = space.if_zero(rate, mean, slowly)
        return {"center": moved, "slow_momentum": momentum}


@dataclass(frozen=True)
class DelayedSlowMo(Delayed, SlowMo):
    """SlowMo of workers that exchange one at a time: the momentum moves once in n pushes.

        g = h_i − x_i
        D ← D + g/(γ_i n)                     γ_i: the learning rate of the worker that pushes
        first n − 1 pushes:  c ← c − α g/n
        the n-th push:       c ← c − α (g/n + γ_i β u) ;  u ← β u + D ;  D ← 0
        x_i ← c

    A push with γ_i = 0 moves c by −g/n and leaves D as it is; if it is the n-th, u stays, and D ← 0.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> delayed = DelayedSlowMo()
        >>> center = delayed.init_center(VectorSpace(), np.array([0.0]))
        >>> for completes in (False, True):
        ...     push = Exchange(size=2, period=3, learning_rate=0.5, completes=completes)
        ...     center |= delayed.move(VectorSpace(), center, np.array([2.0]), push)
        ...     print(center["center"], center["slow_momentum"], center["gathered"])
        [1.] [0.] [-2.]
        [2.] [-4.] [0.]
    """

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center, u = 0 and D = 0."""
        return super().init_center(space, x) | {GATHERED: space.zeros_like(x)}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by one worker's displacement; at the end of a window by the momentum as well."""
        rate, alpha, c, gathered = exchange.learning_rate, self.slow_learning_rate, center["center"], center[GATHERED]
        if rate == 0:
            moved = {"center": space.axpy(1.0 / exchange.size, total, c), "slow_momentum": center["slow_momentum"]}
            return moved | {GATHERED: space.zeros_like(gathered) if exchange.completes else gathered}
        share = -1.0 / (rate * exchange.size)
        gathered = space.axpy(share, total, gathered)
        if not exchange.completes:
            moved = {"center": space.axpy(alpha / exchange.size, total, c), "slow_momentum": center["slow_momentum"]}
            return moved | {GATHERED: gathered}
        old = space.scale(self.slow_momentum, center["slow_momentum"])
        direction = space.axpy(share, total, space.copy(old))
        return {
            "center": space.axpy(-alpha * rate, direction, c),
            "slow_momentum": space.axpy(1.0, gathered, old),
            GATHERED: space.zeros_like(gathered),
        }
