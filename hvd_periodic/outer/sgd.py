"""Gradient descent on the center, with heavy-ball or Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvd_periodic.arguments import require_momentum, require_real
from hvd_periodic.outer.base import Outer
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class OuterSGD(Outer):
    """One step of gradient descent with momentum, as in ``torch.optim.SGD``.

        m ← μ m + g
        c ← c − λ (g + μ m)      Nesterov
        c ← c − λ m              otherwise

    Args:
        learning_rate: λ > 0.
        momentum: μ in [0, 1).
        nesterov: whether to look ahead along the momentum.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> state = {"momentum": np.array([0.0])}
        >>> OuterSGD(1.0, 0.5).step(VectorSpace(), np.array([0.0]), np.array([1.0]), state)
        (array([-1.5]), {'momentum': array([1.])})

    References:
        Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep learning. ICML
        (2013).
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        rate = require_real(self.learning_rate, f"`{type(self).__name__}(learning_rate=...)`", positive=True)
        object.__setattr__(self, "learning_rate", rate)
        momentum = require_momentum(self.momentum, f"`{type(self).__name__}(momentum=...)`")
        object.__setattr__(self, "momentum", momentum)

    def init(self, space: VectorSpace[V], center: V) -> dict[str, V]:
        """Return a momentum vector of zeros, if there is momentum."""
        return {"momentum": space.zeros_like(center)} if self.momentum else {}

    def step(self, space: VectorSpace[V], center: V, gradient: V, state: dict[str, V]) -> tuple[V, dict[str, V]]:
        """Take one descent step."""
        if not self.momentum:
            return space.axpy(-self.learning_rate, gradient, center), {}
        momentum = space.axpy(1.0, gradient, space.scale(self.momentum, state["momentum"]))
        direction = space.axpy(self.momentum, momentum, gradient) if self.nesterov else momentum
        return space.axpy(-self.learning_rate, direction, center), {"momentum": momentum}
