"""The memory of a variable as one flat vector, which changes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class FlatVariable:
    """A variable under the verbs: it is read when it is used, and :meth:`add` changes it where it is.

    Where a tensor is expected it is one, of what the variable holds then; operators are those of tensors.

    Args:
        variable: of any shape.

    Example:
        >>> variable = tf.Variable([[1.0, 2.0]])
        >>> flat = FlatVariable(variable)
        >>> flat.add(tf.constant(0.5), tf.constant([2.0, 4.0]))
        >>> variable.numpy().tolist(), (1.0 - flat).numpy().tolist()
        ([[2.0, 4.0]], [-1.0, -3.0])
    """

    __array_priority__ = 100
    """Operators of numpy leave it to those of here."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self.dtype, self.shape = variable.dtype.base_dtype, tf.TensorShape([variable.shape.num_elements()])

    __hash__ = object.__hash__

    def value(self) -> tf.Tensor:
        """Return what it holds now."""
        return tf.reshape(self._variable, [-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value(), dtype)

    def add(self, a: tf.Tensor, x: tf.Tensor) -> None:
        """Add ``a x``, a scalar times a vector of the variable's dtype, in one pass; a CPU rounds as in two."""
        delta = tf.reshape(x, self._variable.shape)
        tf.raw_ops.ResourceApplyGradientDescent(var=self._variable.handle, alpha=-a, delta=delta)


def _converted(flat: FlatVariable, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    return tf.convert_to_tensor(flat.value(), dtype)


def _of_value(operator: str) -> Callable[..., Any]:
    """Return an operator that is that of the value."""

    def apply(flat: FlatVariable, *operands: Any) -> Any:
        return getattr(tf.Tensor, operator)(flat.value(), *operands)

    return apply


tf.register_tensor_conversion_function(FlatVariable, _converted)
for _operator in tf.Tensor.OVERLOADABLE_OPERATORS:
    setattr(FlatVariable, _operator, _of_value(_operator))
