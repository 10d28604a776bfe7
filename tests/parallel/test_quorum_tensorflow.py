"""Rounds with a quorum of Keras in real jobs: the numbers of the reference, ``fit``, what was saved, refusals."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, repeated
from tests.parallel.tiers import thorough
from tests.unit.test_quorum import ADOPTED, CURVATURE, MINIMUM, PERIOD, RATE, SETS, TABLE, check_adopted

hvd = pytest.importorskip("tests.parallel.tensorflow_job").hvd

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import AGN, BMUF, EASGD, Averaging, DiLoCo, PostLocal, SlowMo  # noqa: E402
from tests.parallel.keras_resume import saved  # noqa: E402

pytestmark = pytest.mark.timeout(300)

JOBS = [("mpirun", 3), thorough(("mpirun, MPI", 3)), thorough(("mpirun, torch.distributed", 3))]

scenario = Scenarios()
FOLDER: list[Path] = []


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "test_quorum_tensorflow", folder, 250, framework="tensorflow")


OUTER: dict[str, Callable[[], dict[str, Any]]] = {
    "agn, sum": lambda: {"outer_optimizer": keras.optimizers.SGD(0.1)},
    "agn, average": lambda: {"outer_optimizer": keras.optimizers.SGD(0.1, momentum=0.9)},
}


def barrier() -> None:
    """Wait for all ranks."""
    hvd.allgather_object(None)


class Trainer:
    """A worker on quadratics; its model is one layer whose kernel is x."""

    def __init__(
        self, algorithm: Any, compiled: bool, model: Any = None, start: bool = True, local: Any = None, **options: Any
    ) -> None:
        self.poison, self.others = tf.Variable(0.0, dtype="float64"), list[Any]()
        if model is None:
            layer = keras.layers.Dense(1, use_bias=False, dtype="float64", name="x")
            model = keras.Sequential([keras.Input((1,)), layer], name="model")
            model.set_weights([tf.zeros((1, 1), tf.float64)])
            options = {"quorum": 2} | options
            optimizer = hvdp.PeriodicOptimizer(local or keras.optimizers.SGD(RATE), model, algorithm, PERIOD, **options)
            model.compile(optimizer, loss="mse", jit_compile=False)
            optimizer.build(model.trainable_variables)
        else:
            model.optimizer.attach(model)
            model.optimizer.start()
        self.model, self.x, self.optimizer = model, model.trainable_variables[0], model.optimizer
        self.take = tf.function(self.step) if compiled else self.step
        if start:
            self.optimizer.synchronizer.begin()

    def replay(self, sets: Sequence[Sequence[int]]) -> None:
        self.optimizer.synchronizer.exchanger.replay(sets)
        barrier()

    def step(self) -> None:
        h, b = CURVATURE[hvd.rank()], MINIMUM[hvd.rank()]
        of_others = [(tf.ones(v.shape, v.dtype), v) for v in self.others]
        self.optimizer.apply_gradients([(h * (tf.convert_to_tensor(self.x) - b) + self.poison, self.x), *of_others])

    def center(self) -> float:
        with self.optimizer.center():
            return float(self.x.numpy()[0, 0])

    def rounds(self, sets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return x and c after every round."""
        self.replay(sets)
        seen = []
        for members in sets:
            for _ in range(PERIOD if hvd.rank() in members else 0):
                self.take()
            barrier()
            seen.append([float(self.x.numpy()[0, 0]), self.center()])
            barrier()
        return seen


@scenario
def numbers() -> Any:
    """Replayed sets: the center after every round, in eager and compiled loops; and x at the end."""
    results = {}
    chosen = ("averaging, discounted", "elastic averaging", "agn, average")
    for number, name in enumerate((*chosen, *repeated(*(name for name in TABLE if name not in chosen)))):
        algorithm, options, _ = TABLE[name]
        own = OUTER[name]() if name in OUTER else {}
        trainer = Trainer(algorithm, compiled=number % 3 == 0, **options | own)
        seen = trainer.rounds(SETS)
        results[name] = [[c for _, c in seen], seen[-1][0]]
        trainer.optimizer.finalize()
    return results


def test_numbers(ranks: list[dict[str, Any]]) -> None:
    """To float32: Keras keeps rates in it."""
    for name in ranks[0]["numbers"]:
        for centers, _ in column(ranks, "numbers", name):
            assert centers == pytest.approx(TABLE[name][2], rel=1e-6), name
    last = [x for _, x in column(ranks, "numbers", "elastic averaging")]
    assert last == pytest.approx([0.478677379, -0.290441984, 0.250068475], rel=1e-6)


ALGORITHMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "diloco": lambda: (DiLoCo(), {}),
    "slowmo": lambda: (SlowMo(), {"weight": "steps"}),
    "bmuf": lambda: (BMUF(), {}),
    "easgd": lambda: (EASGD(rho=0.1), {}),
    "agn": lambda: (AGN(), {"outer_optimizer": keras.optimizers.Adam(0.1)}),
}


