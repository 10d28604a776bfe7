"""Keras parameters in fragments, in real jobs: every loop and place, parts of tensors, models, errors."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, repeated
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.tensorflow.replica import VariableReplica
from tests.parallel.test_compression_tensorflow import ALGORITHMS, LOOPS, MOMENTUM, batches, network

scenario = Scenarios(graphs_as_built=True)

PERIOD = 5


def phase_of(element: int) -> Callable[[hvdp.Clock], int]:
    """Return the schedule of a fragment of one element of three."""
    first = -(-(element + 1) * PERIOD // 3)
    return lambda clock: PERIOD if clock.round else first


def trained(name: str, schedule: Any, elements: Sequence[int], loop: str, **options: Any) -> list[list[float]]:
    """Return the elements after every step on the oracle's losses, after the last exchange, and in the center."""
    variables = {k: keras.Variable(oracle.START[k], dtype="float64", name=f"x{k}") for k in elements}
    shown = {k: tf.Variable(0.0, dtype=tf.float64) for k in elements}
    inner = keras.optimizers.SGD(oracle.RATE, momentum=MOMENTUM)
    optimizer = hvdp.PeriodicOptimizer(inner, None, ALGORITHMS[name](), schedule, **options)
    optimizer.build(list(variables.values()))
    step = LOOPS[loop](lambda: optimizer.apply([tf.identity(shown[k]) for k in elements], list(variables.values())))
    seen = []

    def note() -> None:
        seen.append([variable.numpy().item() for variable in variables.values()])

    for _ in range(oracle.STEPS):
        x = [variables[k].numpy().item() if k in variables else 0.0 for k in range(len(oracle.START))]
        gradients = oracle.gradient(hvd.rank(), x)
        for element, gradient in shown.items():
            gradient.assign(gradients[element])
        step()
        note()
    optimizer.finalize()
    note()
    with optimizer.center():
        note()
    return seen


pytestmark = pytest.mark.timeout(240)

IN_EVERY_RUN = ("fragments_within_a_tensor", "fragments_refused")

JOBS = [
    thorough(("mpirun", 2)),
    ("horovodrun --gloo", 2, *IN_EVERY_RUN),
    thorough(("horovodrun --gloo", 3, *IN_EVERY_RUN)),
]
"""Launcher, ranks, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: f"{job[0]} {job[1]}", indirect=True)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "test_fragments_tensorflow", folder, 200, framework="tensorflow", only=only)


def close(ranks: list[dict[str, Any]], values: Any, tolerance: float) -> Any:
    """Three ranks add in an order of Horovod's own."""
    if len(ranks) <= 2:
        return values
    return [pytest.approx(row, rel=tolerance, abs=tolerance) for row in values]


@scenario
def fragments_of_quadratics() -> Any:
    """Three elements in as many fragments, in every loop and place; and each in a training of its own."""
    results: dict[str, Any] = {}
    for name in ("easgd", "average", "agn", "diloco"):
        alone = [trained(name, phase_of(element), [element], "eager") for element in range(3)]
        results[f"{name} alone"] = [[x for (x,) in values] for values in zip(*alone, strict=True)]
        for loop in LOOPS if name in ("easgd", "agn") else ("function",):
            results[f"{name} {loop}"] = trained(name, PERIOD, range(3), loop, fragments=3)
        for center in ("root", "sharded") if name in ("easgd", "agn") else ():
            results[f"{name} {center}"] = trained(name, PERIOD, range(3), "function", fragments=3, center=center)
    return results


