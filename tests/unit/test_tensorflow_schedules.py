"""Schedules of the clock in TensorFlow: eager and compiled loops, saved models and checkpoints, reported losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.config import decode, encode  # noqa: E402
from tests.covering import covering  # noqa: E402

LOOPS: dict[str, Callable[[Any], Any]] = {"eager": lambda step: step, "function": tf.function}


def network() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, name="dense")], name="model")
    model.set_weights([np.ones((2, 1))])
    return model


def rates() -> Any:
    """.1 for five steps, then .05."""
    return keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.1, 0.05])


def wrapped(model: Any, schedule: Any, rate: Any = 0.1) -> Any:
    return hvdp.ModelAverageOptimizer(keras.optimizers.SGD(rate), model, schedule, process_set=LocalCommunicator())


def exchanges(model: Any, optimizer: Any, losses: list[float], compiled: Callable[[Any], Any]) -> list[int]:
    """Train; return the steps of the exchanges, losses reported before each."""

    @compiled
    def step(loss: Any) -> None:
        optimizer.synchronizer.report(loss)
        optimizer.apply_gradients([(tf.ones((2, 1)), model.trainable_variables[0])])

    found = []
    for loss in losses:
        step(tf.constant(loss))
        counters = optimizer.synchronizer.counters
        if counters.last_exchange == counters.local_steps:
            found.append(counters.local_steps)
    return found


LOSSES = [4.0] * 4 + [1.0] * 4 + [0.25] * 8

CASES: dict[str, tuple[Any, Any, list[int]]] = {
    "piecewise": (hvdp.Piecewise({0: 2, 5: 4}), 0.1, [2, 4, 6, 10, 14]),
    "doubling": (hvdp.Doubling(1, 2, 5), 0.1, [1, 2, 4, 6, 10, 14]),
    "qsr": (hvdp.QSR(2, 0.2), rates(), [4, 8]),  # (.2/.05)² = 16
    "adacomm": (hvdp.AdaComm(4, 1), 0.1, [4, 8, 10, 11, 12, 13, 14, 15, 16]),
    "function": (lambda clock: 2 if clock.loss is None or clock.loss > 1 else 3, 0.1, [2, 4, 6, 9, 12, 15]),
}


@pytest.mark.parametrize(("case", "loop"), covering(CASES, LOOPS, together=1))
def test_exchanges_take_place_when_the_schedule_says(case: str, loop: str) -> None:
    schedule, rate, expected = CASES[case]
    model = network()
    assert exchanges(model, wrapped(model, schedule, rate), LOSSES, LOOPS[loop]) == expected


@pytest.mark.parametrize("loop", LOOPS)
def test_seconds_are_measured(loop: str) -> None:
    model = network()
    optimizer = wrapped(model, hvdp.Seconds(1e9))
    exchanges(model, optimizer, [1.0] * 3, LOOPS[loop])
    counters = optimizer.synchronizer.counters
    assert counters.last_exchange == 1
    assert counters.next_exchange > 1000


@pytest.mark.parametrize(("case", "loop"), covering(["piecewise", "doubling", "qsr", "adacomm"], LOOPS, together=1))
def test_a_saved_model_goes_on_at_the_same_steps(case: str, loop: str, tmp_path: Path) -> None:
    schedule, rate, expected = CASES[case]
    model = network()
    optimizer = wrapped(model, schedule, rate)
    model.compile(optimizer, loss="mse")
    before = exchanges(model, optimizer, LOSSES[:9], LOOPS[loop])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, LocalCommunicator())
    assert loaded.optimizer._schedule == schedule
    assert loaded.optimizer.synchronizer.progress.notes == optimizer.synchronizer.progress.notes
    assert before + exchanges(loaded, loaded.optimizer, LOSSES[9:], LOOPS[loop]) == expected


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_goes_on_at_the_same_steps(loop: str, tmp_path: Path) -> None:
    schedule, rate, expected = CASES["adacomm"]
    model = network()
    optimizer = wrapped(model, schedule, rate)
    before = exchanges(model, optimizer, LOSSES[:9], LOOPS[loop])
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "saved")
    other = network()
    again = wrapped(other, schedule, rate)
    tf.train.Checkpoint(model=other, optimizer=again).restore(path).assert_consumed()
    assert before + exchanges(other, again, LOSSES[9:], LOOPS[loop]) == expected


def test_a_state_dict_holds_what_is_remembered() -> None:
    schedule, rate, expected = CASES["adacomm"]
    model = network()
    optimizer = wrapped(model, schedule, rate)
    before = exchanges(model, optimizer, LOSSES[:9], LOOPS["function"])
    state = optimizer.synchronizer.state_dict()
    assert state["notes"] == {
        "loss_sum": 0.25,
        "losses": 1,
        "memory": {"period": 2.0, "loss": 4.0, "learning_rate": float(np.float32(0.1))},
        "since": (),
        "updates": 0,
        "examples": 0.0,
        "reports": 0,
        "seen": [],
    }
    other = network()
    again = wrapped(other, schedule, rate)
    again.synchronizer.load_state_dict(state)
    assert before + exchanges(other, again, LOSSES[9:], LOOPS["function"]) == expected


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    """It holds counters and centers, and nothing that was kept for schedules."""
    model = network()
    optimizer = wrapped(model, 4)
    exchanges(model, optimizer, LOSSES[:6], LOOPS["eager"])
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    old = {name: value for name, value in saved.items() if name not in ("loss_sum", "losses")}
    assert len(old) == len(saved) - 2
    other = network()
    again = wrapped(other, 4)
    again.load_own_variables(old)
    assert again.synchronizer.counters.local_steps == 6
    assert exchanges(other, again, LOSSES[:6], LOOPS["eager"]) == [8, 12]
    del old["next_exchange"]
    with pytest.raises(ValueError, match=r"differ in 'next_exchange'"):
        wrapped(network(), 4).load_own_variables(old)


def test_variables_for_schedules_come_last() -> None:
    """Checkpoints of lists of variables go by their places."""
    model = network()
    synchronizer = hvdp.Synchronizer(
        model,
        hvdp.AGN,
        hvdp.AdaComm(4, 1),
        outer_optimizer=keras.optimizers.SGD(0.1, 0.9),
        process_set=LocalCommunicator(),
    )
    names = [variable.name.partition(":")[0] for variable in synchronizer.variables]
    assert names[-5:] == ["loss_sum", "losses", "memory.period", "memory.loss", "memory.learning_rate"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize(("loop", "error"), [("eager", ValueError), ("function", tf.errors.OpError)])
def test_a_loss_that_is_not_finite(loop: str, error: type[Exception], loss: float) -> None:
    model = network()
    with pytest.raises(error, match=r"(A loss of|losses reported until step 4 are not all finite)"):
        exchanges(model, wrapped(model, 4), [1.0, loss, 1.0, 1.0], LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_must_be_a_scalar(loop: str) -> None:
    optimizer = wrapped(network(), 4)
    with pytest.raises(TypeError, match=r"loss that is reported must"):
        LOOPS[loop](lambda: optimizer.synchronizer.report(tf.ones(3)))()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("schedule", "message"), [(hvdp.QSR(), "positive and finite"), (hvdp.AdaComm(2), r"call synchronizer\.report")]
)
def test_what_a_schedule_lacks(schedule: Any, message: str, loop: str) -> None:
    model = network()
    optimizer = wrapped(model, schedule, 0.0)
    step = LOOPS[loop](lambda: optimizer.apply_gradients([(tf.ones((2, 1)), model.trainable_variables[0])]))
    with pytest.raises((RuntimeError, tf.errors.OpError), match=message):
        step()
        step()


@pytest.mark.parametrize(
    "schedule",
    [
        hvdp.Every(3),
        hvdp.PostLocal(2, 3),
        hvdp.Piecewise({0: 2, 5: 4}),
        hvdp.Doubling(1, 2, 5),
        hvdp.QSR(2, 0.2, 3, 10, 0.5),
        hvdp.AdaComm(4, 1),
        hvdp.Seconds(2.5),
    ],
    ids=str,
)
def test_schedules_are_plain_values_in_a_configuration(schedule: Any) -> None:
    again = decode(json.loads(json.dumps(encode(schedule))))
    assert again == (3 if schedule == hvdp.Every(3) else schedule)
