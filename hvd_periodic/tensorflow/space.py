"""Vector operations on TensorFlow tensors, variables, and arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.coding import ArrayCoding, GraphCoding
from hvd_periodic.tensorflow.flat_variable import FlatVariable
from hvd_periodic.tensorflow.host_values import HostValues, empty, joined
from hvd_periodic.vectors.coding import BLOCK
from hvd_periodic.vectors.space import VectorSpace


class TensorSpace(VectorSpace[Any]):
    """Flat tensors, in a graph or eagerly; scalars take the dtype of the vectors.

    A variable that an operation may overwrite is updated in place, and sparsely if the summand is sparse.
    """

    coding = GraphCoding()

    def sub(self, x: Any, y: Any, out: Any = None) -> Any:
        """Return ``x - y`` in the dtype of ``y``."""
        return tf.cast(x, y.dtype) - y

    def axpy(self, a: Any, x: Any, y: Any) -> Any:
        """Return ``a x + y``; ``x`` or ``y`` may be ``tf.IndexedSlices``."""
        if isinstance(y, FlatVariable):
            y.add(in_dtype(a, y.dtype), tf.cast(x, y.dtype))
            return y
        x = scaled(a, tf.cast(x, y.dtype))
        if isinstance(y, tf.Variable):
            if isinstance(x, tf.IndexedSlices):
                y.scatter_add(x)
            else:
                y.assign_add(x)
            return y
        return tf.convert_to_tensor(y) + x

    def scale(self, a: Any, x: Any, out: Any = None) -> Any:
        """Return ``a x``."""
        return scaled(a, x)

    def weigh(self, weight: Any, x: Any) -> Any:
        """Return ``weight x``, and zeros for a weight of 0."""
        return tf.where(tf.equal(in_dtype(weight, x.dtype), 0), tf.zeros_like(x), scaled(weight, x))

    def lerp(self, x: Any, y: Any, weight: Any) -> Any:
        """Return ``x - weight (x - y)``; a graph shares the difference with the message if that is the same."""
        return x - in_dtype(weight, x.dtype) * (x - y)

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum."""
        return tf.maximum(x, y)

    def where_finite(self, condition: Any, x: Any, otherwise: Any) -> Any:
        """Return ``x`` where the condition is finite."""
        return tf.where(tf.math.is_finite(condition), x, tf.cast(otherwise, x.dtype))

    def copy(self, x: Any, out: Any = None) -> Any:
        """Return the tensor, which is immutable."""
        return tf.identity(x)

    def zeros_like(self, x: Any, out: Any = None) -> Any:
        """Return zeros."""
        return tf.zeros_like(x)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Concatenate tensors."""
        return tf.concat(list(parts), axis=0)

    def if_zero(self, a: Any, then: Callable[[], tuple[Any, Any]], otherwise: Callable[[], tuple[Any, Any]]) -> Any:
        """Return the result of ``then`` if ``a`` is 0, else of ``otherwise``; ``a`` may be a scalar of a graph."""
        return tf.cond(tf.equal(a, 0), then, otherwise)

    def dot(self, x: Any, y: Any) -> Any:
        """Return the inner product as a float64 scalar tensor, whatever the dtype of the bucket."""
        return tf.cast(tf.reduce_sum(x * y), tf.float64)

    def square(self, x: Any) -> float:
        """Return ``x · x``, eagerly."""
        return float(tf.reduce_sum(tf.square(tf.cast(x, tf.float64))))


class HostSpace(VectorSpace[np.ndarray]):
    """Arrays in host memory; results are in new memory that TensorFlow can share without a copy."""

    def __init__(self, values: HostValues) -> None:
        self.coding = ArrayCoding(values)

    def sub(self, x: Any, y: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return ``x - y``, in ``out`` if it is writable."""
        fresh = out is None or not out.flags.writeable
        return np.subtract(x, y, out=empty(x.size, np.result_type(x, y)) if fresh else out)

    def axpy(self, a: float, x: Any, y: Any) -> np.ndarray:
        """Return ``a x + y``, computed in blocks that stay in the processor's cache."""
        out = empty(y.size, y.dtype)
        for place in _blocks(y.size):
            np.multiply(x[place], a, out=out[place])
            out[place] += y[place]
        return out

    def scale(self, a: float, x: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return ``a x``, in ``out`` if it is writable."""
        fresh = out is None or not out.flags.writeable
        return np.multiply(x, a, out=empty(x.size, x.dtype) if fresh else out)

    def lerp(self, x: Any, y: Any, weight: float) -> np.ndarray:
        """Return ``x + weight (y - x)``, computed in blocks."""
        out = empty(x.size, x.dtype)
        for place in _blocks(x.size):
            np.subtract(y[place], x[place], out=out[place])
            out[place] *= weight
            out[place] += x[place]
        return out

    def copy(self, x: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return a copy in new memory; not in ``out``, which may be a copy itself that does not update its store."""
        copied = empty(x.size, x.dtype)
        copied[:] = x
        return copied

    def zeros_like(self, x: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return zeros."""
        zeros = empty(x.size, x.dtype)
        zeros[:] = 0
        return zeros

    def concatenate(self, parts: Sequence[Any]) -> np.ndarray:
        """Concatenate arrays."""
        return joined(parts, parts[0].dtype)


def _blocks(size: int) -> Iterator[slice]:
    """Yield the slices of all blocks."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def scaled(a: Any, x: Any) -> Any:
    """Return ``a x``, sparse if ``x`` is."""
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(a, x.values), x.indices, x.dense_shape)
    return in_dtype(a, x.dtype) * x


def in_dtype(a: Any, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar in a dtype; a Python float is rounded only once, without float32 in between."""
    return tf.constant(a, dtype) if isinstance(a, (int, float)) else tf.cast(a, dtype)


def changed_if(condition: Any, gradients: Sequence[Any], change: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Return gradients, of which those that are not None are changed if a condition holds.

    Args:
        condition: True, or a boolean scalar of a graph.
        gradients: one per variable; None for no gradient.
        change: returns other gradients in place of those that are not None; traced once, whatever the condition is.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    forms: list[Any] = []

    def changed() -> list[Any]:
        forms[:] = change(present)
        return forms

    def unchanged() -> list[Any]:
        return [_in_form_of(form, gradient) for form, gradient in zip(forms, present, strict=True)]

    chosen = iter(changed() if condition is True else tf.cond(condition, changed, unchanged))
    return [gradient if gradient is None else next(chosen) for gradient in gradients]


def _in_form_of(form: Any, gradient: Any) -> Any:
    """Return a gradient in the dtype of ``form``, and dense if ``form`` is dense."""
    if not isinstance(form, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
    return tf.cast(gradient, form.dtype)
