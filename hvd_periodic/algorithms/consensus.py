"""The base of algorithms whose workers all continue from the published center."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


class Consensus(Algorithm):
    """Workers send their displacement from the last published center, and continue from the next one.

        m_i = x_i − h
        x_i ← h

    These algorithms differ in how the center moves.
    """

    @property
    def takes_mean(self) -> bool:
        """True: the center moves by the mean displacement."""
        return True

    def message(
        self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange, out: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the displacement ``x − h``."""
        return space.sub(x, center, out=out), {}

    @abstractmethod
    def move(self, space: VectorSpace[V], center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return the changes to the center's vectors, given the sum of the displacements; may overwrite all vectors."""

    def pull(self, space: VectorSpace[V], x: V, worker: State[V], center: V, exchange: Exchange) -> tuple[V, State[V]]:
        """Return the published center."""
        return center, {}
