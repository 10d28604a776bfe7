"""Agreement of the numpy front end with the slow oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_periodic import Communicator, Every, PostLocal
from hvd_periodic.algorithms.easgd import ContribEASGD
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import Array, read_center, run_ranks
from tests.oracle import (
    MOMENTUM,
    RATE,
    START,
    STEPS,
    Result,
    Vector,
    agn,
    averaging,
    default_rate,
    easgd,
    gradient,
    periodic,
)
from tests.parallel.tiers import thorough

SIZES = [1, 2, 3, 5]
FEWER = [n if n in (1, 3) else thorough(n) for n in SIZES]
"""Of tests that repeat one with more of them."""
TOLERANCE = 1e-12


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


@pytest.mark.parametrize(("n", "momentum", "rho"), covering(SIZES, (0.0, MOMENTUM), (0.0, 0.3)))
def test_elastic_averaging_at_a_given_rate(n: int, momentum: float, rho: float) -> None:
    rate = 0.8 / (n + 1)
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE, momentum), parameters, 3, moving_rate=rate, rho=rho, process_set=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(3), lambda _: rate, momentum, rho))


@pytest.mark.parametrize("n", FEWER)
def test_elastic_averaging_by_beta(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, 4, beta=0.45, process_set=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(4), lambda _: 0.45 / n))


@pytest.mark.parametrize(("n", "period"), covering(SIZES, (1, 2, 5), together=1))
def test_elastic_averaging_at_the_default_rate(n: int, period: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, period, process_set=communicator
        ),
    )
    assert_equal(found, easgd(n, periodic(period), lambda _: default_rate(n)))


@pytest.mark.parametrize(("n", "momentum"), covering(SIZES, (0.0, MOMENTUM), together=1))
def test_averaging(n: int, momentum: float) -> None:
    found = library(
        n,
        lambda parameters, communicator: ModelAverageOptimizer(
            SGD(RATE, momentum), parameters, 3, process_set=communicator
        ),
    )
    assert_equal(found, averaging(n, periodic(3), momentum))


@pytest.mark.parametrize(("n", "op", "momentum"), covering(SIZES, ("sum", "average"), (0.0, MOMENTUM)))
def test_accumulated_gradient_normalization(n: int, op: str, momentum: float) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE, momentum), parameters, 4, op=op, process_set=communicator
        ),
    )
    assert_equal(found, agn(n, periodic(4), op, momentum))


@pytest.mark.parametrize("n", FEWER)
def test_accumulated_gradient_normalization_with_another_center_optimizer(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE, MOMENTUM), parameters, 3, outer_optimizer=SGD(0.05, 0.25), process_set=communicator
        ),
    )
    assert_equal(found, agn(n, periodic(3), "sum", MOMENTUM, center=(0.05, 0.25)))


POST_LOCAL = {1, 2, 3, 7, 11}
"""Exchanges of ``PostLocal(start=3, period=4)`` within 13 steps."""


@pytest.mark.parametrize("n", FEWER)
def test_post_local_averaging(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ModelAverageOptimizer(
            SGD(RATE, MOMENTUM), parameters, PostLocal(start=3, period=4), process_set=communicator
        ),
    )
    assert_equal(found, averaging(n, POST_LOCAL, MOMENTUM))


@pytest.mark.parametrize("n", FEWER)
def test_post_local_agn_divides_by_the_steps_of_each_exchange(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: AGNOptimizer(
            SGD(RATE), parameters, PostLocal(start=3, period=4), process_set=communicator
        ),
    )
    assert_equal(found, agn(n, POST_LOCAL, "sum"))


@pytest.mark.parametrize("n", FEWER)
def test_the_default_rate_does_not_depend_on_the_period(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(RATE), parameters, PostLocal(start=3, period=4), process_set=communicator
        ),
    )
    assert_equal(found, easgd(n, POST_LOCAL, lambda _: default_rate(n)))


@pytest.mark.parametrize("n", FEWER)
def test_the_default_rate_of_contrib_uses_the_period_of_each_exchange(n: int) -> None:
    found = library(
        n,
        lambda parameters, communicator: PeriodicOptimizer(
            SGD(RATE), parameters, ContribEASGD(), PostLocal(start=3, period=4), process_set=communicator
        ),
    )
    assert_equal(found, easgd(n, POST_LOCAL, lambda period: 0.9 / period / n))


def test_an_int_is_the_schedule_every() -> None:
    results = [
        library(
            2,
            lambda parameters, communicator, period=period: ElasticAverageOptimizer(  # type: ignore[misc]
                SGD(RATE), parameters, period, process_set=communicator
            ),
        )
        for period in (3, Every(3))
    ]
    assert results[0] == results[1]
