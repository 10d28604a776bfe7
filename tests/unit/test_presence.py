"""Parameters to which only ranks with gradients of them contribute, on numpy: against a slow oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import (
    AGN,
    BMUF,
    EASGD,
    Algorithm,
    Averaging,
    Communicator,
    Compression,
    DiLoCo,
    SlowMo,
)
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import Array, readable, run_ranks
from tests.oracle import MOMENTUM, RATE, Present, has_gradient, present, slope

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "average": Averaging,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
    "easgd": lambda: EASGD(0.25, rho=0.5),
    "agn": AGN,
    "agn average": lambda: AGN(op="average"),
}
HAS_MEAN = [name for name in ALGORITHMS if name not in ("easgd", "agn")]
CENTERS = ["replicated", "root", "sharded"]
RANKS, STEPS, PERIOD = 3, 13, 2
START = {"e.0": [1.0, -2.0, 0.5], "x": [1.0, 0.25], "e.1": [-1.0], "y": [2.0, 0.5, 1.5]}
WHICH = {"e.0": 0, "e.1": 1}
"""The parameters that are present on some ranks only, with the number of their pattern."""


Model = dict[str, Array]


def started(dtype: str = "f8") -> Model:
    return {name: np.array(values, dtype) for name, values in START.items()}


def made(model: Model, communicator: Communicator, algorithm: str, **options: Any) -> PeriodicOptimizer:
    outer = SGD(0.1, 0.9) if algorithm.startswith("agn") else None
    options = {"parameters": {"e.*": "present"}, "period": PERIOD, "outer_optimizer": outer} | options
    return PeriodicOptimizer(SGD(RATE, MOMENTUM), model, ALGORITHMS[algorithm](), process_set=communicator, **options)


def gradients_of(rank: int, step: int, model: Model) -> dict[str, Array]:
    """Return this rank's gradients at a step, without those that it does not have."""
    return {
        name: np.array([slope(rank, x_k) for x_k in x.tolist()])
        for name, x in model.items()
        if name not in WHICH or has_gradient(rank, step, WHICH[name])
    }


def trained(model: Model, optimizer: PeriodicOptimizer, rank: int, steps: range = range(1, STEPS + 1)) -> list[Any]:
    """Return the values after each step, and those of the center at the end."""
    seen = []
    for step in steps:
        optimizer.step(gradients_of(rank, step, model))
        seen.append({name: x.tolist() for name, x in model.items()})
    with optimizer.center():
        seen.append({name: x.tolist() for name, x in model.items()})
    return seen


def expected(algorithm: str, phase: dict[str, int] | None = None, period: int = PERIOD, **options: Any) -> list[Any]:
    """Return the values on each rank after each step, and the center, by the oracle."""
    weights, delay = options.get("weights", ()), options.get("delay", 0)
    found: list[list[dict[str, list[float]]]] = [
        [{name: [] for name in START} for _ in range(STEPS + 1)] for _ in range(RANKS)
    ]
    for name, values in START.items():
        which, first = WHICH.get(name), (phase or {}).get(name, period)
        for value in values:
            element = Present(value, RANKS, algorithm, weights, takes_part=which is None)
            exchanges = range(first, STEPS + 1, period)
            replicas = present(
                element, STEPS, exchanges, lambda i, t, which=which: which is None or has_gradient(i, t, which), delay
            )
            for step, of_ranks in enumerate(replicas):
                for rank, x in enumerate(of_ranks):
                    found[rank][step][name].append(x)
            for rank in range(RANKS):
                found[rank][STEPS][name].append(element.center)
    return found


def check(found: list[Any], oracle: list[Any], **tolerance: float) -> None:
    for of_rank, of_oracle in zip(found, oracle, strict=True):
        for step, (values, right) in enumerate(zip(of_rank, of_oracle, strict=True)):
            for name in START:
                assert values[name] == pytest.approx(right[name], **(tolerance or {"rel": 1e-10})), (name, step)


