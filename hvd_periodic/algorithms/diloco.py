"""Distributed low-communication training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.arguments import require_momentum, require_real
from hvd_periodic.outer.sgd import OuterSGD
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class DiLoCo(Consensus):
    """Move the center with an outer optimizer, whose gradient is the negative mean displacement of the workers.

        g   = c − 1/n Σ_i x_i          the pseudo-gradient
        m   ← μ m + g
        c   ← c − λ (g + μ m)          Nesterov; c − λ m without it
        x_i ← c

    Any other optimizer of the framework may replace this one: see ``outer_optimizer`` of ``PeriodicOptimizer``. With
    λ = 1 and μ = 0 this is model averaging. The state of local optimizers is kept.

    Args:
        outer_learning_rate: λ > 0.
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

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    takes_outer_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rate = require_real(self.outer_learning_rate, "`DiLoCo(outer_learning_rate=...)`", positive=True)
        object.__setattr__(self, "outer_learning_rate", rate)
        momentum = require_momentum(self.outer_momentum, "`DiLoCo(outer_momentum=...)`")
        object.__setattr__(self, "outer_momentum", momentum)

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(self.outer_learning_rate, self.outer_momentum, self.nesterov)

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
