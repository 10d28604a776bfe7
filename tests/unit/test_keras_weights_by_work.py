"""Weights by work in Keras: as on numpy, see ``test_weights_by_work.py``; and what ``fit`` reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import Communicator, LocalCommunicator
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.unit.test_tensorflow_edges import Delegate
from tests.unit.test_weights_by_work import CASES

pytestmark = pytest.mark.timeout(120)


class Worker:
    """A worker on h (x − b)²/2, of one or of three local updates per period."""

    def __init__(self, communicator: Communicator, algorithm: Any, weight: Any) -> None:
        self.rank, self.x = communicator.rank, keras.Variable([0.0], dtype="float64", name="x")
        self.h, self.b = [(0.5, 3.0), (1.0, -1.0)][communicator.rank]
        self.optimizer = hvdp.PeriodicOptimizer(
            keras.optimizers.SGD(0.1), None, algorithm, 3, process_set=Delegate(communicator), weight=weight
        )
        self.optimizer.build([self.x])
        self.iterations = 0

    def step(self) -> float:
        """Take one iteration; the workers report eight examples, and two, per period."""
        if self.rank == 0 and self.iterations % 3:
            self.optimizer.skip()
        else:
            examples = 8 if self.rank == 0 else (1, 0.25, 0.75)[self.iterations % 3]
            self.optimizer.apply_gradients([(self.h * (self.x.value - self.b), self.x)], examples=examples)
        self.iterations += 1
        return float(self.x.numpy()[0])


@pytest.mark.parametrize("case", CASES)
def test_numbers_worked_out_by_hand(case: str) -> None:
    algorithm, weight, centers = CASES[case]

    def work(communicator: Communicator) -> list[float]:
        worker = Worker(communicator, algorithm, weight)
        return [worker.step() for _ in range(9)][2::3]

    for found in run_ranks(2, work):
        np.testing.assert_allclose(found, centers, atol=1e-7)  # Keras rounds the rate to float32.


def alone(weight: str, local: Any = None, period: int = 100) -> Any:
    return hvdp.ModelAverageOptimizer(
        local or keras.optimizers.SGD(0.01), None, period, process_set=LocalCommunicator(), weight=weight
    )


def noted(optimizer: Any) -> tuple[int, float, int]:
    notes = optimizer.synchronizer.progress.notes
    return notes.updates, notes.examples, notes.reports


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_that_an_overflow_skips_does_no_work(compiled: bool) -> None:
    x = keras.Variable([1.0])
    optimizer = alone("examples", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0))
    optimizer.build([x])

    def take(gradient: Any, examples: Any) -> None:
        optimizer.apply([gradient], [x], examples=examples)

    step = tf.function(take) if compiled else take
    for gradient, examples in ((1.0, 3), (np.inf, 5), (2.0, 7)):
        step(tf.constant([gradient]), tf.constant(examples))
    assert noted(optimizer) == (0, 10.0, 2)
    assert optimizer.synchronizer.counters.skipped_updates == 1


def network() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(("eagerly", "together"), covering([False, True], [1, 2], together=1))
def test_fit_reports_its_batches(eagerly: bool, together: int) -> None:
    """Batches of 4, 4 and 2, after two of 5; of several batches in one compiled call, too."""
    model, optimizer = network(), alone("examples")
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eagerly, steps_per_execution=together)
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=5, verbose=0)
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    assert noted(optimizer) == (0, 20.0, 5)
    optimizer.synchronizer.sync()
    assert noted(optimizer) == (5, 0.0, 0)


def test_levels_share_a_report_of_a_train_step_of_the_users() -> None:
    inner = alone("examples")
    outer = hvdp.ModelAverageOptimizer(inner, None, 100, process_set=LocalCommunicator(), weight="steps")

    class Model(keras.Model):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch)

    inputs = keras.Input((3,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(outer, "mse", jit_compile=False)
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    assert noted(inner) == noted(outer) == (0, 10.0, 3)


def test_counts_are_saved(tmp_path: Path) -> None:
    model, optimizer = network(), alone("examples")
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
    optimizer.synchronizer.sync()
    model.train_on_batch(np.ones((7, 3)), np.ones((7, 1)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    loaded.attach(process_set=LocalCommunicator())
    assert noted(loaded) == noted(optimizer) == (3, 7.0, 1)
    state = optimizer.synchronizer.state_dict()
    other, steps = alone("examples"), alone("steps")
    for each in (other, steps):
        each.build(model.trainable_variables)
        each.synchronizer.load_state_dict(state)
        assert noted(each) == (3, 7.0, 1)


def test_a_file_of_another_weight_loads(tmp_path: Path) -> None:
    model = network()
    model.compile(alone("steps"), "mse", jit_compile=False)
    model.train_on_batch(np.ones((7, 3)), np.ones((7, 1)))
    model.save_weights(tmp_path / "model.weights.h5")
    other = network()
    other.compile(
        hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.01), None, 100, process_set=LocalCommunicator()), "mse"
    )
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert other.optimizer.synchronizer.local_steps == 1


@pytest.mark.parametrize(("examples", "message"), [(None, "no examples were reported in 3"), (-1, "examples` must be")])
def test_bad_examples(examples: Any, message: str) -> None:
    def work(communicator: Communicator) -> None:
        worker = Worker(communicator, hvdp.Averaging(), "examples")
        for _ in range(3):
            given = examples if communicator.rank else 1
            worker.optimizer.apply_gradients([(tf.ones(1, tf.float64), worker.x)], examples=given)

    for _, text in errors(2, work):
        assert message in text


def test_bad_examples_of_a_compiled_step() -> None:
    x = keras.Variable([1.0])
    optimizer = alone("examples", period=2)
    optimizer.build([x])
    step = tf.function(lambda examples: optimizer.apply([tf.ones(1)], [x], examples=examples))
    with pytest.raises(TypeError, match=r"`examples` must be a number\. Received: a tensor of shape"):
        step(tf.constant([1, 2]))
    step(tf.constant(-1))
    with pytest.raises(tf.errors.OpError, match="The weight of this rank cannot be used"):
        step(tf.constant(1))


def test_the_synchronizer_alone() -> None:
    x = keras.Variable([1.0])
    synchronizer = hvdp.Synchronizer([x], hvdp.Averaging(), 4, process_set=LocalCommunicator(), weight="examples")
    step = tf.function(lambda examples: synchronizer.step(examples=examples))
    for examples in (2.0, 3.5):
        step(tf.constant(examples))
    assert (synchronizer.progress.notes.examples, synchronizer.progress.notes.reports) == (5.5, 2)
