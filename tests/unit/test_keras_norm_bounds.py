"""Bounds on norms in Keras, on one rank: eager and compiled steps, and the callback of ``fit``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import LocalCommunicator
from hvd_periodic.keras import PeriodicExchange

pytestmark = pytest.mark.timeout(120)

CENTERS = {
    "message": ({"max_message_norm": 1.0}, [(0.798, 1.064), (1.9362, 2.5816)]),
    "mean": ({"max_mean_norm": 0.5}, [(0.399, 0.532), (0.9681, 1.2908)]),
    "both, overlap": (
        {"max_message_norm": 1.0, "max_mean_norm": 0.5, "overlap": 1},
        [(0.399, 0.532), (0.9681, 1.2908)],
    ),
    "median": ({"max_message_norm": "median"}, [(3.99, 5.32), (9.681, 12.908)]),
}
"""Of moves of (3, 4), by DiLoCo with λ .7 and μ .9."""


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CENTERS)
def test_numbers_worked_out_by_hand(case: str, compiled: bool) -> None:
    options, centers = CENTERS[case]
    x = keras.Variable([0.0, 0.0], name="x")
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(1.0), None, hvdp.DiLoCo(0.7, 0.9), 1, process_set=LocalCommunicator(), **options
    )
    optimizer.build([x])

    def step() -> None:
        optimizer.apply([tf.constant([-3.0, -4.0])], [x])

    run: Any = tf.function(step) if compiled else step
    found = []
    for _ in centers:
        run()
        with optimizer.center():
            found.append(x.numpy().copy())
    np.testing.assert_allclose(found, centers, rtol=1e-5)


def test_elastic_averaging_pulls_by_what_it_sends() -> None:
    x = keras.Variable([0.0, 0.0], name="x")
    optimizer = hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(1.0), None, 1, moving_rate=0.5, max_message_norm=1.0, process_set=LocalCommunicator()
    )
    optimizer.build([x])
    optimizer.apply([tf.constant([-3.0, -4.0])], [x])
    np.testing.assert_allclose(x.numpy(), [2.7, 3.6], rtol=1e-6)
    with optimizer.center():
        np.testing.assert_allclose(x.numpy(), [0.3, 0.4], rtol=1e-6)


def test_the_callback_of_fit() -> None:
    def trained(**bounds: Any) -> tuple[Any, float]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
        before = model.get_weights()
        callback = PeriodicExchange(model, hvdp.Averaging(), 2, process_set=LocalCommunicator(), **bounds)
        model.fit(np.ones((4, 2)), -np.ones((4, 1)), batch_size=1, verbose=0, callbacks=[callback])
        moved = [now - then for now, then in zip(model.get_weights(), before, strict=True)]
        return callback, float(np.sqrt(sum((part**2).sum() for part in moved)))

    free, bounded = trained()[1], trained(max_message_norm=0.05, max_mean_norm=0.04)[1]
    assert bounded == pytest.approx(2 * 0.04, rel=1e-3)
    assert free > 2 * bounded
