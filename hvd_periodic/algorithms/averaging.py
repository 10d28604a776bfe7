"""Model averaging, also known as local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.algorithms.delayed import Delayed
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class Averaging(Consensus):
    """Replace every replica, and the center, with the mean of the replicas.

        c   ← c + 1/n Σ_i (x_i − c)  =  1/n Σ_i x_i
        x_i ← c

    With τ = 1 and plain SGD this is synchronous SGD. In asynchronous exchange every push moves the center by
    (x_i − h_i)/n, where h_i is what the worker took at its last push.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> space, two, center = VectorSpace(), Exchange(size=2, period=1), np.array([0.0])
        >>> message, _ = Averaging().message(space, np.array([1.0]), {}, center, two)
        >>> Averaging().move(space, {"center": center}, message + np.array([3.0]), two)
        {'center': array([2.])}

    References:
        McDonald, Hall, Mann: Distributed Training Strategies for the Structured Perceptron. NAACL (2010).
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    def contraction(self, exchange: Exchange) -> float:
        """Return 1: an exchange removes the whole distance."""
        return 1.0

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the average to which every push adds one n-th of the worker's displacement."""
        if type(self) is not Averaging:  # Subclasses may compute something else.
            return super().asynchronous_variant(size)
        return DelayedAveraging()

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Move the center by the mean displacement."""
        return {"center": space.axpy(1.0 / exchange.size, total, center["center"])}


@dataclass(frozen=True)
class DelayedAveraging(Delayed, Averaging):
    """Averaging of workers that exchange one at a time.

    c ← c + (x_i − h_i)/n
    """
