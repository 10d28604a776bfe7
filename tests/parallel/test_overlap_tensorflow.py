"""Keras exchanges in flight during local steps, in real jobs: every loop, models in ``fit``, files, errors."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import oracle, overlap_oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, repeated
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.parallel.test_compression_tensorflow import ALGORITHMS, LOOPS, MOMENTUM, batches, network

pytestmark = pytest.mark.timeout(240)

JOBS = [("mpirun", 2), thorough(("horovodrun --gloo", 3))]

scenario = Scenarios(graphs_as_built=True)

CASES = [
    *(("easgd", 1, "function"), ("average", "period", "function"), ("slowmo", 1, "eager")),
    *(("agn", 2, "eager"), ("easgd", 0, "function")),
    *repeated(("agn", 1, "function"), ("diloco", "period", "function"), ("bmuf", "period", "function")),
    *repeated(("easgd", 2, "eager"), ("easgd", "period", "function"), ("slowmo", 1, "function")),
]
"""Algorithms, overlaps and loops. All algorithms by all overlaps are in the tests of PyTorch."""


def rated(name: str) -> Any:
    """Return an optimizer that moves the center by the oracle's numbers, for algorithms whose default would not."""
    return keras.optimizers.SGD(oracle.RATE, momentum=MOMENTUM) if name == "agn" else None


@scenario
def overlapped_quadratics() -> Any:
    """The losses of the oracle: x after every step, after the last exchange, and in the center."""
    results = {}
    for name, overlap, loop in CASES:
        w = keras.Variable(oracle.START, dtype="float64", name="w")
        gradient = tf.Variable(oracle.START, dtype=tf.float64)
        inner = keras.optimizers.SGD(oracle.RATE, momentum=MOMENTUM)
        optimizer = hvdp.PeriodicOptimizer(
            inner, None, ALGORITHMS[name](), PERIOD, outer_optimizer=rated(name), overlap=overlap
        )
        optimizer.build([w])

        def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
            optimizer.apply([tf.identity(gradient)], [w])

        step, seen = LOOPS[loop](lambda take=take: take()), []  # type: ignore[misc]
        for _ in range(oracle.STEPS):
            gradient.assign(oracle.gradient(hvd.rank(), w.numpy().tolist()))
            step()
            seen.append(w.numpy().tolist())
            assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [hvd.size()] * 2, "of a script's own"
        optimizer.finalize()
        seen.append(w.numpy().tolist())
        with optimizer.center():
            seen.append(w.numpy().tolist())
        results[f"{name} {overlap} {loop}"] = seen
    return results


@scenario
def overlapped_in_fit() -> Any:
    """Saved in mid-flight, with Keras or with ``hvdp.save``, and loaded; other numbers of batches on every rank.

    Returns the sums of the center's weights at the end: of the original, and of those that were loaded.
    """
    results = {}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("average", {"overlap": "period", "fragments": 2, "optimizer_state": "average"}),
        ("agn", {"overlap": 2, "outer_optimizer": keras.optimizers.Adam(0.01)}),
        *repeated(("easgd", {"overlap": 2}), ("diloco", {"overlap": 2, "compression": hvdp.Compression.int8})),
    ]
    for number, (name, options) in enumerate(cases):

        def compiled(model: Any, name: str = name, options: Any = options) -> Any:
            inner = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9), momentum=MOMENTUM)
            outer = {"outer_optimizer": keras.optimizers.Adam(0.01)} if "outer_optimizer" in options else {}
            optimizer = hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, **options | outer)
            model.compile(optimizer, loss="mse", jit_compile=False)
            return model

        model = compiled(network())
        model.fit(*batches(1, PERIOD + 1), batch_size=4, shuffle=False, verbose=0)
        flying = model.optimizer.synchronizer.state_dict()["under_way"] is not None
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.saving.load_model(f"{folder}/model.keras")
            shared = hvd.broadcast_object(folder, 0)
            hvdp.save(shared, model, model.optimizer)
            other = compiled(network())
            hvdp.load(shared, other, other.optimizer)
            hvd.allreduce(tf.zeros(1), name="loaded")
        loaded.optimizer.attach(loaded)
        ends = []
        one, another = (loaded, other) if number % 2 == 0 else (other, loaded)
        for trained in (model, one, *repeated(another)):
            trained.fit(*batches(2, 4 + 3 * hvd.rank()), batch_size=4, shuffle=False, verbose=0)
            trained.optimizer.finalize()
            with trained.optimizer.center():
                ends.append([float(np.sum(weight, dtype="float64")) for weight in trained.get_weights()])
        results[name] = [flying, *ends]
    return results