@scenario
def rounds_of_all() -> Any:
    """What training with rounds of all ends with, and synchronous training."""
    results = {}
    for number, name in enumerate(("slowmo", *repeated("agn", "easgd", "diloco", "bmuf"))):
        seen = []
        for quorum in (2, None):
            algorithm, options = ALGORITHMS[name]()
            trainer = Trainer(algorithm, compiled=number % 2 == 0, quorum=quorum, **options)
            if quorum is not None:
                trainer.replay([range(3)] * 4)
            for _ in range(4 * PERIOD + 1):
                trainer.take()
            trainer.optimizer.finalize()
            seen.append([float(trainer.x.numpy()[0, 0]), trainer.center()])
        results[name] = seen
    return results


def test_rounds_of_all_are_synchronous_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["rounds_of_all"]:
        for rounds, synchronous in column(ranks, "rounds_of_all", name):
            assert rounds == synchronous, name


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "skip": (DiLoCo(), {"nonfinite": "skip"}),
    "skip, easgd": (EASGD(), {"nonfinite": "skip"}),
    "bounds": (SlowMo(), {"max_message_norm": "median", "max_mean_norm": 0.1}),
    "bound, easgd": (EASGD(0.25), {"max_message_norm": 0.1}),
    "int8": (DiLoCo(), {"compression": hvdp.Compression.int8}),
    "top-k, easgd": (EASGD(0.25), {"compression": hvdp.Compression.topk(0.3)}),
}


@scenario
def options_in_rounds() -> Any:
    """Options in rounds of all, and in synchronous training: what each rank ends with."""
    results = {}
    chosen = ("skip", "bound, easgd", "int8")
    for number, name in enumerate((*chosen, *repeated(*(name for name in OPTIONS if name not in chosen)))):
        (algorithm, options), seen = OPTIONS[name], []
        for quorum in (2, None):
            local = keras.optimizers.SGD(RATE, momentum=0.5)
            trainer = Trainer(algorithm, compiled=number % 3 == 0, local=local, quorum=quorum, **options)
            if quorum is not None:
                trainer.replay([range(3)] * 4)
            for step in range(4 * PERIOD + 1):
                trainer.poison.assign(math.nan if "nonfinite" in options and (step, hvd.rank()) == (3, 1) else 0.0)
                trainer.take()
            trainer.optimizer.finalize()
            counters = trainer.optimizer.synchronizer.counters
            momentum = [v.numpy().tolist() for v in local.variables[1:]]
            seen.append([trainer.x.numpy().tolist(), trainer.center(), momentum, counters.left_out, counters.rounds])
        results[name] = seen
    return results


def test_options_in_rounds_of_all_are_as_synchronously_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    """With compression, whose sums are in float32, as close as that."""
    for name in ranks[0]["options_in_rounds"]:
        _, options = OPTIONS[name]
        for rank, (rounds, synchronous) in enumerate(column(ranks, "options_in_rounds", name)):
            if "compression" in options:
                assert rounds[1] == pytest.approx(synchronous[1], rel=1e-5), name
            else:
                assert rounds == synchronous, name
            assert rounds[3] == (rank == 1 and "nonfinite" in options), name


BEFORE, AFTER = [[0, 1, 2], [0, 1], [0, 1]], [[1, 2], [0, 1, 2], [0, 1]]


@scenario
def saved_at_rest() -> Any:
    """While one rank has been away for two rounds: a file of the model per rank, a set of files, and states."""
    results: dict[str, Any] = {}
    cases = (("diloco", "model"), ("agn", "set"), ("slowmo", "state"), *repeated(("agn", "model"), ("bmuf", "set")))
    for name, way in cases:
        trainer, folder = fresh(name, compiled=way == "model", start=True), FOLDER[0] / name / way
        trainer.rounds(BEFORE)
        resumed = saved(way, trainer, folder, lambda name=name: fresh(name), lambda model: Trainer(None, True, model))
        expected = trainer.rounds(AFTER)
        results[f"{name} {way}"] = resumed().rounds(AFTER) == expected
    return results


def fresh(name: str, compiled: bool = False, start: bool = False) -> Trainer:
    """Return a worker; by default, one whose training has not begun."""
    algorithm, options = ALGORITHMS[name]()
    return Trainer(algorithm, compiled, start=start, **options)


def test_what_was_saved_at_rest_resumes_exactly(ranks: list[dict[str, Any]]) -> None:
    for case in ranks[0]["saved_at_rest"]:
        assert column(ranks, "saved_at_rest", case) == [True] * len(ranks), case


