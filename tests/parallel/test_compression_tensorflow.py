"""Messages that TensorFlow encodes, in real jobs: a slow oracle, one center on all ranks, places, models, errors."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import compression_oracle as slow
from tests import oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, repeated
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp

scenario = Scenarios(graphs_as_built=True)

WIRES: dict[str, Any] = {
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "topk": hvdp.Compression.topk(0.5),
    "int4": hvdp.Compression.int4,
    "e3m0": hvdp.Compression.e3m0,
    "int2": hvdp.Compression.int2,
    "chunks": hvdp.Compression.topk(chunk=2, keep=1),
}

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(0.5),
}

MOMENTUM = 0.5
"""A number of float32: Keras rounds the momentum."""

LOOPS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "eager": lambda step: step,
    "function": lambda step: tf.function(step),
}


def made(algorithm: Any, variable: Any, rate: float, period: int, **options: Any) -> Any:
    inner = keras.optimizers.SGD(rate, momentum=MOMENTUM)
    optimizer = hvdp.PeriodicOptimizer(inner, None, algorithm, period, **options)
    optimizer.build([variable])
    return optimizer


CASES = [
    *(("average", "fp16", "function"), ("slowmo", "bf16", "function"), ("easgd", "topk", "eager")),
    *(("agn", "int8", "function"), ("average", "int4", "eager"), ("diloco", "e3m0", "eager")),
    *(("agn", "int2", "eager"), ("average", "chunks", "eager")),
    *repeated(
        *(("easgd", "bf16", "function"), ("diloco", "int8", "eager"), ("bmuf", "topk", "function")),
        *(("average", wire, "eager") for wire in WIRES if wire not in ("int4", "chunks")),
        *(
            ("diloco", "e3m0", "function"),
            ("agn", "int2", "function"),
            ("agn", "topk", "function"),
            ("easgd", "int4", "function"),
            ("average", "chunks", "function"),
        ),
    ),
]
"""Algorithms, wires and loops. All algorithms by all wires are in the tests of the core."""


def network() -> Any:
    keras.utils.set_random_seed(hvd.rank())
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(50),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )


def batches(seed: int, count: int) -> Any:
    random = np.random.default_rng(seed + 100 * hvd.rank())
    x = random.standard_normal((4 * count, 6)).astype("float32") + hvd.rank()
    return x, x[:, :2]


def momentum_of(optimizer: Any) -> Any:
    """Return the only momentum of the local optimizer."""
    (momentum,) = (variable for variable in optimizer.variables if "momentum" in variable.path)
    return momentum


pytestmark = pytest.mark.timeout(240)

OF_SIZE = ("compressed_quadratics", "not_finite_on_the_last_rank", "rows_of_tables")
"""What the number of ranks makes a difference for."""

JOBS = [thorough(("mpirun", 2)), ("mpirun", 2, *OF_SIZE), thorough(("horovodrun --gloo", 3, *OF_SIZE))]
"""Launcher, ranks, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: f"{job[0]} {job[1]}", indirect=True)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "test_compression_tensorflow", folder, 200, framework="tensorflow", only=only)


