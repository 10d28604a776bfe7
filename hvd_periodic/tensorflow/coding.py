"""Coding operations of wires on TensorFlow tensors and on arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.host_values import HostValues
from hvd_periodic.vectors.coding import Coding

_TYPES = {
    "f4": tf.float32,
    "f2": tf.float16,
    "bf2": tf.bfloat16,
    "i1": tf.int8,
    "i4": tf.int32,
    "u1": tf.uint8,
}
_WORDS = {2: tf.int16, 4: tf.int32, 8: tf.int64}
"""Integers by their number of bytes."""


class GraphCoding(Coding[Any]):
    """Coding of tensors with static shapes, in a graph or eagerly."""

    def at_once(self, x: Any, elements: int) -> int | None:
        """Return None: working in parts would make graphs larger."""
        return None

    def cast(self, x: Any, kind: str) -> Any:
        """Return a tensor of another type."""
        return tf.cast(x, _TYPES[kind])

    def wide(self, x: Any) -> Any:
        """Return float32."""
        return tf.cast(x, tf.float32)

    def like(self, x: Any, other: Any) -> Any:
        """Return ``x`` in the type of ``other``."""
        return tf.cast(x, other.dtype)

    def clip(self, x: Any, limit: float) -> Any:
        """Return ``x`` clipped to magnitudes of at most ``limit``."""
        return tf.clip_by_value(x, tf.constant(-limit, x.dtype), tf.constant(limit, x.dtype))

    def are_finite(self, tensors: Sequence[Any]) -> bool:
        """Return whether all elements are finite; only outside graphs."""
        real = (tensor for tensor in tensors if tensor.dtype.is_floating)
        return all(bool(tf.reduce_all(tf.math.is_finite(tensor))) for tensor in real)

    def is_finite_or(self, x: Any, other: Any) -> Any:
        """Return whether every element is finite or equal to that of ``other``; in a graph, a boolean scalar."""
        if not x.dtype.is_floating:
            return tf.constant(True)
        return tf.reduce_all(tf.logical_or(tf.math.is_finite(x), tf.equal(x, tf.cast(other, x.dtype))))

    def rows(self, x: Any, count: int, length: int) -> Any:
        """Return the elements in rows, padded with zeros."""
        flat = tf.reshape(x, [-1])
        return tf.reshape(tf.pad(flat, [[0, count * length - self.sizes(flat)[0]]]), [count, length])

    def padded(self, x: Any, length: int) -> Any:
        """Return rows padded with zeros to a length."""
        return tf.pad(x, [[0, 0], [0, length - self.sizes(x)[1]]])

    def reshape(self, x: Any, *shape: int) -> Any:
        """Return ``x`` in another shape."""
        return tf.reshape(x, shape)

    def constant(self, values: Any, other: Any) -> Any:
        """Return numbers as float32."""
        return tf.constant(values, tf.float32)

    def max_abs(self, x: Any) -> Any:
        """Return the largest magnitude of every row."""
        return tf.reduce_max(tf.abs(x), axis=-1, keepdims=True)

    def at_least(self, x: Any, limit: float) -> Any:
        """Return ``x`` with smaller elements replaced by the limit."""
        return tf.maximum(x, tf.constant(limit, x.dtype))

    def above(self, x: Any, floor: float) -> Any:
        """Return magnitudes, with 0 where they are not larger than the floor."""
        return tf.where(x > floor, x, tf.zeros([], x.dtype))

    def count(self, x: Any) -> Any:
        """Return the number of ones in every row."""
        return tf.reduce_sum(x, axis=-1, keepdims=True)

    def exceeds(self, x: Any, limit: Any) -> Any:
        """Return 1 where an element is larger than the limit, and 0 elsewhere."""
        return tf.cast(x > limit, tf.float32)

    def negative(self, x: Any) -> Any:
        """Return 1 where an element is less than 0, and 0 elsewhere."""
        return tf.cast(x < 0, tf.float32)

    def ratio(self, x: Any, y: Any) -> Any:
        """Return ``x / y``; 0 where ``y`` is 0. Graphs compute a plain division by a constant as a product."""
        return tf.math.divide_no_nan(x, y)

    def quotient(self, x: Any, y: Any) -> Any:
        """Return the integers nearest to ``x / y``; 0 where ``y`` is 0."""
        return tf.round(self.ratio(x, y))

    def rounded(self, x: Any, offset: int) -> Any:
        """Return the lowest byte of the nearest integers plus an offset."""
        return tf.bitcast(tf.cast(tf.round(x) + float(offset), tf.int32), tf.uint8)[..., 0]

    def exponents(self, x: Any) -> Any:
        """Return the exponents of the nearest powers of 2."""
        bits, shift = tf.bitcast(x, tf.int32), tf.bitwise.right_shift
        odd = tf.bitwise.bitwise_and(shift(bits, 23), 1)
        return shift(bits + 0x3FFFFF + odd, 23) - 127

    def to_bytes(self, x: Any) -> Any:
        """Return the bytes of every row."""
        *rows, length = self.sizes(x)
        return tf.reshape(tf.bitcast(x, tf.uint8), [*rows, length * x.dtype.size])

    def from_bytes(self, x: Any, kind: str) -> Any:
        """Invert :meth:`to_bytes`."""
        size, (*rows, length) = _TYPES[kind].size, self.sizes(x)
        grouped = x if size == 1 else tf.reshape(x, [*rows, length // size, size])
        return tf.bitcast(grouped, _TYPES[kind])

    def packed(self, x: Any, bits: int) -> Any:
        """Return rows of numbers of 1, 2, 4 or 8 bits in as many bits each."""
        if bits == 8:
            return x
        kind, (*rows, length) = _WORDS[8 // bits], self.sizes(x)
        words = tf.bitcast(tf.reshape(x, [*rows, length * bits // 8, 8 // bits]), kind)
        found = words
        for i in range(1, 8 // bits):
            shift = tf.constant((8 - bits) * i, kind)
            found = tf.bitwise.bitwise_or(found, tf.bitwise.right_shift(words, shift))
        return tf.cast(tf.bitwise.bitwise_and(found, tf.constant(255, kind)), tf.uint8)

    def bits(self, x: Any, count: int) -> Any:
        """Return the lowest bits of integers, the lowest first."""
        shifted = tf.bitwise.right_shift(tf.cast(x, tf.int32)[..., None], tf.range(count, dtype=tf.int32))
        return tf.cast(tf.bitwise.bitwise_and(shifted, 1), tf.uint8)

    def looked_up(self, table: np.ndarray[Any, Any], x: Any) -> Any:
        """Return the numbers of one entry of the table for every byte."""
        entries = table.view(np.float32).reshape(table.size, -1)
        *rows, length = self.sizes(x)
        return tf.reshape(tf.gather(tf.constant(entries), tf.cast(x, tf.int32)), [*rows, length * entries.shape[1]])

    def in_turn(self, parts: Iterable[Sequence[Any]], widths: Sequence[int]) -> Any:
        """Return the arrays side by side."""
        return self.joined([self.joined(arrays) for arrays in zip(*parts, strict=True)])

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return rows concatenated side by side."""
        return tf.concat(list(parts), axis=-1)

    def largest(self, x: Any, count: int, floor: float = 0.0) -> Any:
        """Return the indices of the largest magnitudes of rows, in ascending order; ties go to the lower index."""
        return tf.sort(tf.math.top_k(self.above(tf.abs(x), floor), count).indices)

    def take(self, x: Any, places: Any) -> Any:
        """Return the elements of every row at its indices."""
        return tf.gather(x, places, batch_dims=1)

    def nonzero_rows(self, x: Any) -> np.ndarray[Any, Any]:
        """Return for every row, in host memory, whether any element is not 0; outside graphs."""
        return np.asarray(tf.reduce_any(tf.not_equal(x, tf.zeros([], x.dtype)), axis=1))

    def take_rows(self, x: Any, places: np.ndarray[Any, Any]) -> Any:
        """Return the rows at these indices."""
        return tf.gather(x, places)

    def put_rows(self, x: Any, places: np.ndarray[Any, Any], rows: Any) -> Any:
        """Return ``x`` with other rows at these indices."""
        return tf.tensor_scatter_nd_update(x, places[:, None], rows)

    def scattered(self, values: Any, places: Any, length: int) -> Any:
        """Return rows of zeros with the values at the given indices."""
        rows, count = self.sizes(values)
        row_of_each = tf.constant(np.repeat(np.arange(rows, dtype=np.int32)[:, None], count, axis=1))
        return tf.scatter_nd(tf.stack([row_of_each, places], axis=-1), values, [rows, length])


class ArrayCoding(Coding[np.ndarray]):
    """Coding of arrays in host memory, and of the variables that they stand for."""

    def __init__(self, values: HostValues) -> None:
        self._values = values

    def are_finite(self, tensors: Sequence[Any]) -> bool:
        """Return whether all elements are finite."""
        return super().are_finite([self._array(tensor) for tensor in tensors if tensor.dtype.is_floating])

    def is_finite_or(self, x: Any, other: Any) -> bool:
        """Return whether every element is finite or equal to that of ``other``."""
        return not x.dtype.is_floating or super().is_finite_or(self._array(x), self._array(other))

    def put_rows(self, x: Any, places: np.ndarray[Any, Any], rows: Any) -> np.ndarray:
        """Return ``x`` with other rows at these indices; overwrites ``x``, unless it is the memory of a variable."""
        return super().put_rows(x if x.flags.writeable else x.copy(), places, rows)

    def _array(self, variable: Any) -> np.ndarray:
        array = self._values.read(variable)
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array  # numpy cannot multiply bfloat16
