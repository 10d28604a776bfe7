"""What soaks in TensorFlow: a small model in a compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import AGN, EASGD, Averaging
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.mpi import MPICommunicator

MODES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "averaging": (Averaging, {}, ""),
    "elastic averaging": (EASGD, {}, ""),
    "AGN": (AGN, {}, ""),
    "elastic averaging, root": (EASGD, {"center": "root"}, ""),
    "AGN, sharded": (AGN, {"center": "sharded"}, ""),
    "averaging, int8": (Averaging, {"compression": hvdp.Compression.int8}, ""),
    "averaging, fragments": (Averaging, {"fragments": 2}, ""),
    "elastic averaging, window": (EASGD, {}, "window"),
    "elastic averaging, service": (EASGD, {}, "service"),
}
"""As in ``soak_torch.py``."""


def init() -> Communicator:
    """Initialize Horovod; return all ranks."""
    hvd.init()
    return MPICommunicator()


def trainer(algorithm: Any, options: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what trains until the next exchange, and what ends training."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    optimizer = hvdp.PeriodicOptimizer(keras.optimizers.SGD(1e-3, 0.9), model, algorithm, 2, **options)
    optimizer.build(model.trainable_variables)
    inputs = tf.random.normal((4, 64))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def exchange() -> None:
        for _ in range(2):
            step()

    return exchange, optimizer.synchronizer.finalize
