"""Every schedule of the package: pure, a value, and obeyed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from hvd_periodic import SGD, Communicator, ModelAverageOptimizer
from hvd_periodic.schedules import as_schedule, next_exchange
from tests.conformance.discovery import schedules
from tests.helpers import run_ranks

STEPS = [0, 1, 2, 3, 5, 8, 99, 100, 101, 10**6, 2**40]


@pytest.fixture(params=schedules(), ids=lambda cls: cls.__name__)
def schedule(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_schedules_are_found() -> None:
    assert {cls.__name__ for cls in schedules()} >= {"Every", "PostLocal"}


def test_it_returns_a_positive_int(schedule: Any) -> None:
    for step in STEPS:
        assert type(schedule(step)) is int
        assert schedule(step) >= 1
        assert next_exchange(schedule, step) == step + schedule(step)


def test_it_is_a_pure_function_of_the_step(schedule: Any) -> None:
    """Asked in any order, any number of times, by any of equal schedules: the same answer, or ranks drift apart."""
    expected = {step: schedule(step) for step in STEPS}
    for step in [*reversed(STEPS), *STEPS]:
        assert schedule(step) == expected[step]
        assert type(schedule)()(step) == expected[step]


def test_it_is_a_value(schedule: Any) -> None:
    """It is saved with checkpoints and stated when ranks compare what they are about to do."""
    for other in (type(schedule)(), pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert other == schedule
        assert repr(other) == repr(schedule)
        assert [other(step) for step in STEPS] == [schedule(step) for step in STEPS]
    assert " at 0x" not in repr(schedule)


def test_it_is_accepted_as_a_period(schedule: Any) -> None:
    assert as_schedule(schedule, "period") is schedule


def test_exchanges_take_place_at_the_predicted_steps(schedule: Any) -> None:
    steps = 120
    predicted, step = [], 0
    while (step := step + schedule(step)) <= steps:
        predicted.append(step)

    def work(communicator: Communicator) -> list[int]:
        x = np.zeros(1)
        optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, type(schedule)(), communicator=communicator)
        exchanged = []
        for step in range(1, steps + 1):
            rounds = optimizer.synchronizer.rounds
            optimizer.step([np.array([float(communicator.rank)])])
            if optimizer.synchronizer.rounds > rounds:
                exchanged.append(step)
                assert x == -step / 2, "the mean of ranks 0 and 1"
        return exchanged

    assert run_ranks(2, work) == [predicted] * 2
