"""Variables by name, and values that wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class SavedVariables:
    """What is saved under names, because a loaded optimizer makes its variables later than it is given their values.

    Attributes:
        variables: by name; empty until they are made.
        later: names of variables that files of earlier versions do not hold.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.later: set[str] = set()
        self._waiting: dict[str, np.ndarray] = {}

    def values(self) -> dict[str, np.ndarray]:
        """Return copies of all values; those that wait, if the variables are not there."""
        if not self.variables:
            return dict(self._waiting)
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over values now, or at :meth:`settle` if the variables are not there."""
        self._waiting = {name: np.asarray(values[name]) for name in values}
        if self.variables:
            self.settle()

    def settle(self) -> None:
        """Assign the values that wait, if any.

        Raises:
            ValueError: they are of other variables.
        """
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        different = (self.variables.keys() ^ waiting.keys()) - (self.later - waiting.keys())
        different |= {
            name for name in waiting.keys() - different if waiting[name].shape != tuple(self.variables[name].shape)
        }
        if different:
            raise ValueError(
                f"The saved state is of another optimizer or model; they differ in {min(different)!r}. If the "
                "optimizer was made with `model`, call optimizer.attach(model) after loading"
            )
        for name, value in waiting.items():
            self.variables[name].assign(value)
