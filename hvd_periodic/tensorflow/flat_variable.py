"""A variable as a flat vector that is updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


class FlatVariable:
    """A flat view of a variable for vector operations: it is read on use, and :meth:`add` updates it in place.

    It converts to a tensor of the variable's current value, and supports the operators of tensors.

    Example:
        >>> variable = tf.Variable([[1.0, 2.0]])
        >>> flat = FlatVariable(variable)
        >>> flat.add(tf.constant(0.5), tf.constant([2.0, 4.0]))
        >>> variable.numpy().tolist(), (1.0 - flat).numpy().tolist()
        ([[2.0, 4.0]], [-1.0, -3.0])
    """

    __array_priority__ = 100
    """Makes numpy's operators defer to the operators of this class."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        self.dtype, self.shape = variable.dtype.base_dtype, tf.TensorShape([variable.shape.num_elements()])

    __hash__ = object.__hash__

    def value(self) -> tf.Tensor:
        """Return the current value."""
        return tf.reshape(self._variable, [-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value(), dtype)

    def add(self, a: tf.Tensor, x: tf.Tensor) -> None:
        """Add ``a x``, with ``x`` of the variable's dtype, in one pass; on a CPU, rounded like a product and a sum."""
        delta = tf.reshape(x, self._variable.shape)
        tf.raw_ops.ResourceApplyGradientDescent(var=self._variable.handle, alpha=-a, delta=delta)


def _converted(flat: FlatVariable, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    return tf.convert_to_tensor(flat.value(), dtype)


def _of_value(operator: str) -> Callable[..., Any]:
    """Return an operator that applies to the value."""

    def apply(flat: FlatVariable, *operands: Any) -> Any:
        return getattr(tf.Tensor, operator)(flat.value(), *operands)

    return apply


tf.register_tensor_conversion_function(FlatVariable, _converted)
for _operator in tf.Tensor.OVERLOADABLE_OPERATORS:
    setattr(FlatVariable, _operator, _of_value(_operator))
