"""A new optimizer over parameters of one whose last steps were not exchanged: what ranks lose, and the warning."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import numpy as np
import pytest

from hvd_periodic import Communicator, LocalCommunicator, PostLocal
from hvd_periodic.numpy import SGD, ModelAverageOptimizer
from tests.helpers import run_ranks

LOST = "has taken 2 local steps since its last exchange, at step 3: all ranks start from the root's parameters"


def taken_over(communicator: Communicator, finalize: bool) -> float:
    """Return what a rank goes on from after five steps with a period of three."""
    x = np.zeros(1)
    former = ModelAverageOptimizer(SGD(1.0), {"x": x}, 3, process_set=communicator)
    for _ in range(5):
        former.step([np.full(1, -1.0 - communicator.rank)])
    if finalize:
        former.synchronizer.finalize()
    ModelAverageOptimizer(SGD(1.0), {"x": x}, 3, process_set=communicator)
    return float(x[0])


@pytest.mark.parametrize("finalize", [False, True])
def test_the_root_warns_of_steps_that_were_not_exchanged(finalize: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The mean of steps of 1 and 2 after three steps is 4.5; without finalize() the root's two steps count alone."""
    found = run_ranks(2, lambda communicator: taken_over(communicator, finalize))
    assert found == ([7.5, 7.5] if finalize else [6.5, 6.5])
    warned = [record.getMessage() for record in caplog.records if "A new optimizer takes over" in record.getMessage()]
    assert len(warned) == (0 if finalize else 1)
    assert all(
        LOST in text and "Call finalize() of the former optimizer first, or its adopt()" in text for text in warned
    )


def test_while_gradients_are_averaged_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"x": np.zeros(1)}
    former = ModelAverageOptimizer(SGD(1.0), arrays, PostLocal(5, 2).around_averaging())
    former.step([np.ones(1)])
    assert former.synchronizer.warmup.active
    ModelAverageOptimizer(SGD(1.0), arrays, 2)
    assert "takes over" not in caplog.text


def test_other_parameters_are_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    optimizers = [ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 3) for _ in range(2)]
    optimizers[0].step([np.ones(1)])
    optimizers.append(ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 3))
    assert "takes over" not in caplog.text


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="without TensorFlow")
@pytest.mark.parametrize("compiled", [False, True])
def test_keras_warns(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    keras = pytest.importorskip("keras")
    hvdp = pytest.importorskip("hvd_periodic.tensorflow")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    kept = []
    for steps in (5, 1):
        optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 3, process_set=LocalCommunicator())
        model.compile(optimizer, "mse", run_eagerly=not compiled, jit_compile=False)
        with caplog.at_level(logging.WARNING, "hvd_periodic"):
            model.fit(np.ones((steps, 2)), np.ones(steps), 1, verbose=0)
        kept.append(optimizer)
    assert caplog.text.count(LOST) == 1
