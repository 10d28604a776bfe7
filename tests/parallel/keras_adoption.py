"""Variables that are frozen and thawed in mid-run; part of the jobs of ``keras_scenarios.py``."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.parallel.program import Scenarios, attempt, repeated
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()

PERIOD = 3


def bits(variables: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in variables)).hexdigest()


@scenario
def adopted_quadratics() -> Any:
    """Losses h (x - b)²/2 of two variables, of which the second is frozen after round 2 and thawed after round 3."""
    results = {}
    for loop in ("eager", "function"):
        w, v = (keras.Variable([0.0], dtype="float64", name=name) for name in "wv")
        optimizer = hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), None, hvdp.DiLoCo(), PERIOD)
        optimizer.build([w, v])
        odd, seen = hvd.rank() % 2, []
        losses = [(w, (0.5, 1.0)[odd], (3.0, -1.0)[odd]), (v, (1.0, 2.0)[odd], (0.5, 2.0)[odd])]
        for done in range(1, 6):
            of = losses[:1] if done == 3 else losses

            def take(of: Any = of, optimizer: Any = optimizer) -> None:
                optimizer.apply([h * (x.value - b) for x, h, b in of], [x for x, _, _ in of])

            if done in (1, 3, 4):  # Steps that were compiled before are refused after adopt().
                step = tf.function(lambda take=take: take()) if loop == "function" else take
            for _ in range(PERIOD):
                step()
            seen.append([w.numpy().item(), v.numpy().item()])
            if done in (2, 3):
                optimizer.adopt([w] if done == 2 else [w, v])
        results[loop] = seen
    return results


@scenario
def thawed_in_fit() -> Any:
    """A backbone that is thawed between two calls of ``fit``, on other data on each rank."""
    results = {}
    for center in ("sharded", *repeated("replicated")):
        keras.utils.set_random_seed(hvd.rank())
        head = keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, trainable=False), head])
        inner, outer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)
        optimizer = hvdp.AGNOptimizer(inner, model, 4, outer_optimizer=outer, center=center)
        x = np.random.default_rng(hvd.rank()).normal(size=(10, 3))

        def fit(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            model.compile(optimizer, loss="mse", jit_compile=False)
            model.fit(x, x.sum(axis=1) * hvd.rank(), batch_size=2, verbose=0, shuffle=False)

        fit()
        model.layers[0].trainable = True
        different = attempt(partial(optimizer.adopt, None if hvd.rank() else list(head.trainable_variables)))
        optimizer.adopt()
        came = bits(model.weights)
        fit()
        optimizer.finalize()
        with optimizer.center():
            results[center] = [different, came, bits(model.weights), optimizer.synchronizer.rounds]
    return results
