"""The mean of all workers, without a center."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Exchange, State
from hvd_periodic.algorithms.consensus import Consensus
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class Mean(Consensus):
    """Replace every replica with the mean of the replicas.

        x_i ← 1/n Σ_j x_j

    For values that are not evaluated, such as the state of local optimizers: unlike :class:`Averaging`, it takes no
    memory for a center, and displacements are from zero. All workers must contribute their values.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.space import VectorSpace
        >>> Mean().move(VectorSpace(), {}, np.array([4.0]), Exchange(size=2, period=1))
        {'center': array([2.])}
    """

    reads_before: ClassVar[bool] = False

    def init_center(self, space: VectorSpace[V], x: V) -> State[V]:
        """Return no vectors: there is no center."""
        return {}

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the replica itself."""
        return space.copy(x, out=out), {}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return the mean, which is published at once."""
        return {"center": space.scale(1.0 / exchange.size, total)}