@scenario
def one_rank_looks() -> Any:
    """One rank alone reads the center in mid-flight, which an optimizer moves by a rate on a schedule.

    Returns the center at the end.
    """
    w = keras.Variable(np.array([1.0, 2.0]) + hvd.rank(), dtype="float64", name="w")
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = hvdp.PeriodicOptimizer(keras.optimizers.SGD(rate), None, hvdp.AGN("average"), 2, overlap="period")
    optimizer.build([w])
    step = tf.function(lambda: optimizer.apply([tf.ones_like(w.value)], [w]))
    for _ in range(3):
        step()
    if hvd.rank() == 0:
        with optimizer.center():
            pass
    step()
    optimizer.finalize()
    with optimizer.center():
        return w.numpy().tolist()


@scenario
def overlap_refused() -> Any:
    """Overlaps that make no sense, on all ranks or on the last one."""
    last = hvd.rank() == hvd.size() - 1

    def made(overlap: Any, inside: bool = False, **options: Any) -> Any:
        inner: Any = keras.optimizers.SGD(0.1)
        if inside:
            inner = hvdp.ModelAverageOptimizer(inner, None, 2, overlap=1)
        optimizer = hvdp.ElasticAverageOptimizer(inner, None, PERIOD, overlap=overlap, **options)
        optimizer.build([keras.Variable(np.ones(2), name="x")])
        return optimizer

    return {
        "word": attempt(lambda: made("step")),
        "type": attempt(lambda: made(1.5)),
        "on the last": attempt(lambda: made(-1 if last else 1)),
        "different": attempt(lambda: made(2 if last else 1)),
        "root": attempt(lambda: made(1, center="root")),
        "groups": attempt(lambda: made(1, process_set=lambda: [hvd.rank()])),
        "levels": attempt(lambda: made(0, inside=True)),
    }


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(*request.param, "test_overlap_tensorflow", folder, 200, framework="tensorflow")


def test_no_local_progress_is_lost(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MOMENTUM", 0.5)  # a number of float32: Keras rounds the momentum
    found = ranks[0]["overlapped_quadratics"]
    for case in found:
        name, overlap, _ = case.split()
        reports = column(ranks, "overlapped_quadratics", case)
        assert [seen[-1] for seen in reports] == [reports[0][-1]] * len(ranks), "one center"
        if name == "easgd":
            for seen, other in zip(reports, column(ranks, "overlapped_quadratics", "easgd 0 function"), strict=True):
                tolerance = 0 if len(ranks) <= 2 else 1e-12
                assert np.array(seen) == pytest.approx(np.array(other), rel=tolerance, abs=tolerance), case
            continue
        steps = overlap_oracle.expected(name, len(ranks), overlap if overlap == "period" else int(overlap))
        for rank, seen in enumerate(reports):
            right = np.array([of_ranks[rank] for of_ranks in steps])
            assert np.array(seen[: len(right)]) == pytest.approx(right, rel=1e-6, abs=1e-6), (case, rank)


def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded in mid-flight goes on alike."""
    for case, (flying, original, *loaded) in ranks[0]["overlapped_in_fit"].items():
        reports = column(ranks, "overlapped_in_fit", case)
        assert flying == (case != "easgd"), "elastic averaging has nothing to take once the center has moved"
        assert reports == [reports[0]] * len(ranks), case
        tolerance = 0 if len(ranks) <= 2 else 1e-4
        for each in loaded:
            assert each == pytest.approx(original, rel=tolerance, abs=tolerance), case


def test_the_center_moves_by_the_rate_of_the_step_at_which_the_exchange_began(ranks: list[dict[str, Any]]) -> None:
    """Gradients of ones, normalized: c loses the rates after two and after four steps, 1/8 and 1/32."""
    for center in column(ranks, "one_rank_looks"):
        assert center == pytest.approx([1 - 5 / 32, 2 - 5 / 32])


def test_refused(ranks: list[dict[str, Any]]) -> None:
    cases = ranks[0]["overlap_refused"]
    expected = {
        "word": "`overlap` must be an int >= 0 or 'period'. Received: 'step'",
        "type": "`overlap` must be an int",
        "root": "`overlap` needs center='replicated'",
        "groups": "With a function as `process_set`, groups exchange in lockstep",
        "levels": "`overlap` needs a single level",
        "different": "overlap",
        "on the last": "overlap",
    }
    assert cases.keys() == expected.keys()
    for case, text in expected.items():
        for report in column(ranks, "overlap_refused", case):
            assert text in report, case


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
