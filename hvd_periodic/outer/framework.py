"""The interface that a front end implements if an optimizer of its framework moves the center."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Protocol

import numpy as np

from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.store import FlatStore, Store


class Hyperparameters(Protocol):
    """Settings of this rank on which all ranks must agree before they enter the arithmetic of a center."""

    def settings(self) -> dict[str, object]:
        """Return the settings by readable name; names of learning rates begin with ``lr`` or ``learning_rate``."""
        return {}

    def hyperparameters(self) -> Any:
        """Return the settings in the form that :meth:`follow` takes on another rank."""
        return None

    def follow(self, settings: Any) -> None:
        """Use these settings for the next exchange; None: this rank's own settings."""
        return


class OuterOptimizer(Hyperparameters, Protocol):
    """An optimizer of the framework, over the tensors of the center; methods that are not implemented do nothing.

    Several processes may take turns to step an asynchronous center in host memory; the optimizer's state then travels
    through arrays that they share.
    """

    @property
    def name(self) -> str:
        """The class of the optimizer, on which all ranks must agree."""

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Create the optimizer; ``gradient`` will hold the gradient to apply.

        Both stores hold this rank's shard of the center, which may be empty; ``layout.sources`` names the tensors of
        the ``whole`` that the shard is cut from.

        Raises:
            TypeError, ValueError: there is no such optimizer, or it does not support such a center.
        """
        return

    def take_hyperparameters(self, settings: Any) -> None:
        """Set the settings of another rank, which has loaded a state; they may change again."""
        return

    def step(self, without: Set[int] = frozenset()) -> None:
        """Apply one step, in place, as if the tensors ``without`` a gradient, by index in the whole, had none."""
        return

    def state(self) -> Any:
        """Return a copy of the optimizer's state."""
        return None

    def check(self, state: Any) -> None:
        """Check that :meth:`load` can restore a state; change nothing.

        Raises:
            ValueError: something is missing, or has another shape; see :func:`misfit`.
        """
        return

    def load(self, state: Any) -> None:
        """Restore the state that :meth:`state` returned."""
        return

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Create the optimizer over numpy arrays."""
        return

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return the shapes and dtypes of the arrays that will make up the state, for a center of this layout.

        Raises:
            TypeError, ValueError: as :meth:`bind`; or the state does not consist of arrays.
        """
        return []

    def reset(self) -> None:
        """Forget all state, as if no step had been taken."""
        return

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the state in these arrays, which may be used as the state itself."""
        return

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy the state into these arrays."""
        return


def misfit(name: str, reason: str) -> ValueError:
    """Return the error of a saved state that an outer optimizer, of this class, cannot restore."""
    return ValueError(
        f"The saved state of the center optimizer does not fit {name}: {reason}. Load a state that the same optimizer "
        "has saved around the same model, or start from the saved center"
    )


class NoOuterOptimizer(OuterOptimizer):
    """No outer optimizer: the algorithm moves the center itself."""

    name = "none"
