"""What an outer optimizer on vectors provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


class Outer(ABC):
    """An optimizer of the center, as functions of vectors; it treats elements one by one.

    It holds hyper-parameters only. Its own vectors are kept, placed, saved and restored with the center.
    """

    @abstractmethod
    def init(self, space: VectorSpace[V], center: V) -> dict[str, V]:
        """Return its vectors when training starts, by name."""

    @abstractmethod
    def step(self, space: VectorSpace[V], center: V, gradient: V, state: dict[str, V]) -> tuple[V, dict[str, V]]:
        """Return the center after one step, and its new vectors; may overwrite all arguments."""
