"""The state of an optimizer of arrays."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.numpy.replica import NumpyReplica
from hvd_periodic.numpy.sgd import SGD, Array, ArrayOptimizer
from hvd_periodic.vectors.store import Store

_MARK = 0.75
"""A value, exact in every dtype, with which no optimizer state starts on its own."""


class ArrayOptimizerState:
    """The attributes of an optimizer that are lists of one array per parameter, in its shape.

    Args:
        optimizer: the local optimizer.
        replica: the parameters.
    """

    complete = False

    def __init__(self, optimizer: ArrayOptimizer, replica: NumpyReplica) -> None:
        self._optimizer, self._replica = optimizer, replica
        self._start: Mapping[str, Sequence[tuple[str, Array]]] = {}

    def entries(self) -> Mapping[str, Sequence[tuple[str, Array]]]:
        """Return the lists by attribute name, without the arrays that are not averaged."""
        names, exchanged = self._replica.names, self._replica.exchanged
        return {
            name: [(names[i], value[i]) for i in exchanged]
            for name, value in vars(self._optimizer).items()
            if isinstance(value, list) and self._is_state(value)
        }

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[Array]:
        """Return arrays as a store."""
        return self._replica.store_of(pairs)

    def learn_start(self) -> None:
        """Find initial values from a step of a copy with zero gradients; existing state is taken to start from zero."""
        if self.entries():
            return
        trial, arrays = copy.deepcopy(self._optimizer), [np.full_like(array, _MARK) for array in self._replica.arrays]
        trial.step(arrays, [np.zeros_like(array) for array in arrays])
        self._start = ArrayOptimizerState(trial, self._replica).entries()

    def reset(self, but: Collection[str] = ()) -> None:
        """Reset all state to that of a new optimizer: zeros, the parameters, or values from its settings."""
        of_name = dict(zip(self._replica.names, self._replica.arrays, strict=True))
        for entry, pairs in self.entries().items():
            start = dict(self._start.get(entry, ()))
            for name, array in pairs:
                if name in but:
                    continue
                value = start.get(name, np.zeros_like(array))
                array[...] = of_name[name] if (value == _MARK).all() else value

    def moves_untouched(self, names: Collection[str]) -> str | None:
        """Return what moves rows without gradients: momentum, or an optimizer that is not known."""
        if not isinstance(self._optimizer, SGD):
            return f"{type(self._optimizer).__name__}, which is not known to leave them alone"
        return f"SGD with momentum={self._optimizer.momentum!r}" if self._optimizer.momentum else None

    def _is_state(self, value: list[Any]) -> bool:
        shapes = [array.shape for array in value if isinstance(array, np.ndarray)]
        return len(shapes) == len(value) and shapes == [array.shape for array in self._replica.arrays]
