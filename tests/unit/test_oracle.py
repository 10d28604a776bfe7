"""Agreement with a slow oracle written from the papers in plain Python floats, workers in a loop.

Every worker descends on a quadratic loss of its own, so that gradients differ between ranks and depend on where the
exchanges have put x. The oracle uses nothing of the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvd_periodic import (
    SGD,
    AGNOptimizer,
    Communicator,
    ElasticAverageOptimizer,
    Every,
    ModelAverageOptimizer,
    PeriodicOptimizer,
    PostLocal,
)
from tests.helpers import Array, read_center, run_ranks

SIZES = [1, 2, 3, 5]
STEPS = 13
RATE, MOMENTUM = 0.15, 0.6
START = [0.5, -1.5, 2.0]
TOLERANCE = 1e-12

Vector = list[float]
Result = tuple[list[Vector], Vector]
"""All replicas, and the center."""


def gradient(worker: int, x: Sequence[float]) -> Vector:
    """Gradient of Σ_k ½ h_k (x_k − m_k)², with curvatures and minima of the worker's own."""
    return [
        (0.4 + 0.2 * worker + 0.1 * k) * (x_k - (1.5 * math.sin(1 + 2 * worker + k) + worker))
        for k, x_k in enumerate(x)
    ]


def periodic(period: int) -> set[int]:
    """Steps of the exchanges for a constant period."""
    return {step for step in range(1, STEPS + 1) if step % period == 0}


class Workers:
    """Local SGD with heavy-ball momentum on n workers."""

    def __init__(self, n: int, momentum: float) -> None:
        self.n, self.momentum = n, momentum
        self.x = [list(START) for _ in range(n)]
        self.v = [[0.0] * len(START) for _ in range(n)]

    def descend(self, worker: int, g: Vector) -> None:
        for k, g_k in enumerate(g):
            self.v[worker][k] = self.momentum * self.v[worker][k] + g_k
            self.x[worker][k] -= RATE * self.v[worker][k]


def easgd(n: int, exchanges: set[int], rate: Callable[[int], float], momentum: float = 0.0, rho: float = 0.0) -> Result:
    """Zhang, Choromanska, LeCun (2015), synchronous; ``rate(τ)`` is α for an exchange that covers τ steps."""
    workers, c, last = Workers(n, momentum), list(START), 0
    read = [list(START) for _ in range(n)]
    for step in range(1, STEPS + 1):
        for i in range(n):
            g = gradient(i, workers.x[i])
            workers.descend(
                i, [g_k + rho * (x_k - r_k) for g_k, x_k, r_k in zip(g, workers.x[i], read[i], strict=True)]
            )
        if step in exchanges:
            alpha, last = rate(step - last), step
            old = list(c)
            for i in range(n):
                for k in range(len(old)):
                    difference = workers.x[i][k] - old[k]
                    workers.x[i][k] -= alpha * difference
                    c[k] += alpha * difference
                read[i] = list(old)
    return workers.x, c


def averaging(n: int, exchanges: set[int], momentum: float = 0.0) -> Result:
    """McDonald, Hall, Mann (2010): the mean of the replicas replaces them all."""
    workers, c = Workers(n, momentum), list(START)
    for step in range(1, STEPS + 1):
        for i in range(n):
            workers.descend(i, gradient(i, workers.x[i]))
        if step in exchanges:
            c = [sum(workers.x[i][k] for i in range(n)) / n for k in range(len(START))]
            workers.x = [list(c) for _ in range(n)]
    return workers.x, c


def agn(
    n: int, exchanges: set[int], op: str, momentum: float = 0.0, center: tuple[float, float] | None = None
) -> Result:
    """Hermans, Spanakis, Möckel (2017), with SGD of rate and momentum ``center`` on the center."""
    center_rate, center_momentum = (RATE, momentum) if center is None else center
    workers, c, last = Workers(n, momentum), list(START), 0
    center_v = [0.0] * len(START)
    a = [[0.0] * len(START) for _ in range(n)]
    for step in range(1, STEPS + 1):
        for i in range(n):
            g = gradient(i, workers.x[i])
            for k, g_k in enumerate(g):
                a[i][k] += g_k
            workers.descend(i, g)
        if step in exchanges:
            period, last = step - last, step
            for k in range(len(START)):
                total = sum(a[i][k] / period for i in range(n)) / (n if op == "average" else 1)
                center_v[k] = center_momentum * center_v[k] + total
                c[k] -= center_rate * center_v[k]
            workers.x = [list(c) for _ in range(n)]
            a = [[0.0] * len(START) for _ in range(n)]
    return workers.x, c