@scenario
def compressed_quadratics() -> Any:
    """The losses of the oracle: x after every step, the center at the end, and bytes."""
    results = {}
    for name, wire, loop in CASES:
        w = keras.Variable(oracle.START, dtype="float64", name="w")
        gradient = tf.Variable(oracle.START, dtype=tf.float64)
        optimizer = made(ALGORITHMS[name](), w, oracle.RATE, PERIOD, compression=WIRES[wire])

        def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
            optimizer.apply_gradients([(tf.identity(gradient), w)])

        step, seen = LOOPS[loop](lambda take=take: take()), []  # type: ignore[misc]
        for _ in range(oracle.STEPS):
            gradient.assign(oracle.gradient(hvd.rank(), w.numpy().tolist()))
            step()
            seen.append(w.numpy().tolist())
        with optimizer.center():
            results[f"{name} {wire} {loop}"] = [seen, w.numpy().tolist()]
    return results


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are float32 in Keras."""
    monkeypatch.setattr(oracle, "MOMENTUM", 0.5)
    for case in ranks[0]["compressed_quadratics"]:
        name, wire, _ = case.split()
        quantize, hops, tolerance = slow.IN_JOBS[wire]
        steps, center = slow.expected(name, len(ranks), quantize, hops)
        reports = column(ranks, "compressed_quadratics", case)
        assert [report[1] for report in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        assert reports[0][1] == pytest.approx(center, rel=2 * tolerance, abs=2 * tolerance), case
        for rank, (seen, _) in enumerate(reports):
            expected = np.ravel([of_ranks[rank] for of_ranks in steps])
            assert np.ravel(seen) == pytest.approx(expected, rel=2 * tolerance, abs=2 * tolerance), (case, rank)


@scenario
def compressed_in_fit() -> Any:
    """Saved in mid-period, and loaded; other numbers of batches on every rank.

    Returns the sums of the center's weights at the end: of the original, and of what was loaded.
    """
    results = {}
    for name, wire in (
        ("average", "int8"),
        ("easgd", "topk"),
        ("agn", "bf16"),
        ("diloco", "chunks"),
        ("average", "int4"),
    ):
        model = network()
        inner = keras.optimizers.SGD(0.01, momentum=MOMENTUM)
        decay = {"error_decay": 0.9} if wire in ("chunks", "int4") else {}
        optimizer = hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, compression=WIRES[wire], **decay)
        model.compile(optimizer, loss="mse", jit_compile=False)
        model.fit(*batches(1, 2 * PERIOD + 1), batch_size=4, shuffle=False, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.saving.load_model(f"{folder}/model.keras")
        loaded.optimizer.attach(loaded)
        ends = []
        for trained in (model, loaded):
            trained.fit(*batches(2, 4 + 3 * hvd.rank()), batch_size=4, shuffle=False, verbose=0)
            trained.optimizer.synchronizer.finalize()
            with trained.optimizer.center():
                ends.append([float(np.sum(weight, dtype="float64")) for weight in trained.get_weights()])
        results[f"{name} {wire}"] = ends
    return results


@whole
def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded, with what was not sent, goes on alike."""
    for case in ranks[0]["compressed_in_fit"]:
        reports = column(ranks, "compressed_in_fit", case)
        assert reports == [reports[0]] * len(ranks), case
        original, loaded = reports[0]
        assert loaded == (original if len(ranks) <= 2 else pytest.approx(original, rel=1e-3, abs=0.05)), case


@scenario
def compressed_and_broadcast() -> Any:
    """The center after two exchanges, where all variables of the optimizer were broadcast before training or not."""
    results = {}
    for wire in ("int8", "bf16", "topk"):
        for broadcast in (False, True):
            w = keras.Variable(np.linspace(-1, 1, 5), dtype="float32", name="w")
            optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=WIRES[wire])
            optimizer.build([w])
            if broadcast:
                hvd.broadcast_variables([getattr(variable, "value", variable) for variable in optimizer.variables], 0)
            for step in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1 + step, 5).astype("f4"), w)])
            with optimizer.center():
                results[f"{wire}{' broadcast' * broadcast}"] = w.numpy().tolist()
    return results


@whole
def test_a_broadcast_before_training_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    """Of all variables, as Horovod's callbacks do it: they have the same names and shapes on all ranks."""
    for report in column(ranks, "compressed_and_broadcast"):
        for wire in ("int8", "bf16", "topk"):
            assert report[f"{wire} broadcast"] == report[wire]
            assert report[wire] == ranks[0]["compressed_and_broadcast"][wire]


@scenario
def compressed_and_restored() -> Any:
    """The center after four exchanges, and that of an optimizer which took over a state after two."""
    results = {}
    for wire in ("int8", "topk"):

        def start(values: Any, wire: str = wire) -> Any:
            w = keras.Variable(values, dtype="float32", name="w")
            optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=WIRES[wire])
            optimizer.build([w])
            return w, optimizer

        def go_on(w: Any, optimizer: Any) -> list[float]:
            for step in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1 + step, 5).astype("f4"), w)])
            with optimizer.center():
                return w.numpy().tolist()  # type: ignore[no-any-return]

        w, optimizer = start(np.linspace(-1, 1, 5))
        go_on(w, optimizer)
        state, momentum = optimizer.synchronizer.state_dict(), momentum_of(optimizer).numpy()
        other, restored = start(w.numpy())
        momentum_of(restored).assign(momentum)
        restored.synchronizer.load_state_dict(state)
        results[wire] = [go_on(w, optimizer), go_on(other, restored)]
    return results


@whole
def test_a_state_holds_what_was_not_sent(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "compressed_and_restored"):
        for wire, (original, restored) in report.items():
            assert restored == original, wire


