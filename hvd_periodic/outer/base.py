"""The interface of outer optimizers on vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from hvd_periodic.vectors.space import VectorSpace

V = TypeVar("V")


class Outer(ABC):
    """An optimizer of the center, as functions of vectors; it is elementwise.

    It holds hyper-parameters only. Its own vectors are kept, placed, saved and restored with the center.
    """

    @abstractmethod
    def init(self, space: VectorSpace[V], center: V) -> dict[str, V]:
        """Return the optimizer's vectors at the start of training, by name."""

    @abstractmethod
    def step(self, space: VectorSpace[V], center: V, gradient: V, state: dict[str, V]) -> tuple[V, dict[str, V]]:
        """Return the center after one step, and the optimizer's new vectors; may overwrite all arguments."""
