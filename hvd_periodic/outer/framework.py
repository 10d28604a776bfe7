"""What a front end provides where an optimizer of its framework moves the center."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.store import FlatStore, Store


class Hyperparameters(Protocol):
    """Settings of this rank on which all have to agree before they enter the arithmetic of a center."""

    def settings(self) -> dict[str, object]:
        """Return them by readable name; names of learning rates begin with ``lr`` or ``learning_rate``."""

    def hyperparameters(self) -> Any:
        """Return the same in a form that :meth:`follow` takes, on another rank."""

    def follow(self, settings: Any) -> None:
        """Take these for the next exchange; None: this rank's own."""


class OuterOptimizer(Hyperparameters, Protocol):
    """An optimizer of the framework, over the tensors of the center.

    Of an asynchronous center in host memory, several processes may step one after another; the state then travels
    through arrays that they share.
    """

    @property
    def name(self) -> str:
        """What all ranks have to agree on: the class."""

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Make the optimizer; ``gradient`` will hold what it is to apply.

        Both stores are of this rank's share of the center, which may be empty; ``layout.sources`` says of which tensors
        of the ``whole``.

        Raises:
            TypeError, ValueError: there is no such optimizer, or it cannot have such a center.
        """

    def step(self) -> None:
        """Apply one step, in place."""

    def state(self) -> Any:
        """Return a copy of its state."""

    def load(self, state: Any) -> None:
        """Restore what :meth:`state` returned."""

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Make the optimizer, of numpy arrays."""

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays that the state will consist of, over a center of this layout.

        Raises:
            TypeError, ValueError: as :meth:`bind`; or the state is of another kind.
        """

    def reset(self) -> None:
        """Forget all state, as if it had not stepped."""

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Go on from the state in these arrays, which may become the state itself."""

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Put the state into these arrays."""


class NoOuterOptimizer:
    """The algorithm moves the center itself."""

    name = "none"

    def settings(self) -> dict[str, object]:
        """Return that there are none."""
        return {}

    def hyperparameters(self) -> Any:
        """Return that there are none."""
        return None

    def follow(self, settings: Any) -> None:
        """Ignore them."""

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Leave the center alone."""

    def step(self) -> None:
        """Do nothing."""

    def state(self) -> Any:
        """Return that there is none."""
        return None

    def load(self, state: Any) -> None:
        """Ignore it."""

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Leave the center alone."""

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return that there is no state."""
        return []

    def reset(self) -> None:
        """Do nothing."""

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Do nothing."""

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Do nothing."""
