"""Copies the values of one worker to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


@dataclass(frozen=True)
class Broadcast(Algorithm):
    """Replace every replica, and the center, with the replica of the root.

        x_i ← x_root ;  c ← the same

    For values that have no mean, such as a queue of samples and the index of its end: exact, and for any type.

    Args:
        argument: the argument by which the user has asked for it.

    Example:
        >>> Broadcast().reduction
        'root'
    """

    argument: str = "buffers"

    reduction: ClassVar[str] = "root"
    reads_before: ClassVar[bool] = False

    def asynchronous_variant(self, size: int) -> Algorithm:
        """Raise: the root does not take part when another worker exchanges."""
        raise ValueError(
            f"{self.argument}='broadcast' is for synchronous exchange, in which the root takes part: use 'local'"
        )

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the replica itself."""
        return space.copy(x, out=out), {}

    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Set the center to the root's replica."""
        return {"center": space.copy(total, out=center["center"])}

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the center."""
        return center, {}
