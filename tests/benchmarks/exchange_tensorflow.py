"""What ``tests.benchmarks.exchange`` measures in TensorFlow, in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp


def exchanges(shapes: list[tuple[int, ...]]) -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """Return what is measured, by name, the unit first; and the synchronizers in it."""
    tf.random.set_seed(hvd.rank())
    flat = tf.Variable(tf.random.normal([sum(prod(shape) for shape in shapes)]))
    tensors = [tf.Variable(tf.random.normal(shape)) for shape in shapes]

    def whole() -> None:
        flat.assign(hvd.allreduce(flat, op=hvd.Sum, name="flat"))

    def grouped() -> None:
        for variable, total in zip(tensors, hvd.grouped_allreduce(tensors, op=hvd.Average), strict=True):
            variable.assign(total)

    measured: dict[str, Callable[[], Any]] = {
        "flat allreduce": tf.function(whole),
        "grouped allreduce of the parameters": tf.function(grouped),
    }
    synchronizers = []
    for wrap in (hvdp.ModelAverageOptimizer, hvdp.ElasticAverageOptimizer, hvdp.AGNOptimizer):
        optimizer = wrap(keras.optimizers.SGD(0.1), None, 1_000_000)
        optimizer.build([tf.Variable(tf.random.normal(shape), name=f"p{i}") for i, shape in enumerate(shapes)])
        synchronizers.append(optimizer.synchronizer)
        measured[wrap.__name__] = tf.function(optimizer.synchronizer.sync, autograph=False)
    return measured, synchronizers


def wait() -> None:
    """Wait for what is under way on the device."""
    tf.test.experimental.sync_devices()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(tf.constant(seconds), op=hvd.Max, name="slowest"))
