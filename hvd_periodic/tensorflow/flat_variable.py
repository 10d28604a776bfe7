"""The memory of a variable as one flat vector, which changes in place."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class FlatVariable:
    """A variable under the verbs: it is read when it is used, and :meth:`add` changes it where it is.

    Where a tensor is expected it is one, of what the variable holds then.

    Args:
        variable: of any shape.

    Example:
        >>> variable = tf.Variable([[1.0, 2.0]])
        >>> flat = FlatVariable(variable)
        >>> flat.add(tf.constant(0.5), tf.constant([2.0, 4.0]))
        >>> variable.numpy().tolist(), (flat - 1.0).numpy().tolist()
        ([[2.0, 4.0]], [1.0, 3.0])
    """

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self.dtype = variable.dtype.base_dtype

    def value(self) -> tf.Tensor:
        """Return what it holds now."""
        return tf.reshape(self._variable, [-1])

    def add(self, a: tf.Tensor, x: tf.Tensor) -> None:
        """Add ``a x``, a scalar times a vector, both of the variable's dtype: in one pass, rounded as in two."""
        delta = tf.reshape(x, self._variable.shape)
        tf.raw_ops.ResourceApplyGradientDescent(var=self._variable.handle, alpha=-a, delta=delta)

    def __getitem__(self, part: slice) -> tf.Tensor:
        return self.value()[part]

    def __add__(self, other: Any) -> tf.Tensor:
        return self.value() + other

    def __sub__(self, other: Any) -> tf.Tensor:
        return self.value() - other

    def __mul__(self, other: Any) -> tf.Tensor:
        return self.value() * other


def _converted(flat: FlatVariable, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    value = flat.value()
    return value if dtype is None or dtype == value.dtype else NotImplemented


tf.register_tensor_conversion_function(FlatVariable, _converted)
