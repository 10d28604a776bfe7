"""What ``tests.benchmarks.exchange`` measures in TensorFlow, in compiled functions."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.benchmarks.exchange import Exchange, Make


def exchanges(shapes: list[tuple[int, ...]]) -> dict[str, Make]:
    """Return what makes each of those that are measured, by name, the unit first."""
    tf.random.set_seed(hvd.rank())

    def flat() -> Exchange:
        variable = tf.Variable(tf.random.normal([sum(prod(shape) for shape in shapes)]))
        return Exchange(tf.function(lambda: variable.assign(hvd.allreduce(variable, op=hvd.Sum, name="flat"))))

    def grouped() -> Exchange:
        variables = [tf.Variable(tf.random.normal(shape)) for shape in shapes]

        def exchange() -> None:
            for variable, total in zip(variables, hvd.grouped_allreduce(variables, op=hvd.Average), strict=True):
                variable.assign(total)

        return Exchange(tf.function(exchange))

    def ours(wrap: Any) -> Exchange:
        optimizer = wrap(keras.optimizers.SGD(0.1), None, 1_000_000)
        optimizer.build([tf.Variable(tf.random.normal(shape), name=f"p{i}") for i, shape in enumerate(shapes)])
        synchronizer = optimizer.synchronizer
        return Exchange(tf.function(synchronizer.sync, autograph=False), synchronizer.finalize)

    wrappers = (hvdp.ModelAverageOptimizer, hvdp.ElasticAverageOptimizer, hvdp.AGNOptimizer)
    return {
        "flat allreduce": flat,
        "grouped allreduce of the parameters": grouped,
        **{wrap.__name__: partial(ours, wrap) for wrap in wrappers},
    }


def wait() -> None:
    """Wait for what is under way on the device."""
    tf.test.experimental.sync_devices()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(tf.constant(seconds), op=hvd.Max, name="slowest"))
