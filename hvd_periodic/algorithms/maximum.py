"""The largest value of all workers, for counters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class Maximum(Algorithm):
    """Replace every replica, and the center, with the elementwise maximum of the replicas.

        x_i ← max_j x_j ;  c ← the same

    For integer buffers, such as the number of batches that a batch normalization has seen: they have no mean of their
    own type, and a count should not fall behind.

    Args:
        include_center: the center takes part as well, for workers that exchange one at a time: c ← max(c, x_i).

    Example:
        >>> Maximum().reduction
        'max'
    """

    include_center: bool = False

    reduction: ClassVar[str] = "max"
    reads_before: ClassVar[bool] = False

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Return the maximum in which the center takes part as well."""
        return replace(self, include_center=True)

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the replica itself."""
        return space.copy(x, out=out), {}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Set the center to the maximum."""
        old = center["center"]
        return {"center": space.maximum(old, total) if self.include_center else space.copy(total, out=old)}

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the center."""
        return center, {}