@whole
def test_each_goes_where_it_goes_alone(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(column(ranks, "fragments_of_quadratics")):
        for case, values in report.items():
            alone = report[f"{case.split()[0]} alone"]
            assert values == close(ranks, alone, 1e-12), (case, rank)
            assert (values != report["average alone"]) == (not case.startswith("average")), "as the algorithm has it"


@scenario
def fragments_within_a_tensor() -> Any:
    """One tensor in six buckets and three fragments, in every loop: the tensor after every step."""
    results: dict[str, Any] = {}
    construct = VariableReplica.__init__
    VariableReplica.__init__ = partialmethod(construct, bucket_bytes=4 * 8)  # type: ignore[assignment]
    try:
        for name in ("average", "easgd", *repeated("slowmo")):
            for loop in LOOPS:
                w = keras.Variable(np.linspace(-1, 1, 24).reshape(4, 6), dtype="float64", name="w")
                gradient = tf.Variable(tf.zeros_like(w.value))
                inner = keras.optimizers.SGD(oracle.RATE)
                optimizer = hvdp.PeriodicOptimizer(inner, None, ALGORITHMS[name](), PERIOD, fragments=3)
                optimizer.build([w])

                def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
                    optimizer.apply([tf.identity(gradient)], [w])

                step, seen = LOOPS[loop](lambda take=take: take()), []  # type: ignore[misc]
                for _ in range(2 * PERIOD):
                    gradient.assign((w.value - hvd.rank()) * np.linspace(0.5, 1, 24).reshape(4, 6))
                    step()
                    seen.append(w.numpy().tolist())
                results[f"{name} {loop}"] = seen
    finally:
        VariableReplica.__init__ = construct  # type: ignore[method-assign]
    return results


def test_parts_of_a_tensor(ranks: list[dict[str, Any]]) -> None:
    """Eight elements at a time become equal on all ranks, after two, four and five local steps of a period."""
    reports = column(ranks, "fragments_within_a_tensor")
    for case, steps in reports[0].items():
        for rank, report in enumerate(reports):
            for here, eager in zip(report[case], report[f"{case.split()[0]} eager"], strict=True):
                assert here == close(ranks, eager, 1e-12), (case, rank)
        if case.startswith("easgd"):
            continue
        for step in range(len(steps)):
            found = [[value for row in report[case][step] for value in row] for report in reports]
            equal = [all(of_rank[i] == found[0][i] for of_rank in found) for i in range(24)]
            turn = {1: 0, 3: 1, 4: 2}.get(step % 5)
            assert equal == [i // 8 == turn for i in range(24)], (case, step)


@scenario
def fragments_in_fit() -> Any:
    """Saved within a period, and loaded; other numbers of batches on every rank.

    Returns the sums of the center's weights at the end: of the original, and of what was loaded.
    """
    results = {}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("average", {"fragments": 3, "optimizer_state": "average"}),
        ("agn", {"fragments": 2, "outer_optimizer": keras.optimizers.Adam(0.01)}),
        ("diloco", {"fragments": 3, "compression": hvdp.Compression.int8}),
    ]
    for name, options in cases:
        model = network()
        inner = keras.optimizers.SGD(0.01, momentum=MOMENTUM)
        optimizer = hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, **options)
        model.compile(optimizer, loss="mse", jit_compile=False)
        model.fit(*batches(1, PERIOD + 3), batch_size=4, shuffle=False, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.saving.load_model(f"{folder}/model.keras")
        loaded.optimizer.attach(loaded)
        ends = []
        for trained in (model, loaded):
            trained.fit(*batches(2, 4 + 3 * hvd.rank()), batch_size=4, shuffle=False, verbose=0)
            trained.optimizer.finalize()
            with trained.optimizer.center():
                ends.append([float(np.sum(weight, dtype="float64")) for weight in trained.get_weights()])
        results[f"{name} {sorted(options)}"] = ends
    return results


@whole
def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded within a period goes on alike."""
    for case, (original, loaded) in ranks[0]["fragments_in_fit"].items():
        reports = column(ranks, "fragments_in_fit", case)
        assert reports == [reports[0]] * len(ranks), case
        assert loaded == (original if len(ranks) <= 2 else pytest.approx(original, rel=1e-3, abs=0.05)), case


@scenario
def fragments_follow_the_outer_rate() -> Any:
    """The center after a period, whose outer optimizer was given a rate of 0 after it was built, in every loop."""
    results = {}
    for loop in LOOPS:
        variables = [keras.Variable([1.0, 2.0], name=f"v{i}") for i in range(2)]
        outer = keras.optimizers.SGD(1.0)
        inner = keras.optimizers.SGD(0.1)
        optimizer = hvdp.PeriodicOptimizer(inner, None, hvdp.DiLoCo(), 2, outer_optimizer=outer, fragments=2)
        optimizer.build(variables)
        outer.learning_rate = 0.0

        def take(optimizer: Any = optimizer, variables: Any = variables) -> None:
            optimizer.apply([tf.ones(2), tf.ones(2)], variables)

        step = LOOPS[loop](lambda take=take: take())  # type: ignore[misc]
        for _ in range(2):
            step()
        with optimizer.center():
            results[loop] = [variable.numpy().tolist() for variable in variables]
    return results


@whole
def test_the_rate_of_a_given_outer_optimizer_is_followed(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "fragments_follow_the_outer_rate"):
        assert len(report) == len(ranks[0]["fragments_follow_the_outer_rate"]) > 1
        assert all(center == [[1.0, 2.0], [1.0, 2.0]] for center in report.values())


@scenario
def fragments_refused() -> Any:
    """Wrong numbers of fragments, on all ranks or on the last one; periods that are too short."""
    last = hvd.rank() == hvd.size() - 1

    def made(fragments: Any, period: Any = PERIOD, algorithm: Any = hvdp.Averaging, **options: Any) -> Any:
        variables = [keras.Variable(np.ones(2), name=f"x{i}") for i in range(3)]
        inner = keras.optimizers.SGD(0.1)
        optimizer = hvdp.PeriodicOptimizer(inner, None, algorithm(), period, fragments=fragments, **options)
        optimizer.build(variables)
        return optimizer, variables

    def stepped(optimizer: Any, variables: Any) -> None:
        step = tf.function(lambda: optimizer.apply([tf.ones(2)] * 3, variables))
        for _ in range(3):
            step()

    shrinking = hvdp.Piecewise({0: 3, 3: 2})
    return {
        "many": attempt(lambda: made(4)),
        "type": attempt(lambda: made(1.5)),
        "on the last": attempt(lambda: made(4 if last else 3)),
        "different": attempt(lambda: made(2 if last else 3)),
        "short": attempt(lambda: made(3, 2)),
        "shrinking": attempt(lambda: stepped(*made(3, shrinking)), tf.errors.OpError),
        "outer": attempt(lambda: made(4, algorithm=hvdp.AGN)),
    }


def test_refused(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    short = "`fragments` must be at most the local steps of a period, one for each. Received: fragments=3, and a period"
    texts = {
        "many": "`fragments` must be at most 3, the number of tensors and buckets that the model can be cut into",
        "type": "`fragments` must be an int >= 1. Received: 1.5",
        "different": "All ranks must run the same optimizer. They differ in schedule",
        "short": f"{short} of 2 at step 0",
        "shrinking": f"{short} of 2 at step 3",
        "outer": "`fragments` must be at most 3, the number of tensors that the model can be cut into",
    }
    for rank, report in enumerate(column(ranks, "fragments_refused")):
        for case, text in texts.items():
            assert text in report[case], case
        assert ("`fragments` must be at most 3" if rank == last else f"Rank {last} failed") in report["on the last"]


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
