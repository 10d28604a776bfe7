"""The number tables of the three algorithms, spelled out by hand; center and replicas are read as a user reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvd_periodic import EASGD, Communicator, LocalCommunicator
from hvd_periodic.algorithms import Exchange
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from tests.helpers import Array, read_center, run_ranks

Make = Callable[[dict[str, Array], Communicator], PeriodicOptimizer]

ONE = (-1.0,)
"""Gradient of the only worker."""

TWO = (-1.0, -3.0)
"""Gradients of two workers."""


def trajectory(make: Make, gradients: Sequence[float], steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return x and c after each step, one list per rank; all start from x = c = 0."""

    def work(communicator: Communicator) -> tuple[list[float], list[float]]:
        x = np.zeros(1)
        optimizer = make({"x": x}, communicator)
        replicas, centers = [], []
        for _ in range(steps):
            optimizer.step([np.array([gradients[communicator.rank]])])
            replicas.append(float(x[0]))
            centers.append(float(read_center(optimizer, [x])[0][0]))
            assert x[0] == replicas[-1], "center() left the block with other values"
        return replicas, centers

    results = run_ranks(len(gradients), work)
    return [x for x, _ in results], [c for _, c in results]


@pytest.mark.parametrize("inside_threads", [True, False])
def test_elastic_averaging_of_one_worker(inside_threads: bool) -> None:
    def make(parameters: dict[str, Array], communicator: Communicator) -> PeriodicOptimizer:
        return ElasticAverageOptimizer(
            SGD(1.0),
            parameters,
            communication_period=2,
            moving_rate=0.25,
            process_set=communicator if inside_threads else LocalCommunicator(),
        )

    x, c = trajectory(make, ONE, 6)
    assert x == [[1, 1.5, 2.5, 2.75, 3.75, 3.875]]
    assert c == [[0, 0.5, 0.5, 1.25, 1.25, 2.125]]


def test_the_default_communicator_is_this_process_alone() -> None:
    x, c = trajectory(lambda parameters, _: ElasticAverageOptimizer(SGD(1.0), parameters, 2, moving_rate=0.25), ONE, 6)
    assert x == [[1, 1.5, 2.5, 2.75, 3.75, 3.875]]
    assert c == [[0, 0.5, 0.5, 1.25, 1.25, 2.125]]


def test_rho_enters_through_the_local_gradient() -> None:
    """contrib's ``minimize`` path with its default ρ = α/η; lc is the center as read before this worker's push."""
    rate, learning_rate = 0.25, 1.0
    x, c = trajectory(
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(learning_rate),
            parameters,
            communication_period=2,
            moving_rate=rate,
            rho=rate / learning_rate,
            process_set=communicator,
        ),
        ONE,
        4,
    )
    assert x == [[1, 1.3125, 1.984375, 1.975585937500]]
    assert c == [[0, 0.4375, 0.4375, 0.950195312500]]


def test_elastic_averaging_of_two_workers() -> None:
    x, c = trajectory(
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(1.0), parameters, communication_period=2, moving_rate=0.25, process_set=communicator
        ),
        TWO,
        6,
    )
    assert x == [[1, 1.5, 2.5, 3.125, 4.125, 4.96875], [3, 4.5, 7.5, 8.375, 11.375, 11.90625]]
    assert c == [[0, 2, 2, 4.5, 4.5, 7.125]] * 2


@pytest.mark.parametrize("n", [1, 2, 8, 9, 10, 100])
def test_the_default_moving_rate_is_the_largest_of_the_papers_that_does_not_overshoot(n: int) -> None:
    rates = {EASGD().rate(Exchange(n, period)) for period in (1, 2, 100)}
    assert rates == {1 / (n + 1) if n < 9 else 0.9 / n}, "whatever the period"
    assert max(rates) <= 1 / (n + 1)


def test_replicas_and_center_change_places_at_the_largest_rate() -> None:
    """One worker and α = 1, as in contrib's own test."""
    with pytest.warns(UserWarning, match="overshoot"):
        x, c = trajectory(
            lambda parameters, communicator: ElasticAverageOptimizer(
                SGD(1.0), parameters, communication_period=2, moving_rate=1.0, process_set=communicator
            ),
            ONE,
            6,
        )
    assert x == [[1, 0, 1, 2, 3, 2]]
    assert c == [[0, 2, 2, 2, 2, 4]]