def library(n: int, make: Callable[[dict[str, Array], Communicator], PeriodicOptimizer]) -> Result:
    """Run the same training on the library; the vector is split over two parameters."""

    def work(communicator: Communicator) -> tuple[Vector, Vector]:
        scalar, rest = np.array(START[0]), np.array(START[1:])
        optimizer = make({"scalar": scalar, "rest": rest}, communicator)
        for _ in range(STEPS):
            g = gradient(communicator.rank, [float(scalar), *rest.tolist()])
            optimizer.step({"rest": np.array(g[1:]), "scalar": np.array(g[0])})
        center = read_center(optimizer, [scalar, rest])
        return [float(scalar), *rest.tolist()], [float(center[0]), *center[1].tolist()]

    results = run_ranks(n, work)
    assert all(c == results[0][1] for _, c in results), "the center differs between ranks"
    return [x for x, _ in results], results[0][1]


def assert_equal(found: Result, expected: Result) -> None:
    for x, y in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
        assert x == pytest.approx(y, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_elastic_averaging_at_a_given_rate(n: int, momentum: float, rho: float) -> None:
    rate = 0.8 / (n + 1)
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE, momentum), parameters, 3, moving_rate=rate, rho=rho, communicator=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(3), lambda _: rate, momentum, rho))


@pytest.mark.parametrize("n", SIZES)
def test_elastic_averaging_by_beta(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, 4, beta=0.45, communicator=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(4), lambda _: 0.45 / n))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("period", [1, 2, 5])
def test_elastic_averaging_at_the_default_rate(n: int, period: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, period, communicator=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(period), lambda _: 0.9 / period / n))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_averaging(n: int, momentum: float) -> None:
    found = library(
        n,
        lambda parameters, communicator: ModelAverageOptimizer(
            SGD(RATE, momentum), parameters, 3, communicator=communicator
        ),
    )
    assert_equal(found, averaging(n, periodic(3), momentum))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_accumulated_gradient_normalization(n: int, op: str, momentum: float) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE, momentum), parameters, 4, op=op, communicator=communicator
        ),
    )
    assert_equal(found, agn(n, periodic(4), op, momentum))


@pytest.mark.parametrize("n", SIZES)
def test_accumulated_gradient_normalization_with_another_center_optimizer(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE, MOMENTUM), parameters, 3, center_optimizer=SGD(0.05, 0.25), communicator=communicator
        ),
    )
    assert_equal(found, agn(n, periodic(3), "sum", MOMENTUM, center=(0.05, 0.25)))


POST_LOCAL = {1, 2, 3, 7, 11}
"""Exchanges of ``PostLocal(start=3, period=4)`` within 13 steps."""


@pytest.mark.parametrize("n", SIZES)
def test_post_local_averaging(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ModelAverageOptimizer(
            SGD(RATE, MOMENTUM), parameters, PostLocal(start=3, period=4), communicator=communicator
        ),
    )
    assert_equal(found, averaging(n, POST_LOCAL, MOMENTUM))


@pytest.mark.parametrize("n", SIZES)
def test_post_local_agn_divides_by_the_steps_of_each_exchange(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE), parameters, PostLocal(start=3, period=4), communicator=communicator
        ),
    )
    assert_equal(found, agn(n, POST_LOCAL, "sum"))


@pytest.mark.parametrize("n", SIZES)
def test_post_local_elastic_averaging_uses_the_period_of_each_exchange(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, PostLocal(start=3, period=4), communicator=communicator
        ),
    )
    assert_equal(found, easgd(n, POST_LOCAL, lambda period: 0.9 / period / n))


def test_an_int_is_the_schedule_every() -> None:
    results = [
        library(
            2,
            lambda parameters, communicator, period=period: ElasticAverageOptimizer(  # type: ignore[misc]
                SGD(RATE), parameters, period, communicator=communicator
            ),
        )
        for period in (3, Every(3))
    ]
    assert results[0] == results[1]