@pytest.mark.parametrize(("algorithm", "center"), covering(ALGORITHMS, CENTERS, together=1))
def test_oracle(algorithm: str, center: str) -> None:
    def work(communicator: Communicator) -> Any:
        model = started()
        return trained(model, made(model, communicator, algorithm, center=center), communicator.rank)

    check(run_ranks(RANKS, work), expected(algorithm))


@pytest.mark.parametrize(("algorithm", "center"), covering(HAS_MEAN, CENTERS, together=1))
def test_weights(algorithm: str, center: str) -> None:
    """Σ w_i p_i (h − x_i) / Σ w_i p_i."""
    weights = [3.0, 1.0, 2.5]

    def work(communicator: Communicator) -> Any:
        model, weight = started(), weights[communicator.rank]
        return trained(model, made(model, communicator, algorithm, center=center, weight=weight), communicator.rank)

    check(run_ranks(RANKS, work), expected(algorithm, weights=weights))


def test_semantics() -> None:
    """Three workers with gradients on {1, 2}, {3}, none and {1, 2, 3}: the numbers of the specification."""
    rounds: list[set[int]] = [{0, 1}, {2}, set(), {0, 1, 2}]
    cases: dict[str, tuple[Callable[[], Algorithm], SGD | None, list[float]]] = {
        "averaging": (Averaging, None, [0.05125, 0.2128, 0.2128, 0.261037333]),
        "DiLoCo": (DiLoCo, None, [0.0681625, 0.303985045, 0.303985045, 0.456264817]),
        "elastic": (lambda: EASGD(0.25), None, [0.025625, 0.06421875, 0.06421875, 0.126757739]),
        "AGN": (lambda: AGN(op="average"), SGD(0.1, 0.9), [0.025625, 0.134075, 0.134075, 0.264294406]),
    }

    def work(communicator: Communicator, algorithm: Callable[[], Algorithm], outer: SGD | None) -> list[float]:
        h, b = [(0.5, 3.0), (1.0, -1.0), (2.0, 0.5)][communicator.rank]
        model, seen = {"expert": np.zeros(1), "x": np.zeros(1)}, []
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"expert": "present"}}
        optimizer = PeriodicOptimizer(SGD(0.1), model, algorithm(), 2, outer_optimizer=outer, **options)
        for there in rounds:
            for _ in range(2):
                g = h * (model["expert"] - b) if communicator.rank in there else None
                optimizer.step([g, np.zeros(1)])
            with optimizer.center():
                seen.append(float(model["expert"][0]))
        return seen

    for name, (algorithm, outer, numbers) in cases.items():
        found = run_ranks(3, lambda communicator, a=algorithm, o=outer: work(communicator, a, o))  # type: ignore[misc]
        assert found == [pytest.approx(numbers, rel=1e-8)] * 3, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_everybody_present_is_the_exchange_without_a_policy(algorithm: str) -> None:
    """To the bit."""

    def work(communicator: Communicator, parameters: Any) -> Any:
        model, rank = started(), communicator.rank
        optimizer = made(model, communicator, algorithm, parameters=parameters)
        for _ in range(5):
            optimizer.step({name: np.array([slope(rank, x_k) for x_k in x]) for name, x in model.items()})
        return {name: x.tolist() for name, x in model.items()}

    by_pattern = run_ranks(RANKS, lambda communicator: work(communicator, {"e.*": "present"}))
    assert by_pattern == run_ranks(RANKS, lambda communicator: work(communicator, None))


def test_zeros_count_as_gradients() -> None:
    def work(communicator: Communicator) -> list[float]:
        model = {"x": np.zeros(1)}
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 1, **options)
        optimizer.step({"x": np.array([-3.0 * communicator.rank])})
        first = float(model["x"][0])
        optimizer.step({"x": np.array([-3.0])} if communicator.rank else {})
        return [first, float(model["x"][0])]

    assert run_ranks(2, work) == [[1.5, 4.5]] * 2


