"""Stores of Keras variables on any backend, for computations on host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_periodic.numpy.sgd import Array
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store


class Variables:
    """Reads and assigns Keras variables as host arrays, also between two batches of a ``fit``.

    With JAX, ``fit`` passes the values from one compiled step to the next, and variables hold none during an epoch. The
    public method ``model.jax_state_sync()`` puts the values back; the next step then starts from the variables, so that
    it takes over assigned values, and is not compiled again.

    Args:
        model: the model to which the variables belong.
    """

    def __init__(self, model: keras.Model) -> None:
        self.attach: Callable[[], object] = getattr(model, "jax_state_sync", lambda: None)

    def read(self, variable: Any) -> Array:
        """Return a copy of the values."""
        self.attach()
        return np.asarray(keras.ops.convert_to_numpy(variable.value))

    def read_part(self, variable: Any, start: int, stop: int) -> Array:
        """Return a copy of some elements of the flattened variable."""
        self.attach()
        return np.asarray(keras.ops.convert_to_numpy(keras.ops.reshape(variable.value, (-1,))[start:stop]))

    def write(self, variable: Any, array: Array) -> None:
        """Assign values, which are copied: a backend may use the memory of an array as that of its tensor."""
        self.attach()
        variable.assign(np.array(array.reshape(variable.shape)))


class HostStore(Store[Array]):
    """Keras variables under one layout: reading packs them into an array, writing assigns them.

    Buckets are written in order. A variable is assigned when its last bucket has been written, or the last one before
    writing may pause.

    Args:
        layout: the variables, arenas and buckets.
        variables: the variables, in the order of the layout.
        values: reads and assigns them.
    """

    def __init__(self, layout: Layout, variables: Sequence[Any], values: Variables) -> None:
        self.layout, self._variables, self._values = layout, list(variables), values
        self._begun: Array | None = None

    def read(self, bucket: Bucket, out: Array | None = None) -> Array:
        """Pack the variables of a bucket into ``out``, or into a new array."""
        flat = np.empty(bucket.size, bucket.kind) if out is None else out
        for piece in bucket.pieces:
            part = self._values.read_part(self._variables[piece.tensor], piece.start, piece.stop)
            flat[piece.offset : piece.offset + part.size] = part
        return flat

    def write(self, bucket: Bucket, value: Array) -> None:
        """Write a bucket; assign the variables that it completes."""
        for piece in bucket.pieces:
            variable, size, ends = self._variables[piece.tensor], self.layout.specs[piece.tensor].size, self.layout.ends
            part = value[piece.offset : piece.offset + piece.stop - piece.start]
            if part.size < size:
                if piece.start == 0 or bucket.index - 1 in ends or self._begun is None:
                    self._begun = np.array(self._values.read(variable).reshape(-1), bucket.kind)
                self._begun[piece.start : piece.stop] = part
                part = self._begun
            if piece.stop == size or bucket.index in ends:
                self._values.write(variable, part)

    def tensors(self) -> list[Any]:
        """Return copies of the values, in the order and with the shapes of the layout."""
        return [self._values.read(variable) for variable in self._variables]

    def originals(self) -> list[Any]:
        """Return the variables."""
        return list(self._variables)
