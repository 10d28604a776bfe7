"""Bounds on the norms of messages and of their mean, against a slow computation of whole vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Algorithm, Averaging, Communicator, Compression, DiLoCo, SlowMo, read_run_log
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer, NumpyReplica, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(0.25),
    "average": Averaging,
    "agn": AGN,
    "agn, average": lambda: AGN("average"),
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
    "int8": {"compression": Compression.int8},
    "int8, overlap": {"compression": Compression.int8, "overlap": 1},
    "fragments": {"fragments": 2},
    "weight": {"weight": lambda: 2.0},
}
RATE, STEPS, PERIOD, RANKS = 0.125, 8, 2, 3
START = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 2.0])


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the parameters into buckets of two elements: a norm is over several buckets."""
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", partial(NumpyReplica, bucket_bytes=16))


def gradient_of(rank: int, x: Array) -> Array:
    return (0.5 + 0.25 * rank) * (x - (1.5 - rank))


class Model:
    """A vector in two arrays of one memory, with its optimizer."""

    def __init__(self, communicator: Communicator, algorithm: str, **options: Any) -> None:
        self.x, self.rank = START.copy(), communicator.rank
        arrays = {"a": self.x[:4].reshape(2, 2), "b": self.x[4:]}
        self.optimizer = PeriodicOptimizer(
            SGD(RATE), arrays, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, **options
        )

    def step(self) -> list[float]:
        """Return the values after a step."""
        g = gradient_of(self.rank, self.x)
        self.optimizer.step([g[:4].reshape(2, 2), g[4:]])
        return list(map(float, self.x))

    def center(self) -> list[float]:
        with self.optimizer.center():
            return list(map(float, self.x))


def trained(communicator: Communicator, algorithm: str, **options: Any) -> list[list[float]]:
    """Return the values after each step, and those of the center at the end."""
    model = Model(communicator, algorithm, **options)
    return [*(model.step() for _ in range(STEPS)), model.center()]


def cut(vector: Array, bound: float | None) -> Array:
    return vector if bound is None else vector * min(1.0, bound / float(np.linalg.norm(vector)))


def expected(algorithm: str, bound: float | str | None, of_mean: float | None, weights: list[float]) -> list[Any]:
    """Return the replicas after each step, by the formulas, and the center at the end."""
    x, c, m = [START.copy() for _ in weights], START.copy(), np.zeros_like(START)
    a, n, seen = [np.zeros_like(START) for _ in weights], len(weights), []
    for step in range(1, STEPS + 1):
        for i in range(n):
            g = gradient_of(i, x[i])
            a[i], x[i] = a[i] + g, x[i] - RATE * g
        if step % PERIOD == 0:
            raw = [a[i] / PERIOD if algorithm.startswith("agn") else x[i] - c for i in range(n)]
            norms = [float(np.linalg.norm(message)) for message in raw]
            limit = median(norms) if bound == "median" else bound
            messages = [cut(message, limit) for message in raw]  # type: ignore[arg-type]
            total: Array = sum(messages)  # type: ignore[assignment]
            weighted = sum(w * message for w, message in zip(weights, messages, strict=True)) / sum(weights)
            if algorithm == "easgd":
                x = [x[i] - 0.25 * messages[i] for i in range(n)]
                c = c + 0.25 * total
            else:
                mean = cut(total if algorithm == "agn" else weighted, of_mean)
                if algorithm.startswith("agn"):
                    c = c - RATE * mean
                elif algorithm == "average":
                    c = c + mean
                elif algorithm == "slowmo":
                    m = 0.5 * m - mean / RATE
                    c = c - RATE * m
                else:
                    m = 0.9 * m - mean
                    c = c - 0.7 * (-mean + 0.9 * m)
                x = [c.copy() for _ in weights]
            a = [np.zeros_like(START) for _ in weights]
        seen.append([list(each) for each in x])
    return [*seen, [list(c)] * n]