def test_a_gradient_in_any_step_since_the_last_exchange_counts() -> None:
    def work(communicator: Communicator) -> list[float]:
        model, seen = {"x": np.zeros(1)}, []
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 3, **options)
        for step in range(1, 7):
            mine = step in ((1, 5), (2,))[communicator.rank]
            optimizer.step([-np.ones(1) * (1 + communicator.rank) if mine else None])
            seen.append(float(model["x"][0]))
        return seen

    assert run_ranks(2, work) == [[1.0, 1.0, 1.5, 1.5, 2.5, 2.5], [0.0, 2.0, 1.5, 1.5, 1.5, 2.5]]


def test_conservation_in_elastic_averaging() -> None:
    """Σ over those present + c; without gradients at the exchange itself, everybody is pulled."""

    def work(communicator: Communicator) -> list[float]:
        model, rank = {"x": np.zeros(1)}, communicator.rank
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, EASGD(0.25), 1, **options)
        optimizer.step([-np.ones(1)] if rank < 2 else [None])
        with optimizer.center():
            center = float(model["x"][0])
        return [float(model["x"][0]), center]

    assert run_ranks(3, work) == [[0.75, 0.5], [0.75, 0.5], [0.0, 0.5]]


@pytest.mark.parametrize("center", CENTERS)
def test_an_optimizer_of_the_center_passes_over_what_nobody_has(center: str) -> None:
    """Its momentum stays as well: DiLoCo with heavy-ball momentum."""

    def work(communicator: Communicator, algorithm: Algorithm, outer: SGD | None) -> Any:
        model = started()
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"e.*": "present"}, "center": center}
        optimizer = PeriodicOptimizer(SGD(RATE, MOMENTUM), model, algorithm, PERIOD, outer_optimizer=outer, **options)
        return trained(model, optimizer, communicator.rank)

    own = DiLoCo(0.7, 0.9, nesterov=False)
    check(
        run_ranks(RANKS, lambda communicator: work(communicator, DiLoCo(), SGD(0.7, 0.9))),
        run_ranks(RANKS, lambda communicator: work(communicator, own, None)),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overlap(algorithm: str) -> None:
    """What was seen while an exchange is in flight belongs to the next one."""

    def work(communicator: Communicator) -> Any:
        model = started()
        return trained(model, made(model, communicator, algorithm, overlap=1), communicator.rank)

    check(run_ranks(RANKS, work), expected(algorithm, delay=1))


@pytest.mark.parametrize(("algorithm", "options"), covering(ALGORITHMS, ({}, {"overlap": 1}), together=1), ids=str)
def test_fragments(algorithm: str, options: dict[str, Any]) -> None:
    """Each fragment has its own last exchange, since which gradients count."""

    def work(communicator: Communicator) -> Any:
        model = started()
        optimizer = made(model, communicator, algorithm, fragments=2, period=4, **options)
        layout, fragments = optimizer._replica.parameters.layout, optimizer.synchronizer.exchanger.context.fragments
        names = [[layout.specs[p.tensor].name for bucket in f.buckets for p in bucket.pieces] for f in fragments]
        assert names == [["e.0", "x"], ["e.1", "y"]]
        return trained(model, optimizer, communicator.rank)

    phase = {"e.0": 2, "x": 2, "e.1": 4, "y": 4}
    check(run_ranks(RANKS, work), expected(algorithm, phase, period=4, delay=options.get("overlap", 0)))


def test_top_1_of_two_elements_by_hand() -> None:
    """Who is absent sends nothing and keeps its error; the error of who is present is in units of its weight."""
    moves = [
        [(1.0, 0.25), (0.5, 1.0)],
        [(1.0, 0.25), None],
        [(1.0, 0.5), (1.0, 1.0)],
        [None, None],
        [None, (0.25, 0.5)],
    ]

    def work(communicator: Communicator) -> tuple[list[Any], Any]:
        model, seen = {"x": np.zeros(2)}, []
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 1, compression=Compression.topk(0.5), **options)
        for of_ranks in moves:
            move = of_ranks[communicator.rank]
            optimizer.step([None if move is None else -np.array(move)])
            seen.append(tuple(model["x"].tolist()))
        return seen, optimizer.synchronizer.state_dict()["vectors"]["parameters"]["unsent"]["x"].tolist()

    center = [(0.5, 0.5), (1.5, 0.5), (2.25, 1.125), (2.25, 1.125), (2.25, 2.125)]
    assert run_ranks(2, work) == [(center, [1.0, 0.0]), (center, [0.5, 0.0])]


