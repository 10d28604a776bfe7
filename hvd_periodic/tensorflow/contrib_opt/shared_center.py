"""Operations on an asynchronous center that are not part of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.branches import TensorStore
from hvd_periodic.tensorflow.contrib_opt.exchangers import SessionAsynchronous


class SharedCenter:
    """Starts and ends the exchanges with an asynchronous center."""

    def __init__(
        self, exchanger: SessionAsynchronous, centers: Sequence[tf.Variable], statistics: Sequence[tf.Variable]
    ) -> None:
        self._worker = exchanger.worker
        self._is_root = exchanger.context.membership.is_root
        self._centers = TensorStore(exchanger.tensor_groups.parameters.values.layout, centers)
        self._stores = [self._centers]
        if statistics:
            self._stores.append(TensorStore(exchanger.tensor_groups.statistics[0].values.layout, statistics))

    def write(self) -> tf.Operation:
        """Return the operation with which the root sets the center to the values of its variables."""
        if not self._is_root:
            return tf.no_op()
        for store in self._stores:
            store.load_variables()
        values = [store.read(bucket) for store in self._stores for bucket in store.layout.buckets]

        def write(*buckets: tf.Tensor) -> tf.Tensor:
            self._worker.resume_training()
            self._worker.transport.write(bucket.numpy() for bucket in buckets)
            return tf.constant(True)

        with tf.device("CPU:0"):
            return tf.py_function(write, values, tf.bool).op

    def finish(self) -> tf.Operation:
        """Return the operation that waits for all ranks and reads the final center."""
        buckets = self._centers.layout.buckets

        def finish() -> list[Any]:
            self._worker.finish()
            return [self._worker.final(index) for index in range(len(buckets))]

        with tf.device("CPU:0"):
            values = tf.py_function(finish, [], [tf.as_dtype(bucket.kind) for bucket in buckets])

        self._centers.load_variables()
        for bucket, value in zip(buckets, values, strict=True):
            self._centers.write(bucket, tf.ensure_shape(value, [bucket.size]))
        return tf.group(*self._centers.assign())
