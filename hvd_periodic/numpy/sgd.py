"""Optimizers of numpy arrays: the protocol, and gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class ArrayOptimizer(Protocol):
    """An optimizer of numpy arrays."""

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Update the parameters in place; a gradient of None leaves its parameter alone."""


class SGD:
    """Gradient descent with momentum, on numpy arrays.

        v ← μ v + g
        x ← x − η v

    Args:
        learning_rate: η.
        momentum: μ.

    Example:
        >>> x = np.zeros(2)
        >>> SGD(0.1).step([x], [np.array([1.0, -1.0])])
        >>> x
        array([-0.1,  0.1])
    """

    def __init__(self, learning_rate: float, momentum: float = 0.0) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocities: list[Array] | None = None

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Update the parameters in place."""
        if self.velocities is None:
            self.velocities = [np.zeros_like(x) for x in parameters]
        for x, g, v in zip(parameters, gradients, self.velocities, strict=True):
            if g is not None:
                v *= self.momentum
                v += g
                x -= np.asarray(self.learning_rate * v, dtype=x.dtype)
