"""TensorFlow tensors in files and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.checkpoints.tree import Leaves


class Tensors(Leaves):
    """Converts TensorFlow tensors to arrays; dtypes that numpy lacks become unsigned integers of the same bits."""

    def to_array(self, value: Any, copy: bool) -> tuple[np.ndarray, str] | None:
        """Return a tensor, or an array of a TensorFlow dtype, as an array that is a copy; None for other values."""
        if tf.is_tensor(value) and not isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            array = np.asarray(value)
            kind = f"tensor {array.dtype.name}"
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "V" and value.dtype.names is None:
            array, kind = np.asarray(value), value.dtype.name
        else:
            return None
        if array.dtype.kind == "V":
            array = array.view(f"u{array.dtype.itemsize}")
        return np.array(array, copy=copy or None), kind

    def from_array(self, array: np.ndarray, kind: str) -> Any:
        """Return the tensor or array that :meth:`to_array` was given."""
        dtype = tf.as_dtype(kind.removeprefix("tensor ")).as_numpy_dtype
        array = array if array.dtype == dtype else array.view(dtype)
        return tf.constant(array) if kind.startswith("tensor ") else array

    def to_name(self, value: Any) -> str | None:
        """Return the name of a dtype."""
        return value.name if isinstance(value, tf.DType) else None

    def from_name(self, name: str) -> Any:
        """Return the dtype."""
        return tf.as_dtype(name)
