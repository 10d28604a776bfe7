"""Facts about the local optimizer of a session on which exchanges of tables rely."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from hvd_periodic.keras.model import Named

_LEAVING_ROWS = (tf.compat.v1.train.GradientDescentOptimizer, tf.compat.v1.train.AdagradOptimizer)
"""Optimizers that do not change what has a gradient of 0. Their subclasses may, for example by weight decay."""


class SessionOptimizer:
    """The local optimizer of a session.

    Args:
        opt: the optimizer.
        named: the exchanged variables, by name.
    """

    def __init__(self, opt: Any, named: Named) -> None:
        self._opt, self._named = opt, named

    def moves_untouched(self, names: Collection[str]) -> str | None:
        """Return what moves rows without gradients of some variables: another optimizer, or constraints; or None."""
        if type(self._opt) not in _LEAVING_ROWS:
            return f"{type(self._opt).__name__}, which moves all rows, or is not known to leave them alone"
        constrained = (name for name, v in self._named if name in names and getattr(v, "constraint", None) is not None)
        return next((f"the constraint of {name!r}" for name in constrained), None)
