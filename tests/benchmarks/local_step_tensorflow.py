"""Local steps of a small Keras model in ``fit``, where what a step costs besides its arithmetic shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.benchmarks.local_step import NEVER, Steps

LAYERS, WIDTH, BATCH = 10, 44, 16
STEPS = 200
"""Of each repetition."""


def steps(_model: str) -> Steps:
    """Return what measures a step of ``fit`` with each optimizer."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    optimizers: dict[str, Callable[[Any, keras.Model], Any]] = {
        "SGD": lambda sgd, _: sgd,
        "ModelAverageOptimizer": lambda sgd, model: hvdp.ModelAverageOptimizer(sgd, model, NEVER),
        "ElasticAverageOptimizer": lambda sgd, model: hvdp.ElasticAverageOptimizer(sgd, model, NEVER, 0.1),
        "ElasticAverageOptimizer, rho > 0": lambda sgd, model: hvdp.ElasticAverageOptimizer(
            sgd, model, NEVER, 0.1, rho=0.1
        ),
        "AGNOptimizer": lambda sgd, model: hvdp.AGNOptimizer(sgd, model, NEVER),
    }
    return {name: partial(seconds, compiled(make)) for name, make in optimizers.items()}


def compiled(make: Callable[[Any, keras.Model], Any]) -> keras.Model:
    """Return a model of 20 variables that trains with an optimizer."""
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(optimizer=make(keras.optimizers.SGD(1e-4, momentum=0.9), model), loss="mse", jit_compile=False)
    return model


def seconds(model: keras.Model) -> float:
    """Return the seconds of a step."""
    inputs = np.zeros((BATCH, WIDTH), "f4")
    batches = tf.data.Dataset.from_tensors((inputs, inputs)).repeat(STEPS)
    started = time.perf_counter()
    model.fit(batches, steps_per_epoch=STEPS, verbose=0)
    return (time.perf_counter() - started) / STEPS