def test_the_default_moving_rate_of_two_workers() -> None:
    """α = 1/(n+1) = 1/3 for n = 2: the center is the mean of replicas and center after every exchange."""
    x, c = trajectory(
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(1.0), parameters, communication_period=2, process_set=communicator
        ),
        TWO,
        4,
    )
    assert x[0] == pytest.approx([1, 4 / 3, 7 / 3, 28 / 9], abs=1e-12)
    assert x[1] == pytest.approx([3, 4, 7, 68 / 9], abs=1e-12)
    assert c[0] == c[1] == pytest.approx([0, 8 / 3, 8 / 3, 16 / 3], abs=1e-12)


@pytest.mark.parametrize("arguments", [{"beta": 0.45}, {"moving_rate": 0.225}])
def test_beta_is_divided_by_the_number_of_workers_only(arguments: dict[str, float]) -> None:
    x, c = trajectory(
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(1.0), parameters, communication_period=2, process_set=communicator, **arguments
        ),
        TWO,
        4,
    )
    assert x[0] == pytest.approx([1, 1.55, 2.55, 3.15625], abs=1e-12)
    assert x[1] == pytest.approx([3, 4.65, 7.65, 8.65875], abs=1e-12)
    assert c[0] == c[1] == pytest.approx([0, 1.8, 1.8, 4.185], abs=1e-12)


def test_model_averaging_of_two_workers() -> None:
    x, c = trajectory(
        lambda parameters, communicator: ModelAverageOptimizer(
            SGD(1.0), parameters, interval_steps=2, process_set=communicator
        ),
        TWO,
        4,
    )
    assert x == [[1, 4, 5, 8], [3, 4, 7, 8]]
    assert c == [[0, 4, 4, 8]] * 2


@pytest.mark.parametrize(("op", "first", "second"), [("sum", 0.4, 0.8), ("average", 0.2, 0.4)], ids=["sum", "average"])
def test_accumulated_gradient_normalization_of_two_workers(op: str, first: float, second: float) -> None:
    x, c = trajectory(
        lambda parameters, communicator: AGNOptimizer(
            SGD(0.1), parameters, communication_period=4, op=op, process_set=communicator
        ),
        TWO,
        8,
    )
    assert x[0] == pytest.approx([0.1, 0.2, 0.3, first, *(first + d for d in (0.1, 0.2, 0.3)), second], abs=1e-12)
    assert x[1] == pytest.approx([0.3, 0.6, 0.9, first, *(first + d for d in (0.3, 0.6, 0.9)), second], abs=1e-12)
    assert c[0] == c[1] == pytest.approx([0, 0, 0, first, first, first, first, second], abs=1e-12)


def test_the_sum_is_the_default_of_agn() -> None:
    _, c = trajectory(
        lambda parameters, communicator: AGNOptimizer(
            SGD(0.1), parameters, communication_period=4, process_set=communicator
        ),
        TWO,
        4,
    )
    assert c[0][-1] == pytest.approx(0.4, abs=1e-12)


def test_all_ranks_start_from_the_values_of_the_root() -> None:
    def work(communicator: Communicator) -> tuple[float, float]:
        x = np.array([10.0 + communicator.rank])
        optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 2, root_rank=1, process_set=communicator)
        return float(x[0]), float(read_center(optimizer, [x])[0][0])

    assert run_ranks(3, work) == [(11.0, 11.0)] * 3


def test_momentum_of_the_local_optimizer_stays_local() -> None:
    """η = 1, μ = .5, g = −1: v = −1, −1.5, −1.75, ...; the exchange moves x and leaves v alone (EAMSGD)."""
    x, c = trajectory(
        lambda parameters, communicator: ElasticAverageOptimizer(
            SGD(1.0, momentum=0.5), parameters, 2, moving_rate=0.25, process_set=communicator
        ),
        TWO,
        4,
    )
    # x = 1, 2.5 → 2.5 − .25·2.5 = 1.875; c = .25 (2.5 + 7.5) = 2.5. Then x = 5.5 and 16.5 before the pull.
    assert x == [[1, 1.875, 3.625, 4.75], [3, 5.625, 10.875, 13.0]]
    assert c == [[0, 2.5, 2.5, 6.75]] * 2
