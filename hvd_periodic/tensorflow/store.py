"""Stores of TensorFlow variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.flat_variable import FlatVariable
from hvd_periodic.tensorflow.host_values import HostValues, joined
from hvd_periodic.vectors.layout import Bucket, Layout, TensorSpec
from hvd_periodic.vectors.lending import lends
from hvd_periodic.vectors.store import Store


class VariableStore(Store[Any]):
    """Variables under one layout: reading packs them, writing unpacks them; in a graph or eagerly.

    Buckets are written in order. A variable is assigned when its last bucket has been written, or the last one before
    writing may pause.

    Args:
        layout: the variables, arenas and buckets; the kind of an arena is its dtype.
        variables: the variables, in the order of the layout.
    """

    def __init__(self, layout: Layout, variables: Sequence[tf.Variable]) -> None:
        self.layout = layout
        self._variables: Any = list(variables)
        self._begun: tuple[int, list[tf.Tensor]] = (0, [])

    def read(self, bucket: Bucket, out: Any = None) -> Any:
        """Return the values of a bucket as one new tensor."""
        flat, parts = tf.constant([-1]), []
        for piece in bucket.pieces:
            part = tf.reshape(self._variables[piece.tensor], flat)
            if piece.stop - piece.start < self.layout.specs[piece.tensor].size:
                part = part[piece.start : piece.stop]
            parts.append(tf.cast(part, bucket.kind))
        return _concatenated(parts) if parts else tf.zeros([0], bucket.kind)

    def write(self, bucket: Bucket, value: Any) -> None:
        """Write a bucket; assign the variables that it completes."""
        for piece, part in zip(bucket.pieces, self._split(bucket, value), strict=True):
            ends = self.layout.ends
            if piece.start == 0 or bucket.index - 1 in ends:  # also where an exchange failed halfway
                self._begun = piece.start, []
            start, parts = self._begun
            parts.append(part)
            if piece.stop == self.layout.specs[piece.tensor].size or bucket.index in ends:
                self._assign_part(piece.tensor, start, piece.stop, parts)

    def _split(self, bucket: Bucket, value: Any) -> list[Any]:
        """Return the pieces of a bucket."""
        sizes = [piece.stop - piece.start for piece in bucket.pieces]
        return tf.split(value, sizes) if len(sizes) > 1 else [value] * len(sizes)

    def tensors(self) -> list[Any]:
        """Return the variables."""
        return list(self._variables)

    def _assign_part(self, index: int, start: int, stop: int, parts: list[Any]) -> None:
        """Assign elements of a variable, given parts of them."""
        spec, value = self.layout.specs[index], _concatenated(parts)
        if stop - start < spec.size:
            flat = tf.reshape(self._variables[index], [-1])
            value = tf.concat([flat[:start], tf.cast(value, flat.dtype), flat[stop:]], axis=0)
        self._assign(index, value if len(spec.shape) == 1 else tf.reshape(value, spec.shape))

    def _assign(self, index: int, value: tf.Tensor) -> None:
        variable = self._variables[index]
        variable.assign(tf.cast(value, variable.dtype))


class CenterStore(VariableStore):
    """Variables of this package, which are updated in place if a part of a bucket is a whole variable."""

    def view(self, bucket: Bucket) -> Any:
        """Return a part that is a whole variable as a flat view; None for other parts."""
        if len(bucket.pieces) != 1:
            return None
        piece = bucket.pieces[0]
        whole = (piece.start, piece.stop) == (0, self.layout.specs[piece.tensor].size)
        return FlatVariable(self._variables[piece.tensor]) if whole else None


class ArrayStore(VariableStore):
    """Variables in host memory: outside graphs, they are read as arrays and assigned from arrays."""

    def __init__(self, layout: Layout, variables: Sequence[tf.Variable], values: HostValues) -> None:
        super().__init__(layout, variables)
        self._values = values

    def read(self, bucket: Bucket, out: Any = None) -> Any:
        """Return the values of a bucket; outside graphs, as an array that must not be changed."""
        if not tf.executing_eagerly():
            return super().read(bucket)
        held = self._values.read_bucket(self, bucket)
        if held is not None:
            return held
        arrays = [self._values.read(self._variables[piece.tensor])[piece.start : piece.stop] for piece in bucket.pieces]
        if len(arrays) == 1:
            return arrays[0].astype(bucket.kind, copy=False)
        return joined(arrays, bucket.kind)

    def write(self, bucket: Bucket, value: Any) -> None:
        """Write a bucket; assign the variables that it completes."""
        in_graph = not tf.executing_eagerly()
        if in_graph or not self._values.write_bucket(self, bucket, value.astype(bucket.kind, copy=False)):
            super().write(bucket, value)

    def _split(self, bucket: Bucket, value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            return [value[piece.offset : piece.offset + piece.stop - piece.start] for piece in bucket.pieces]
        return super()._split(bucket, value)

    def _assign_part(self, index: int, start: int, stop: int, parts: list[Any]) -> None:
        if not isinstance(parts[0], np.ndarray):
            super()._assign_part(index, start, stop, parts)
            return
        variable = self._variables[index]
        if stop - start < self.layout.specs[index].size:
            flat = self._values.read(variable)
            parts = [flat[:start], *parts, flat[stop:]]
        self._values.write(variable, joined(parts, variable.dtype.as_numpy_dtype))


def _concatenated(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def layout_of(named: Sequence[tuple[str, tf.Variable]], bucket_bytes: int) -> Layout:
    """Return the layout of variables, with the dtypes in which they are accumulated."""
    specs = []
    for name, variable in named:
        dtype = accumulation_dtype(variable.dtype.base_dtype)
        specs.append(TensorSpec(name, tuple(variable.shape.as_list()), dtype.name, dtype.size))
    return Layout(specs, bucket_bytes)


def accumulation_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype of center and accumulators: a 16-bit center does not move under a small rate."""
    if dtype in (tf.float16, tf.bfloat16):
        return tf.float32
    if dtype.is_bool or dtype in (tf.uint32, tf.uint64):  # Horovod does not support these
        return tf.int64
    return tf.int32 if dtype.is_integer and dtype.size < 4 else dtype


def array_of(value: Any) -> np.ndarray:
    """Return a copy of a variable, tensor or array as an array, or a view if states are lent."""
    array = np.asarray(value if isinstance(value, np.ndarray) else tf.convert_to_tensor(value))
    return array if lends() else np.array(array)