def touched(optimizer: Any, table: Any, loop: str) -> list[list[float]]:
    """Take steps with gradients of three rows each; return the sums of all rows after each."""

    def take(rows: Any) -> None:
        values = (1.0 + hvd.rank()) * tf.ones((3, 3), tf.float64)
        optimizer.apply([tf.IndexedSlices(values, rows, dense_shape=(1000, 3))], [table])

    step, seen = tf.function(take) if loop == "function" else take, []
    for i in range(oracle.STEPS):
        step(tf.constant([3 * i, 3 * i + 1 + hvd.rank(), 500 + hvd.rank()]))
        seen.append(table.numpy().sum(1).tolist())
    return seen


@scenario
def rows_of_tables() -> Any:
    """A table of which every rank touches other rows in each period: values after each step, and bytes, both ways."""
    results = {}
    for policy, loop in (("rows", "function"), ("average", "eager")):
        for name in ("easgd", "average"):
            table = keras.Variable(np.ones((1000, 3)), dtype="float64", name="table")
            optimizer = hvdp.PeriodicOptimizer(
                keras.optimizers.SGD(0.125), None, ALGORITHMS[name](), PERIOD, parameters={"table": policy}
            )
            optimizer.build([table])

            results[f"{policy} {name}"] = [touched(optimizer, table, loop), optimizer.synchronizer.counters.bytes_sent]
            optimizer.finalize()
    return results


def test_rows_of_tables(ranks: list[dict[str, Any]]) -> None:
    """In compiled steps, as whole tables in eager ones, within rounding."""
    for name in ("easgd", "average"):
        for (rows, fewer), (whole, more) in zip(
            *(column(ranks, "rows_of_tables", f"{policy} {name}") for policy in ("rows", "average")), strict=True
        ):
            assert np.array(rows) == pytest.approx(np.array(whole), rel=1e-12)
            assert 10 * fewer < more


@scenario
def compressed_in_other_places() -> Any:
    """float16 with the center on the root, or sharded: the center after four exchanges; others: the error."""
    results = {}
    for wire, compression in WIRES.items():
        for place in ("replicated", "root", "sharded") if wire in ("fp16", "int8") else ("root",):
            w = keras.Variable(np.linspace(-1, 1, 50), dtype="float32", name="w")
            optimizer = None

            def make(w: Any = w, place: str = place, compression: Any = compression) -> Any:
                return made(hvdp.Averaging(), w, 0.1, 1, center=place, compression=compression)

            error = attempt(make)
            if error:
                results[f"{wire} {place}"] = error
                continue
            optimizer = make()
            for _ in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1, 50).astype("float32"), w)])
            with optimizer.center():
                results[f"{wire} {place}"] = w.numpy().tolist()
    return results


@whole
def test_the_center_elsewhere(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "compressed_in_other_places")
    assert found == [found[0]] * len(ranks)
    for case, report in found[0].items():
        wire, place = case.split()
        if wire == "fp16":
            assert report == pytest.approx(found[0]["fp16 replicated"], abs=0.02), case
        elif place != "replicated":
            assert report.startswith("ValueError: `compression` as "), report
            assert f"needs center='replicated': with center={place!r}" in report


@scenario
def not_finite_on_the_last_rank() -> Any:
    """The error, and the center after it."""
    results = {}
    compiled = {wire: wire in ("int8", "topk") for wire in WIRES}
    cases = [(wire, tuple(LOOPS)[of]) for wire, of in compiled.items()]
    for wire, loop in (*cases, *repeated(*((wire, tuple(LOOPS)[not of]) for wire, of in compiled.items()))):
        w, gradient = keras.Variable([0.0, 0.0], name="w"), tf.Variable([1.0, 1.0])
        optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=WIRES[wire])

        def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
            optimizer.apply_gradients([(tf.identity(gradient), w)])

        step = LOOPS[loop](lambda take=take: take())  # type: ignore[misc]
        step()
        if hvd.rank() == hvd.size() - 1:
            gradient.assign([float("inf"), 1.0])
        error = attempt(step, tf.errors.OpError)
        with optimizer.center():
            results[f"{wire} {loop}"] = [error, w.numpy().tolist()]
    return results


def test_what_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for case in ranks[0]["not_finite_on_the_last_rank"]:
        for rank, (error, center) in enumerate(column(ranks, "not_finite_on_the_last_rank", case)):
            assert center == [0.0, 0.0], "as it was"
            assert ("parameter 'w' is not finite at step 2" if rank == last else f"Rank {last} failed") in error, case


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
