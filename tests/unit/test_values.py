"""What counts in an exchange, on threads, beside an oracle: replicas that are not finite, and weights of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Averaging, Communicator, Compression, DiLoCo
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests import oracle
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks

PERIOD = 3
ALPHA, OUTER_RATE, OUTER_MOMENTUM, BLOCK = 0.2, 0.7, 0.9, 0.5
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(ALPHA),
    "easgd-rho": lambda: EASGD(ALPHA, rho=0.1),
    "average": Averaging,
    "diloco": lambda: DiLoCo(OUTER_RATE, OUTER_MOMENTUM),
    "bmuf": lambda: BMUF(BLOCK, nesterov=True),
    "agn-sum": AGN,
    "agn-average": lambda: AGN(op="average"),
}
MEANS = ["average", "diloco", "bmuf", "agn-average"]
SPOILED = {(1, 4), (2, 5), (0, 11)}
"""Rank and local step at which a gradient is NaN."""

Vector = list[float]


def spoiled(rank: int, step: int, g: Vector) -> Vector:
    return [math.nan] * len(g) if (rank, step) in SPOILED else g


class Slow:
    """Workers in a loop, in plain floats; a worker whose x is not finite is left out and starts from the center."""

    def __init__(self, name: str, n: int, weights: Callable[[int, int], float] = lambda rank, step: 1.0) -> None:
        self.name, self.n, self.weights = name, n, weights
        self.c, self.m = list(oracle.START), [0.0] * len(oracle.START)
        self.x = [list(oracle.START) for _ in range(n)]
        self.v, self.a = ([[0.0] * len(oracle.START) for _ in range(n)] for _ in range(2))
        self.read = [list(oracle.START) for _ in range(n)]
        self.left_out = [0] * n

    def run(self) -> None:
        for step in range(1, oracle.STEPS + 1):
            for i in range(self.n):
                g = spoiled(i, step, oracle.gradient(i, self.x[i]))
                self.a[i] = [a + b for a, b in zip(self.a[i], g, strict=True)]
                if self.name == "easgd-rho":
                    g = [b + 0.1 * (x - c) for b, x, c in zip(g, self.x[i], self.read[i], strict=True)]
                for k, g_k in enumerate(g):
                    self.v[i][k] = oracle.MOMENTUM * self.v[i][k] + g_k
                    self.x[i][k] -= oracle.RATE * self.v[i][k]
            if step % PERIOD == 0:
                self.exchange(step)

    def exchange(self, step: int) -> None:
        weights = [self.weights(i, step) for i in range(self.n)]
        for i in range(self.n):
            if not all(map(math.isfinite, self.x[i])):
                self.x[i], self.read[i] = list(self.c), list(self.c)
                self.v[i], self.a[i] = [0.0] * len(self.c), [0.0] * len(self.c)
                self.left_out[i] += 1
                weights[i] = 0.0
        if not any(weights):
            return
        self.move(weights)
        self.a = [[0.0] * len(self.c) for _ in range(self.n)]

    def move(self, weights: list[float]) -> None:
        for k, c in enumerate(self.c):
            d = [self.x[i][k] - c for i in range(self.n)]
            if self.name.startswith("easgd"):
                for i in range(self.n):
                    self.x[i][k] -= ALPHA * d[i]
                    self.read[i][k] = c
                self.c[k] = c + ALPHA * sum(d)
                continue
            if self.name == "bmuf":  # What is handed out is ahead of the center by the momentum.
                handed = c + BLOCK * self.m[k]
                mean = sum(w * (self.x[i][k] - handed) for i, w in enumerate(weights)) / sum(weights)
                self.m[k] = BLOCK * self.m[k] + mean
                self.c[k] = c + self.m[k]
                handed = self.c[k] + BLOCK * self.m[k]
            elif self.name.startswith("agn"):
                a = [w * self.a[i][k] / PERIOD for i, w in enumerate(weights)]
                self.m[k] = oracle.MOMENTUM * self.m[k] + sum(a) / (sum(weights) if self.name == "agn-average" else 1)
                handed = self.c[k] = c - oracle.RATE * self.m[k]
            else:
                g = -sum(w * d[i] for i, w in enumerate(weights)) / sum(weights)
                if self.name == "diloco":
                    self.m[k] = OUTER_MOMENTUM * self.m[k] + g
                    g = OUTER_RATE * (g + OUTER_MOMENTUM * self.m[k])
                handed = self.c[k] = c - g
            for i in range(self.n):
                self.x[i][k] = handed


def train(communicator: Communicator, name: str, **options: Any) -> tuple[Array, Array, Any]:
    """Return replica and center at the end, and the counters."""
    x = np.array(oracle.START)
    optimizer = PeriodicOptimizer(
        SGD(oracle.RATE, oracle.MOMENTUM), {"x": x}, ALGORITHMS[name](), PERIOD, process_set=communicator, **options
    )
    for step in range(1, oracle.STEPS + 1):
        g = spoiled(communicator.rank, step, oracle.gradient(communicator.rank, x.tolist()))
        optimizer.step([np.array(g)])
    optimizer.synchronizer.audit()
    with optimizer.center():
        center = x.copy()
    return x, center, optimizer.synchronizer.counters


@pytest.mark.parametrize(
    ("name", "size", "center"), covering(ALGORITHMS, (1, 2, 3), ("replicated", "root", "sharded"), together=1)
)
def test_a_rank_is_left_out_as_a_slow_oracle_says(name: str, size: int, center: str) -> None:
    slow = Slow(name, size)
    slow.run()
    found = run_ranks(size, lambda communicator: train(communicator, name, center=center, nonfinite="skip"))
    for rank, (x, c, counters) in enumerate(found):
        np.testing.assert_allclose(x, slow.x[rank], rtol=1e-12)
        np.testing.assert_allclose(c, slow.c, rtol=1e-12)
        assert counters.left_out == slow.left_out[rank]
        assert counters.rounds == oracle.STEPS // PERIOD - (size == 1)  # Alone, nobody was left once.


@pytest.mark.parametrize("overlap", [2, "period"])
def test_elastic_averaging_with_overlap_goes_where_it_goes_without(overlap: int | str) -> None:
    slow = Slow("easgd", 3)
    slow.run()
    found = run_ranks(3, lambda communicator: train(communicator, "easgd", overlap=overlap, nonfinite="skip"))
    for rank, (x, c, _) in enumerate(found):
        np.testing.assert_allclose(x, slow.x[rank], rtol=1e-12)
        np.testing.assert_allclose(c, slow.c, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        ("easgd", "average", "diloco", "agn-average"),
        (
            {"overlap": "period", "fragments": 2},
            {"compression": Compression.int8},
            {"compression": Compression.topk(0.5), "fragments": 2},
            {"compression": Compression.bf16, "overlap": 1},
            {"optimizer_state": "average"},
        ),
        together=1,
        always=[("diloco", {"optimizer_state": "average"}), ("easgd", {"compression": Compression.int8})],
    ),
    ids=str,
)
def test_replica_and_center_stay_finite_with_all_that_combines(name: str, options: dict[str, Any]) -> None:
    def run(communicator: Communicator) -> tuple[Array, Array, Any]:
        x, y = np.ones(3), np.zeros(5)
        optimizer = PeriodicOptimizer(
            SGD(0.1, 0.9),
            {"x": x, "y": y},
            ALGORITHMS[name](),
            4,
            process_set=communicator,
            nonfinite="skip",
            **options,
        )
        for step in range(1, 21):
            wrong = (communicator.rank, step) in {(1, 6), (0, 11), (1, 11)}
            optimizer.step([x - communicator.rank, np.full(5, math.nan) if wrong else y + 1])
        optimizer.synchronizer.finalize()
        with optimizer.center():
            return x.copy(), y.copy(), optimizer.synchronizer.counters.left_out

    found = run_ranks(2, run)
    for x, y, _ in found:
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()
        assert (x == found[0][0]).all()
        assert (y == found[0][1]).all()
    assert [left_out for _, _, left_out in found] == [1, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["easgd", "agn-sum"])
def test_by_default_ranks_and_tensor_are_named_and_the_center_stays_clean(name: str, asynchronous: bool) -> None:
    size = 1 if asynchronous else 2
    centers = []

    def run(communicator: Communicator) -> None:
        x, y = np.ones(3), np.zeros(2)
        optimizer = PeriodicOptimizer(
            SGD(0.1),
            {"x": x, "y": y},
            ALGORITHMS[name](),
            2,
            process_set=communicator,
            asynchronous=asynchronous,
        )
        for step in range(1, 5):
            wrong = communicator.rank == size - 1 and step == 3
            try:
                optimizer.step([x, np.full(2, math.nan) if wrong else y])
            finally:
                with optimizer.center():
                    centers.append((x.copy(), y.copy()))

    for rank, (kind, text) in enumerate(errors(size, run)):
        assert kind is RuntimeError
        assert "parameter 'y' is not finite at step 4, and would spoil the center" in text
        assert "nonfinite='skip'" in text
        assert rank == size - 1 or f"Rank {size - 1} failed" in text
    assert len(centers) == 4 * size
    assert all(np.isfinite(x).all() and np.isfinite(y).all() for x, y in centers)


def test_ignored_it_reaches_the_center() -> None:
    for _, center, counters in run_ranks(2, lambda communicator: train(communicator, "average", nonfinite="ignore")):
        assert np.isnan(center).all()
        assert counters.left_out == 0


def test_large_but_finite_values_are_none() -> None:
    """The sum of their squares overflows."""

    def run(communicator: Communicator) -> Array:
        x = np.full(3, 1e30, np.float32)
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 1, process_set=communicator)
        optimizer.step([np.zeros(3, np.float32)])
        return x

    for x in run_ranks(2, run):
        assert (x == np.float32(1e30)).all()


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`nonfinite` must be 'raise', 'skip' or 'ignore'. Received: 'warn'"):
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 1, nonfinite="warn")


def test_ranks_with_different_policies_are_refused() -> None:
    def run(communicator: Communicator) -> None:
        policy = ["raise", "skip"][communicator.rank]
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 1, process_set=communicator, nonfinite=policy)

    for kind, text in errors(2, run):
        assert kind is ValueError
        assert "They differ in nonfinite: raise on rank 0; skip on rank 1" in text


def counted(rank: int, step: int) -> float:
    """A weight for every rank and exchange; at some, one rank does not count, and at one nobody."""
    return 0.0 if step == 9 else [2.0, 0.0 if step == 6 else 1.0, 5.0][rank]


@pytest.mark.parametrize(
    ("name", "center", "policy"), covering(MEANS, ("replicated", "root", "sharded"), ("skip", "ignore"))
)
def test_weights_as_a_slow_oracle_says(name: str, policy: str, center: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if policy == "ignore":
        monkeypatch.setattr("tests.unit.test_values.SPOILED", set())
    slow = Slow(name, 3, counted)
    slow.run()

    def run(communicator: Communicator) -> tuple[Array, Array, Any]:
        steps = iter(range(PERIOD, oracle.STEPS + 1, PERIOD))
        return train(
            communicator,
            name,
            center=center,
            nonfinite=policy,
            weight=lambda: counted(communicator.rank, next(steps)),
        )

    for rank, (x, c, counters) in enumerate(run_ranks(3, run)):
        np.testing.assert_allclose(x, slow.x[rank], rtol=1e-12)
        np.testing.assert_allclose(c, slow.c, rtol=1e-12)
        assert counters.rounds == oracle.STEPS // PERIOD - 1


@pytest.mark.parametrize("overlap", [0, 1, "period"])
def test_a_weighted_mean_by_hand(overlap: int | str) -> None:
    """Of 1 and 5, at weights 3 and 1."""

    def run(communicator: Communicator) -> float:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(
            SGD(1.0),
            {"x": x},
            Averaging(),
            2,
            process_set=communicator,
            weight=[3, 1][communicator.rank],
            overlap=overlap,
        )
        for gradient in ([-1.0, -5.0][communicator.rank], 0.0, 0.0, 0.0):
            optimizer.step([np.array([gradient])])
        return float(x[0])

    assert run_ranks(2, run) == [2.0, 2.0]


def test_equal_weights_are_no_weights_to_the_bit() -> None:
    def run(communicator: Communicator, **options: Any) -> Array:
        return train(communicator, "diloco", nonfinite="ignore", **options)[0]

    without = run_ranks(3, run)
    for weight in (1, 0.3, lambda: 7e9):
        for x, same in zip(run_ranks(3, lambda c, weight=weight: run(c, weight=weight)), without, strict=True):
            assert (x == same).all() or (np.isnan(x).all() and np.isnan(same).all())


def test_a_rank_that_has_run_out_of_data_does_not_count() -> None:
    """It has taken two steps of eight; the last of them counts."""

    def run(communicator: Communicator) -> tuple[float, list[float]]:
        x, asked = np.zeros(1), []

        def examples() -> float:
            asked.append(1.0)
            return 1.0

        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 2, process_set=communicator, weight=examples)
        for _ in range([8, 3][communicator.rank]):
            optimizer.step([np.array([-1.0])])
        optimizer.synchronizer.finalize()
        return float(x[0]), asked

    # 2 together; one of 2 and one of 1 more steps; then two more of one rank, twice.
    assert run_ranks(2, run) == [(2 + 1.5 + 2 + 2, [1.0] * 4), (7.5, [1.0] * 2)]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1, "`weight` must be zero or positive and finite. Received: -1"),
        (math.nan, "`weight` must be zero or positive and finite. Received: nan"),
        ("heavy", "`weight` must be a number.*Received: 'heavy'"),
    ],
)
def test_no_weight(weight: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 1, weight=weight)

    def run(communicator: Communicator) -> None:
        x = np.zeros(1)
        given = weight if communicator.rank else 1.0
        optimizer = PeriodicOptimizer(
            SGD(1.0), {"x": x}, Averaging(), 1, process_set=communicator, weight=lambda: given
        )
        optimizer.step([x])

    for _, text in errors(2, run):
        assert "The weight of this rank cannot be used" in text
        assert re.search(message, text)


def test_weights_that_make_no_sense_are_refused() -> None:
    for algorithm in (EASGD(0.1), AGN()):
        with pytest.raises(ValueError, match="`weight` is for algorithms that take the mean over ranks"):
            PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, algorithm, 1, weight=2)
    with pytest.raises(ValueError, match="`weight` is for synchronous exchange"):
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, AGN(op="average"), 1, weight=2, asynchronous=True)

    def run(communicator: Communicator) -> None:
        weight = 2.0 if communicator.rank else None
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 1, process_set=communicator, weight=weight)

    for kind, text in errors(2, run):
        assert kind is ValueError
        assert "They differ in weight: not given on rank 0; given on rank 1" in text