@pytest.mark.parametrize(
    ("algorithm", "bounds", "center"),
    covering(
        ("easgd", "average", "diloco", "slowmo", "agn", "agn, average"),
        ((0.5, None), ("median", None), (None, 0.25), (0.75, 0.25)),
        ("replicated", "root", "sharded"),
    ),
)
def test_agreement_with_whole_vectors(algorithm: str, bounds: tuple[Any, Any], center: str) -> None:
    bound, of_mean = bounds
    options = {"max_message_norm": bound, "max_mean_norm": None if algorithm == "easgd" else of_mean}
    found = run_ranks(RANKS, lambda c: trained(c, algorithm, center=center, **options))
    wanted = expected(algorithm, bound, of_mean, [1.0] * RANKS)
    for rank, seen in enumerate(found):
        np.testing.assert_allclose(seen, [each[rank] for each in wanted], rtol=1e-12, atol=1e-12)
    unbounded = expected(algorithm, None, None, [1.0] * RANKS)
    assert options["max_message_norm"] is options["max_mean_norm"] or not np.allclose(
        found[0], np.array(unbounded)[:, 0]
    )


def test_weights_come_after_the_first_bound_and_before_the_second() -> None:
    options: dict[str, Any] = {"max_message_norm": 0.5, "max_mean_norm": 0.3}
    found = run_ranks(RANKS, lambda c: trained(c, "average", weight=1.0 + c.rank, **options))
    wanted = expected("average", 0.5, 0.3, [1.0, 2.0, 3.0])
    for rank, seen in enumerate(found):
        np.testing.assert_allclose(seen, [each[rank] for each in wanted], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_bounds_that_nothing_reaches_change_nothing(algorithm: str, way: str) -> None:
    """To the bit."""
    mean = {} if algorithm == "easgd" else {"max_mean_norm": 1e6}
    options = {} if way == "weight" and algorithm in ("easgd", "agn") else WAYS[way]
    bounded = run_ranks(RANKS, lambda c: trained(c, algorithm, max_message_norm=1e6, **mean, **options))
    assert bounded == run_ranks(RANKS, lambda c: trained(c, algorithm, **options))


@pytest.mark.parametrize("algorithm", ["easgd", "average", "agn", "diloco"])
def test_overlap_sends_the_same_messages(algorithm: str) -> None:
    """Elastic averaging: the trajectory is the same; else a step of the center is at most λ R/(1 − μ)."""
    mean = {} if algorithm == "easgd" else {"max_mean_norm": 0.25}
    options: dict[str, Any] = {"max_message_norm": 0.5, **mean}
    found = run_ranks(RANKS, lambda c: trained(c, algorithm, overlap=1, **options))
    if algorithm == "easgd":
        assert found == run_ranks(RANKS, lambda c: trained(c, algorithm, **options))
    centers = {tuple(seen[-1]) for seen in found}
    assert len(centers) == 1
    limit = {"easgd": 0.25 * RANKS * 0.5, "average": 0.25, "agn": RATE * 0.25, "diloco": 0.7 * 0.25 / (1 - 0.9)}
    moved = float(np.linalg.norm(np.array(found[0][-1]) - START))
    assert 0 < moved <= limit[algorithm] * (STEPS // PERIOD) + 1e-12


@pytest.mark.parametrize("options", [{}, {"compression": Compression.int8}, {"fragments": 2}], ids=str)
def test_elastic_averaging_conserves_what_is_not_sent(options: dict[str, Any]) -> None:
    """Without gradients, Σ x_i + c stays as it is, and the part of d_i that was cut is still in x_i."""

    def work(communicator: Communicator) -> tuple[Array, list[float], list[float]]:
        model = Model(communicator, "easgd", max_message_norm=0.125, **options)
        model.optimizer.synchronizer.begin()
        model.x += communicator.rank
        before = model.x.copy()
        for _ in range(2 * PERIOD):
            model.optimizer.skip()
        return before, list(model.x), model.center()

    found = run_ranks(RANKS, work)
    before = sum(x for x, _, _ in found) + START
    after = np.sum([x for _, x, _ in found], axis=0) + found[0][2]
    np.testing.assert_allclose(after, before, rtol=1e-6)
    assert not np.allclose(found[0][2], START, atol=1e-3)
    rounds = 2 * (2 if options.get("fragments") else 1)
    for x, y, _ in found:
        assert float(np.linalg.norm(y - x)) <= 0.25 * 0.125 * rounds + 1e-6


@pytest.mark.parametrize(("bound", "centers"), [
    ({}, [(1.596, 1.906333), (3.8724, 4.625367)]),
    ({"max_message_norm": 1}, [(0.532, 0.487667), (1.2908, 1.183233)]),
    ({"max_mean_norm": 0.5}, [(0.426888, 0.509894), (1.035765, 1.237164)]),
])  # fmt: skip
def test_numbers_worked_out_by_hand(bound: dict[str, Any], centers: Any, tmp_path: Path) -> None:
    """Moves of (3, 4), (.6, .8) and (0, −.5) in every round; the run log has the norms, cut or not."""

    def work(communicator: Communicator) -> list[Any]:
        x, move = np.zeros(2), np.array([(3.0, 4.0), (0.6, 0.8), (0.0, -0.5)][communicator.rank])
        options: dict[str, Any] = {"process_set": communicator, "run_log": tmp_path, **bound}
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, DiLoCo(0.7, 0.9), 1, **options)
        found = []
        for _ in range(2):
            optimizer.step([-move])
            found.append(x.copy())
        return found

    for found in run_ranks(3, work):
        np.testing.assert_allclose(found, centers, atol=1e-6)
    for rank, lines in read_run_log(tmp_path).items():
        for line in (line for line in lines if line["event"] == "exchanged"):
            assert line.get("message_norm") == (
                pytest.approx((5, 1, 0.5)[rank]) if "max_message_norm" in bound else None
            )
            mean = pytest.approx(math.hypot(3.6, 4.3) / 3) if "max_mean_norm" in bound else None
            assert line.get("mean_norm") == mean


def test_training_resumes_to_the_bit_while_an_exchange_is_in_flight() -> None:
    options: dict[str, Any] = {"max_message_norm": 0.5, "max_mean_norm": 0.25, "overlap": 1}

    def work(communicator: Communicator) -> Any:
        model = Model(communicator, "diloco", **options)
        for _ in range(PERIOD):
            model.step()
        state, x = model.optimizer.synchronizer.state_dict(), model.x.copy()
        wanted = [model.step() for _ in range(5)]
        again = Model(communicator, "diloco", **options)
        again.optimizer.synchronizer.load_state_dict(state)
        again.x[:] = x
        return wanted, [again.step() for _ in range(5)]

    for wanted, found in run_ranks(2, work):
        assert found == wanted


def test_the_median_is_of_the_ranks_that_count() -> None:
    """Moves of 4 and 2, and of a third rank that is not finite: the median is 3, and the mean of 3 and 2 is 2.5."""

    def work(communicator: Communicator) -> float:
        x, move = np.zeros(1), [4.0, 2.0, math.nan][communicator.rank]
        options: dict[str, Any] = {"process_set": communicator, "nonfinite": "skip", "max_message_norm": "median"}
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 1, **options)
        optimizer.step([np.array([-move])])
        return float(x[0])

    assert run_ranks(3, work) == [2.5] * 3


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "zero": ({"max_message_norm": 0}, ValueError, r"`max_message_norm` must be positive.*Received: 0"),
    "negative": ({"max_mean_norm": -1.0}, ValueError, r"`max_mean_norm` must be positive.*Received: -1\.0"),
    "NaN": ({"max_message_norm": math.nan}, ValueError, r"`max_message_norm`.*Received: nan"),
    "a word": ({"max_message_norm": "mean"}, ValueError, "must be a positive number or 'median'. Received: 'mean'"),
    "median of the mean": ({"max_mean_norm": "median"}, TypeError, r"`max_mean_norm`.*Received: 'median'"),
    "no number": ({"max_message_norm": [1]}, TypeError, r"`max_message_norm`.*Received: \[1\]"),
    "no outer step": ({"max_mean_norm": 1.0}, ValueError, "`max_mean_norm` is for algorithms whose center takes"),
    "present": (
        {"max_message_norm": 1.0, "parameters": {"x": "present"}},
        ValueError,
        r"`parameters` makes some of it 'present' on some ranks only.*message=1\.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments(case: str) -> None:
    options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, **options)


def test_ranks_that_disagree() -> None:
    for kind, message in errors(2, lambda c: Model(c, "average", max_mean_norm=1.0 + c.rank)):
        assert kind is ValueError
        assert "max_mean_norm" in message