class Late(keras.callbacks.Callback):
    """Lets rank 1 wait, once it has exchanged, until the others have trained through most of the first epoch."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        ahead = [FOLDER[0] / f"fit.{rank}" for rank in (0, 2)]
        if hvd.rank() != 1 and batch == 20:
            ahead[hvd.rank() // 2].touch()
        while hvd.rank() == 1 and batch == 2 and not all(file.exists() for file in ahead):
            time.sleep(0.01)


@scenario
def fit() -> Any:
    """``fit`` with batch normalization and a late rank, which has fewer batches: one center, which all end with."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.Adam(0.01), model, DiLoCo(), 2, quorum=2, grace_seconds=0.0, weight="examples"
    )
    model.compile(optimizer, loss="mse", jit_compile=False)
    inputs = keras.random.normal((16 if hvd.rank() == 1 else 96, 3))
    callbacks = [Late(), hvdp.callbacks.ReportExchanges(), hvdp.callbacks.FinalizeAtEnd()]
    history = model.fit(
        inputs, keras.ops.sum(inputs, 1, keepdims=True), 4, epochs=2, verbose=0, callbacks=callbacks
    ).history
    weights = [w.tolist() for w in model.get_weights()]
    with optimizer.center():
        center = [w.tolist() for w in model.get_weights()]
    counters = optimizer.synchronizer.counters
    return [weights == center, weights, counters.pushes_missed, "staleness_mean" in history, optimizer.get_config()]


def test_fit_goes_on_without_a_slow_rank(ranks: list[dict[str, Any]]) -> None:
    reports = column(ranks, "fit")
    for same, weights, _, reported, config in reports:
        assert same
        assert reported
        assert weights == reports[0][1]
        assert (config["quorum"], config["grace_seconds"]) == (2, 0.0)
    assert reports[1][2] > max(reports[0][2], reports[2][2]), "rounds without it"


@scenario
def adopted() -> Any:
    """After finalize() another variable comes, or none, in compiled steps; as in ``test_quorum.py``."""
    results = {}
    for comes in (False, True):
        trainer = Trainer(DiLoCo(), compiled=True)
        y = keras.Variable([1.0 + hvd.rank()] * 2, dtype="float64", name="y")
        trainer.replay(ADOPTED)

        for members in ADOPTED[:2]:
            for _ in range(PERIOD if hvd.rank() in members else 0):
                trainer.take()
        trainer.optimizer.finalize()
        if comes:
            trainer.optimizer.adopt([trainer.x, y])
            trainer.others.append(y)
            trainer.take = tf.function(trainer.step)
        before = trainer.center(), y.numpy().tolist()
        for _ in range(PERIOD if hvd.rank() in ADOPTED[3] else 0):
            trainer.take()
        trainer.optimizer.finalize()
        with trainer.optimizer.center():
            results["comes" if comes else "alone"] = [*before, float(trainer.x.numpy()[0, 0]), y.numpy().tolist()]
    return results


def test_adopted_after_finalize(ranks: list[dict[str, Any]]) -> None:
    check_adopted(column(ranks, "adopted"))


@scenario
def refusals() -> Any:
    def make(wrap: Any = lambda inner: inner, constraint: Any = None, **options: Any) -> str:
        layer = keras.layers.Dense(1, kernel_constraint=constraint)
        model = keras.Sequential([keras.Input((2,)), layer])

        def construct() -> None:
            options.setdefault("algorithm", EASGD())
            optimizer = hvdp.PeriodicOptimizer(wrap(keras.optimizers.SGD(0.1)), model, **{"period": 2} | options)
            optimizer.build(model.trainable_variables)

        return attempt(construct)

    def level(**options: Any) -> Callable[[Any], Any]:
        return lambda inner: hvdp.PeriodicOptimizer(inner, None, EASGD(), 2, **options)

    return {
        "too large": make(quorum=4),
        "on one rank": make(quorum=2 if hvd.rank() == 0 else None),
        "diloco": make(algorithm=DiLoCo(), quorum=1),
        "overlap": make(quorum=2, overlap=1),
        "state": make(quorum=2, optimizer_state="average"),
        "outer level": make(wrap=level(), quorum=2),
        "inner level": make(wrap=level(quorum=2)),
        "phase": make(algorithm=Averaging(), quorum=2, period=PostLocal(2, 3, quiet=True)),
        "constraint": make(constraint=keras.constraints.NonNeg(), quorum=2),
        "adopt": attempt(lambda: Trainer(EASGD(), False).optimizer.adopt()),
    }


def test_refusals(ranks: list[dict[str, Any]]) -> None:
    expected = {
        "too large": "`quorum` must be at most the number of ranks, n=3",
        "on one rank": "quorum",
        "diloco": "`quorum` must be more than half of the ranks",
        "overlap": "`overlap` is not available with `quorum`",
        "state": "`optimizer_state` must be 'local' with a quorum",
        "outer level": "`quorum` is not available for several levels of optimizers",
        "inner level": "`quorum` is not available for several levels of optimizers",
        "phase": "`quorum` cannot begin with a phase",
        "constraint": "has a constraint, which a center of asynchronous exchange",
        "adopt": "adopt() is not available before finalize() in asynchronous training or with a quorum",
    }
    for name, text in expected.items():
        for found in column(ranks, "refusals", name):
            assert text in found, name


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    FOLDER.append(folder)
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