@pytest.mark.parametrize("compression", [Compression.int8, Compression.topk(0.4), Compression.fp16], ids=readable)
def test_compression_loses_nothing(compression: Any) -> None:
    """n c + Σ e_i + e_s = Σ n/S Σ p_i (x_i − c), though some are absent, or all."""

    def work(communicator: Communicator) -> Any:
        model, rank, sums = started("f4"), communicator.rank, {name: np.zeros(len(START[name])) for name in START}
        optimizer = PeriodicOptimizer(
            SGD(1.0),
            model,
            Averaging(),
            1,
            process_set=communicator,
            parameters={"e.*": "present"},
            compression=compression,
        )
        for step in range(1, STEPS + 1):
            gradients = {name: g.astype("f4") / 7 for name, g in gradients_of(rank, step, model).items()}
            for name, g in gradients.items():
                which = WHICH.get(name)
                there = sum(which is None or has_gradient(i, step, which) for i in range(RANKS))
                sums[name] -= g.astype("f8") * RANKS / there
            optimizer.step(gradients)
        feedback = optimizer.synchronizer.tensor_groups.parameters.error_feedback
        of_sums = feedback.second_hop_residual
        row = [] if of_sums is None else of_sums.read(of_sums.layout.buckets[0]).tolist()
        unsent = optimizer.synchronizer.state_dict()["vectors"]["parameters"]["unsent"]
        return model, sums, unsent, row

    found = run_ranks(RANKS, work)
    of_sums = np.array([value for *_, row in found for value in row] or [0.0] * 9)
    place = 0
    for name, start in START.items():
        held = RANKS * (found[0][0][name].astype("f8") - start) + sum(unsent[name] for _, _, unsent, _ in found)
        held += of_sums[place : place + len(start)]
        if compression is not Compression.fp16:  # The collective sums in 16 bits.
            assert held == pytest.approx(sum(sums[name] for _, sums, _, _ in found), abs=1e-5), name
        place += len(start)
        assert all((model[name] == found[0][0][name]).all() for model, *_ in found)


@pytest.mark.parametrize("compression", [Compression.int8, Compression.topk(0.4)], ids=readable)
def test_compressed_elastic_averaging(compression: Any) -> None:
    """c moves by what those present were pulled; who is absent is pulled by its whole displacement."""

    def work(communicator: Communicator) -> Any:
        model, rank, pulls = {"x": np.zeros(5, "f4")}, communicator.rank, np.zeros(5)
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present", "compression": compression}
        optimizer = PeriodicOptimizer(SGD(1.0), model, EASGD(0.25), 1, **options)
        center = np.zeros(5)
        for step in range(1, STEPS + 1):
            g = np.linspace(-1, 1 + rank, 5).astype("f4") if has_gradient(rank, step, 0) else None
            before = model["x"] - (0 if g is None else g)
            optimizer.step([g])
            if g is None:
                assert model["x"] == pytest.approx(before - 0.25 * (before - center), abs=1e-6)
            else:
                pulls += before - model["x"]
            (center,) = (c.astype("f8") for c in optimizer.synchronizer.center_tensors())
        of_sums = optimizer.synchronizer.tensor_groups.parameters.error_feedback.second_hop_residual
        row = np.zeros(2) if of_sums is None else of_sums.read(of_sums.layout.buckets[0]).copy()
        return pulls, center, row

    found = run_ranks(RANKS, work)
    unsent = np.concatenate([row for *_, row in found])[:5]
    assert found[0][1] + 0.25 * unsent == pytest.approx(sum(pulls for pulls, _, _ in found), abs=1e-5)
