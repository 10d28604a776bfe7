"""Distributed low-communication training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.algorithms.delayed import GATHERED, Delayed, stable
from hvd_periodic.arguments import require_momentum, require_real
from hvd_periodic.outer.sgd import OuterSGD
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")

RATE = 0.7
"""Default of λ: the paper's."""

SMALL_RATE = 0.4
"""Default of λ in asynchronous exchange of more than 4 workers: Streaming DiLoCo's, arXiv 2501.18512. With 0.7, more
than 4 workers that push in turn may diverge."""


@dataclass(frozen=True)
class DiLoCo(Consensus):
    """Move the center with an outer optimizer, whose gradient is the negative mean displacement of the workers.

        g   = c − 1/n Σ_i x_i          the pseudo-gradient
        m   ← μ m + g
        c   ← c − λ (g + μ m)          Nesterov; c − λ m without it
        x_i ← c

    Any other optimizer of the framework may replace this one: see ``outer_optimizer`` of ``PeriodicOptimizer``. With
    λ = 1 and μ = 0 this is model averaging. The state of local optimizers is kept. In asynchronous exchange the
    momentum waits for n pushes: see :class:`DelayedDiLoCo`.

    Args:
        outer_learning_rate: λ > 0. Default: 0.7; in asynchronous exchange of more than 4 workers 0.4.
        outer_momentum: μ in [0, 1).
        nesterov: Nesterov momentum, as in ``torch.optim.SGD``.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> center = {"center": np.array([0.0]), "momentum": np.array([0.0])}
        >>> moved = DiLoCo().move(VectorSpace(), center, np.array([2.0]), Exchange(size=2, period=100))
        >>> moved["center"].round(6)
        array([1.33])

    References:
        Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models. arXiv 2311.08105 (2023).
    """

    outer_learning_rate: float | None = None
    outer_momentum: float = 0.9
    nesterov: bool = True

    takes_outer_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.outer_learning_rate is not None:
            rate = require_real(self.outer_learning_rate, "`DiLoCo(outer_learning_rate=...)`", positive=True)
            object.__setattr__(self, "outer_learning_rate", rate)
        momentum = require_momentum(self.outer_momentum, "`DiLoCo(outer_momentum=...)`")
        object.__setattr__(self, "outer_momentum", momentum)

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(self.rate, self.outer_momentum, self.nesterov)

    @property
    def rate(self) -> float:
        """λ, or its default."""
        return RATE if self.outer_learning_rate is None else self.outer_learning_rate

    def in_force(self, exchange: Exchange) -> str:
        """Return the algorithm as text, with λ in place of a default."""
        return str(self).replace("outer_learning_rate=None", f"outer_learning_rate={self.rate}")

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the algorithm whose momentum waits for n pushes; warn if it is not stable."""
        if type(self) is not DiLoCo:  # Subclasses may compute something else.
            return super().asynchronous_variant(size)
        default = RATE if size <= 4 else SMALL_RATE
        rate = default if self.outer_learning_rate is None else self.outer_learning_rate
        advice = "Lower `outer_learning_rate` or `outer_momentum`"
        return stable(DelayedDiLoCo(rate, self.outer_momentum, self.nesterov), size, advice)

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center and the state of the outer optimizer."""
        return {"center": space.copy(x), **self.outer.init(space, x)}

    def gradient(self, space: VectorSpace[V], total: V, exchange: Exchange) -> V:
        """Return the pseudo-gradient, the negative mean displacement."""
        return space.scale(-1.0 / exchange.size, total)

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Take one step of the outer optimizer."""
        moved, state = self.outer.step(space, center["center"], self.gradient(space, total, exchange), center)
        return {"center": moved, **state}


@dataclass(frozen=True)
class DelayedDiLoCo(Delayed, DiLoCo):
    """DiLoCo of workers that exchange one at a time: the momentum moves once in n pushes.

        g = h_i − x_i
        D ← D + g/n
        first n − 1 pushes:  c ← c − λ g/n
        the n-th push:       m ← μ m + D ;  c ← c − λ (g/n + μ m) ;  D ← 0      with the old m unless Nesterov
        x_i ← c

    Every push moves c − λμ²/(1−μ) m − λμ/(1−μ) D, where c would come to rest, by −λ/(n(1−μ)) g, in whatever order;
    without Nesterov, c − λμ/(1−μ) (m + D).

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> delayed = DelayedDiLoCo(1.0, 0.5)
        >>> center = delayed.init_center(VectorSpace(), np.array([0.0]))
        >>> for completes in (False, True):
        ...     push = Exchange(size=2, period=100, completes=completes)
        ...     center |= delayed.move(VectorSpace(), center, np.array([2.0]), push)
        ...     print(center["center"], center["momentum"], center["gathered"])
        [1.] [0.] [-1.]
        [3.] [-2.] [0.]

    References:
        Liu et al.: Asynchronous Local-SGD Training for Language Modeling. arXiv 2401.09135 (2024), Algorithm 3.
    """

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return the center, and with momentum also m = 0 and D = 0."""
        return super().init_center(space, x) | ({GATHERED: space.zeros_like(x)} if self.outer_momentum else {})

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Take a step along the pseudo-gradient of one worker; at the end of a window along the momentum as well."""
        c, g = center["center"], self.gradient(space, total, exchange)
        if not self.outer_momentum:
            return {"center": space.axpy(-self.rate, g, c)}
        gathered = space.axpy(1.0, g, center[GATHERED])
        if not exchange.completes:
            return {"center": space.axpy(-self.rate, g, c), GATHERED: gathered}
        old = space.scale(self.outer_momentum, center["momentum"])
        if self.nesterov:
            momentum = space.axpy(1.0, gathered, old)
            direction = space.axpy(self.outer_momentum, momentum, g)
        else:
            direction = space.axpy(1.0, old, g)
            momentum = space.axpy(1.0, gathered, old)
        moved = space.axpy(-self.rate, direction, c)
        return {"center": moved, "momentum": momentum, GATHERED: space.zeros_like(gathered)}
