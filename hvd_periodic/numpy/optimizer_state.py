"""The state of an optimizer of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.numpy.replica import NumpyReplica
from hvd_periodic.numpy.sgd import Array, ArrayOptimizer
from hvd_periodic.vectors.store import Store


class ArrayOptimizerState:
    """Lists among the attributes of an optimizer that hold an array per parameter, in its shape.

    Args:
        optimizer: the local optimizer.
        replica: the parameters.
    """

    def __init__(self, optimizer: ArrayOptimizer, replica: NumpyReplica) -> None:
        self._optimizer, self._replica = optimizer, replica

    def entries(self) -> Mapping[str, Sequence[tuple[str, Array]]]:
        """Return them by the name of the attribute."""
        return {
            name: list(zip(self._replica.names, value, strict=True))
            for name, value in vars(self._optimizer).items()
            if isinstance(value, list) and self._is_state(value)
        }

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[Array]:
        """Return arrays as a store."""
        return self._replica.store_of(pairs)

    def reset(self) -> None:
        """Set all to zero."""
        for pairs in self.entries().values():
            for _, array in pairs:
                array[...] = 0

    def _is_state(self, value: list[Any]) -> bool:
        shapes = [array.shape for array in value if isinstance(array, np.ndarray)]
        return len(shapes) == len(value) and shapes == [array.shape for array in self._replica.arrays]
