"""Asynchronous averaging, DiLoCo, SlowMo and BMUF of Keras in real jobs, wherever the center lives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests import delayed_oracle as slow
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, column, crossed, repeated
from tests.parallel.tiers import thorough

hvd = pytest.importorskip("tests.parallel.tensorflow_job").hvd
pytest.importorskip("mpi4py")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic.asynchronous.worker import VARIABLE  # noqa: E402
from tests.parallel.keras_resume import saved  # noqa: E402

pytestmark = pytest.mark.timeout(240)

MODES: dict[str, tuple[str, str]] = {
    "window": ("window", "replicated"),
    "service": ("service", "root"),
    "sharded": ("service", "sharded"),
}
JOBS = [("mpirun", 2), thorough(("mpirun", 3)), thorough(("mpirun, MPI", 2))]
ORDER = (0, 1, 1, 2, 0, 0, 2, 1, 0, 1, 2)
SIZE = 5
SECONDS = (0.58, 0.75, 1.51)
"""Per local step, of each rank."""

KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"asynchronous": False},
    "grouped": {"grace_seconds": 1e6},
}
"""Options of workers that exchange together; a group ends when all are in it."""

scenario = Scenarios()
FOLDER: list[Path] = []


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "test_delayed_tensorflow", folder, 200, framework="tensorflow")


def order_of(size: int) -> list[int]:
    return [turn for turn in ORDER if turn < size]


def barrier() -> None:
    """Wait for all ranks."""
    hvd.allgather_object(None)


class Trainer:
    """A worker on quadratics; its model is one layer whose kernel is x."""

    def __init__(self, mode: str, name: str, compiled: bool, model: Any = None, **given: Any) -> None:
        self.mode = mode
        if model is None:
            layers = [keras.Input((1,)), keras.layers.Dense(SIZE, use_bias=False, dtype="float64", name="x")]
            model = keras.Sequential(layers, name="model")
            model.set_weights([tf.zeros((1, SIZE), tf.float64)])
            options = {
                "period": slow.PERIOD,
                "asynchronous": True,
                "staleness_power": 0.5 * (name == "diloco"),
                **given,
            }
            with self._transport():
                optimizer = hvdp.PeriodicOptimizer(
                    keras.optimizers.SGD(0.1),
                    model,
                    slow.ALGORITHMS[name],
                    center=MODES[mode][1],
                    **options,
                )
                model.compile(optimizer, loss="mse", jit_compile=False)
                optimizer.build(model.trainable_variables)
        else:
            model.optimizer.learning_rate = 0.1  # Of a model that was loaded; all ranks have to start with one rate.
            with self._transport():
                model.optimizer.attach(model)
                model.optimizer.start()
        self.model, self.x, self.optimizer = model, model.trainable_variables[0], model.optimizer
        self.take = tf.function(self.step) if compiled else self.step
        self.optimizer.synchronizer.begin()

    def _transport(self) -> Any:
        return patch.dict(os.environ, {VARIABLE: MODES[self.mode][0]})

    def step(self) -> None:
        h, b = slow.CURVATURE[hvd.rank()], slow.MINIMUM[hvd.rank()]
        self.optimizer.apply_gradients([(h * (tf.convert_to_tensor(self.x) - b), self.x)])

    def train(self, own_turn: int) -> None:
        self.optimizer.learning_rate = slow.rate_of(own_turn, False)
        for _ in range(slow.PERIOD):
            self.take()

    def look(self) -> list[Any]:
        x = self.x.numpy()[0].tolist()
        with self.optimizer.center():
            return [x, self.x.numpy()[0].tolist()]

    def in_turn(self, order: Sequence[int]) -> list[Any]:
        return slow.followed(order, hvd.rank(), self.train, self.look, barrier)


@scenario
def quadratics_in_turn() -> Any:
    """x and c after every turn, in eager and compiled loops."""
    results: dict[str, Any] = {}
    for number, (mode, name) in enumerate(crossed(tuple(MODES), tuple(slow.ALGORITHMS))):
        trainer = Trainer(mode, name, compiled=number % 2 == 0)
        seen = trainer.in_turn(order_of(hvd.size()))
        trainer.optimizer.finalize()
        results[f"{mode} {name}"] = [seen, trainer.look()]
    return results


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]]) -> None:
    """To float32: Keras keeps rates in it."""
    order = order_of(len(ranks))
    for case in ranks[0]["quadratics_in_turn"]:
        name = case.partition(" ")[2]
        options = {"power": 0.5 * (name == "diloco")}
        replicas, centers = slow.in_turn(name, len(ranks), order, **options)
        last = slow.Slow(name, len(ranks), **options)
        for turn in order:
            last.turn(turn)
        for rank, (seen, final) in enumerate(column(ranks, "quadratics_in_turn", case)):
            for turn, (x, c) in enumerate(seen):
                assert x == pytest.approx([replicas[turn][rank]] * SIZE, rel=1e-6), (case, turn)
                assert c == pytest.approx([centers[turn]] * SIZE, rel=1e-6), (case, turn)
            assert final[0] == pytest.approx([last.handed()] * SIZE, rel=1e-6), "all leave with the center"
            assert final[1] == pytest.approx([centers[-1]] * SIZE, rel=1e-6), case


@scenario
def saved_at_rest() -> Any:
    """In the middle of a window and of a period: files of the model, sets of files, and states."""
    results: dict[str, Any] = {}
    for mode, name, way in (
        *(("window", "diloco", "model"), ("sharded", "bmuf", "state")),
        *repeated(("service", "slowmo", "set"), ("window", "bmuf", "set"), ("sharded", "slowmo", "model")),
    ):
        order = order_of(hvd.size())
        trainer = Trainer(mode, name, compiled=way == "model")
        trainer.in_turn(order)
        if hvd.rank() == 0:
            trainer.take()
        barrier()
        resumed = saved(way, trainer, FOLDER[0] / f"{mode} {name}", *successors(trainer, name))
        expected = trainer.in_turn(order)
        found = resumed().in_turn(order)
        results[f"{mode} {name} {way}"] = found == expected
    return results


def successors(trainer: Trainer, name: str) -> tuple[Callable[[], Trainer], Callable[[Any], Trainer]]:
    """Return what makes a worker whose training has not begun, and one that goes on with a loaded model."""

    def fresh() -> Trainer:
        other = Trainer(trainer.mode, name, False)
        other.optimizer.finalize()
        return other

    return fresh, lambda model: Trainer(trainer.mode, name, True, model)


def test_what_was_saved_at_rest_resumes_exactly(ranks: list[dict[str, Any]]) -> None:
    for case in ranks[0]["saved_at_rest"]:
        assert column(ranks, "saved_at_rest", case) == [True] * len(ranks), case


@scenario
def periods_by_speed() -> Any:
    """The periods that follow two pushes of this rank, which are in the order of ranks, at speeds that are given."""
    results = {}
    for mode, compiled in (("window", True), *repeated(("sharded", False))):
        trainer, periods = Trainer(mode, "diloco", compiled, period=hvdp.DyLU(10)), []
        synchronizer = trainer.optimizer.synchronizer
        synchronizer.progress.step_seconds = lambda local_steps: SECONDS[hvd.rank()]
        for turn in range(2 * hvd.size()):
            rounds = synchronizer.rounds
            while turn % hvd.size() == hvd.rank() and synchronizer.rounds == rounds:
                trainer.take()
            if turn % hvd.size() == hvd.rank():
                periods.append(synchronizer.counters.next_exchange - synchronizer.local_steps)
            barrier()
        trainer.optimizer.finalize()
        results[mode] = periods
    return results


def test_workers_take_steps_by_their_speeds(ranks: list[dict[str, Any]]) -> None:
    """All know them from the first push of the last rank on: until then, all take 10 steps."""
    by_speed = [10, 7, 3][: len(ranks)]
    expected = [[10, speed] for speed in by_speed[:-1]] + [[by_speed[-1]] * 2]
    for mode in ranks[0]["periods_by_speed"]:
        assert column(ranks, "periods_by_speed", mode) == expected, mode


@scenario
def groups_of_all() -> Any:
    """The replica after every step: synchronously, and with workers that wait until all are in a group."""
    results = {}
    for mode, name, compiled in (("window", "diloco", False), *repeated(("service", "slowmo", True))):
        for kind, options in KINDS.items():
            trainer, seen = Trainer(mode, name, compiled, staleness_power=0.0, **options), []
            for _ in range(4 * slow.PERIOD):
                trainer.take()
                barrier()  # Nobody pushes again before all have taken the center.
                seen.append(trainer.x.numpy()[0].tolist())
            trainer.optimizer.finalize()
            results[f"{mode} {kind}"] = [*seen, trainer.x.numpy()[0].tolist()]
    return results


def test_a_group_of_all_workers_is_a_synchronous_round(ranks: list[dict[str, Any]]) -> None:
    for mode in dict.fromkeys(case.split()[0] for case in ranks[0]["groups_of_all"]):
        synchronous, grouped = (column(ranks, "groups_of_all", f"{mode} {kind}") for kind in KINDS)
        np.testing.assert_allclose(grouped, synchronous, rtol=1e-12, atol=1e-14)
        assert np.ptp(np.array(grouped)[:, slow.PERIOD - 2], axis=0).max() > 0.1, "they differ between exchanges"


@scenario
def fit_with_averaging() -> Any:
    """``ModelAverageOptimizer`` under ``fit``, with different numbers of batches: one center, which all end with."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.Adam(0.01), model, 4, asynchronous=True)
    model.compile(optimizer, loss="mse", jit_compile=False)
    keras.utils.set_random_seed(hvd.rank())
    count = 48 + 32 * hvd.rank()
    inputs = keras.random.normal((count, 3))
    model.fit(inputs, keras.ops.sum(inputs, 1, keepdims=True), 8, epochs=3, verbose=0)
    optimizer.finalize()
    weights = [w.tolist() for w in model.get_weights()]
    with optimizer.center():
        center = [w.tolist() for w in model.get_weights()]
    config = optimizer.get_config()
    return [weights == center, weights, config["asynchronous"], config["interval_steps"]]


def test_fit(ranks: list[dict[str, Any]]) -> None:
    for same, weights, asynchronous, period in column(ranks, "fit_with_averaging"):
        assert same
        assert weights == ranks[0]["fit_with_averaging"][1]
        assert asynchronous is True
        assert period == 4


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    FOLDER.append(folder)
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
