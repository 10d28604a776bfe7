"""Every schedule of the package: pure, a value, obeyed, and resumed."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Clock, Communicator, Schedule
from hvd_periodic.numpy import SGD, ModelAverageOptimizer
from hvd_periodic.schedules import as_schedule, next_exchange
from hvd_periodic.sync.planner import forecast, query
from tests.conformance.discovery import schedules
from tests.helpers import run_ranks

STEPS = [0, 1, 2, 3, 5, 8, 99, 100, 101, 10**6, 2**40]

CLOCKS = [
    Clock(step, rounds, rate, seconds, loss, period, memory, speed)
    for step, rounds in zip(STEPS, (0, 1, 2, 3, 4, 5, 9, 10, 20, 1000, 2**30), strict=True)
    for rate, seconds, loss, period, speed in [
        (0.1, 0.25, 2.0, 10, None),
        (1e-5, 1e-9, 1e-3, 1, 1.0),
        (3.0, 100.0, 50.0, 64, 1e-9),
    ]
    for memory in ({}, {"loss": 2.0, "period": 6.0, "learning_rate": 0.2})
]


@pytest.fixture(params=schedules(), ids=lambda cls: cls.__name__)
def schedule(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def synchronous(schedule: Any) -> Any:
    if schedule.asynchronous_only:
        pytest.skip("for asynchronous training, in which ranks have clocks of their own")
    return schedule


def test_schedules_are_found() -> None:
    found = {cls.__name__ for cls in schedules()}
    assert found >= {"Every", "PostLocal", "Piecewise", "Doubling", "QSR", "AdaComm", "Seconds", "DyLU"}
    assert all(issubclass(cls, Schedule) for cls in schedules())


def test_it_returns_a_positive_int(schedule: Any) -> None:
    for clock in CLOCKS:
        assert type(schedule(clock)) is int
        assert schedule(clock) >= 1
        assert next_exchange(schedule, clock) == clock.step + schedule(clock)


def test_it_is_a_pure_function_of_the_clock(schedule: Any) -> None:
    """Asked in any order, any number of times, by any of equal schedules: the same answer, or ranks drift apart."""
    expected = [query(schedule, clock) for clock in CLOCKS]
    before, pairs = copy.deepcopy(CLOCKS), list(zip(CLOCKS, expected, strict=True))
    for clock, plan in [*reversed(pairs), *pairs]:
        assert query(schedule, clock) == plan
        assert query(type(schedule)(), clock) == plan
    assert before == CLOCKS, "a schedule has changed what it is asked with"


def test_it_is_a_value(schedule: Any) -> None:
    """It is saved with checkpoints and stated when ranks compare what they are about to do."""
    for other in (type(schedule)(), pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert repr(other) == repr(schedule)
        assert [other(clock) for clock in CLOCKS] == [schedule(clock) for clock in CLOCKS]
    assert " at 0x" not in repr(schedule)
    with pytest.raises(AttributeError):
        setattr(schedule, next(iter(vars(schedule))), 1)


def test_its_arguments_travel_as_json(schedule: Any) -> None:
    assert type(schedule)(**json.loads(json.dumps(vars(schedule)))) == schedule


def test_it_remembers_finite_numbers_that_it_announces(schedule: Any) -> None:
    for clock in CLOCKS:
        memory = schedule.remember(clock)
        assert memory.keys() <= set(schedule.remembers)
        assert all(np.isfinite(value) for value in memory.values())


def test_what_it_says_of_a_synchronous_beginning_fits_together(schedule: Any) -> None:
    around = schedule.around_averaging()
    assert schedule.synchronous_until is None, "by default nothing else averages gradients"
    if around is not None:
        assert around.around_averaging() == around
        assert around(Clock()) > around.synchronous_until > 0


def test_it_is_accepted_as_a_period(schedule: Any) -> None:
    assert as_schedule(schedule, "period") is schedule
    assert as_schedule(schedule.argument, "period") == schedule


def test_exchanges_take_place_at_the_predicted_steps(synchronous: Any) -> None:
    """As far as steps and rounds say it; from there on, where all ranks say it together."""
    steps = 120
    predicted = [step for step in forecast(synchronous, steps) if step <= steps]

    def work(communicator: Communicator) -> list[int]:
        x = np.zeros(1)
        optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, type(synchronous)(), process_set=communicator)
        exchanged = []
        for step in range(1, steps + 1):
            rounds = optimizer.synchronizer.rounds
            optimizer.synchronizer.report(1.0 + communicator.rank + 1 / step)
            optimizer.step([np.array([float(communicator.rank)])])
            if optimizer.synchronizer.rounds > rounds:
                exchanged.append(step)
                assert x == -step / 2, "the mean of ranks 0 and 1"
        return exchanged

    first, second = run_ranks(2, work)
    assert first == second
    assert first[: len(predicted)] == predicted


def test_it_goes_on_exactly_where_it_was_saved(synchronous: Any) -> None:
    """Every question after a resume is the one of a run without, but for what is measured anew."""
    until, saved_at = 40, 25

    def work(communicator: Communicator, resume: bool) -> list[tuple[int, int, Any]]:
        def build() -> ModelAverageOptimizer:
            local = SGD(0.01 * (1 + communicator.rank))
            return ModelAverageOptimizer(local, {"x": np.zeros(1)}, type(synchronous)(), process_set=communicator)

        optimizer, seen = build(), []
        for step in range(until):
            if resume and step == saved_at:
                state = json.loads(
                    json.dumps({k: optimizer.synchronizer.state_dict()[k] for k in ("counters", "notes")})
                )
                saved = pickle.loads(pickle.dumps(optimizer.synchronizer.state_dict())) | state
                optimizer = build()
                optimizer.synchronizer.load_state_dict(saved)
            optimizer.synchronizer.report((2.0 + communicator.rank) / (1 + step))
            optimizer.step([np.ones(1)])
            counters = optimizer.synchronizer.counters
            seen.append((counters.last_exchange, counters.next_exchange, optimizer.synchronizer.progress.notes))
        return seen

    plain = run_ranks(2, lambda communicator: work(communicator, resume=False))
    resumed = run_ranks(2, lambda communicator: work(communicator, resume=True))
    if type(synchronous).__name__ == "Seconds":  # It measures anew, after the exchange that was planned.
        for seen in resumed:
            (last, planned, _), (now, _, _) = seen[saved_at - 1 : saved_at + 1]
            assert now == (planned if planned == saved_at + 1 else last)
        return
    assert resumed == plain
    assert [seen[:2] for seen in plain[0]] == [seen[:2] for seen in plain[1]]
    assert replace(plain[0][-1][2], loss_sum=0.0) == replace(plain[1][-1][2], loss_sum=0.0), "memory is agreed on"
