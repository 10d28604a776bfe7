"""Schedules: when exchanges take place."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from hvd_periodic import SGD, Every, ModelAverageOptimizer, PostLocal, Schedule
from hvd_periodic.schedules import as_schedule, next_exchange


def predicted(schedule: Schedule, until: int) -> list[int]:
    """Return the exchange steps up to ``until``, from the definition alone."""
    steps, step = [], 0
    while (step := step + schedule(step)) <= until:
        steps.append(step)
    return steps


def observed(period: int | Schedule, until: int) -> list[int]:
    """Return the steps at which an optimizer exchanged."""
    x = np.zeros(1)
    optimizer = ModelAverageOptimizer(SGD(1.0), [("x", x)], period)
    steps = []
    for step in range(1, until + 1):
        rounds = optimizer.synchronizer.rounds
        optimizer.step([np.ones(1)])
        if optimizer.synchronizer.rounds > rounds:
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Every(1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (Every(4), [4, 8, 12]),
        (Every(13), []),
        (PostLocal(start=0, period=5), [5, 10]),
        (PostLocal(start=1, period=5), [1, 6, 11]),
        (PostLocal(start=3, period=4), [1, 2, 3, 7, 11]),
        (PostLocal(start=100, period=4), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (lambda step: step + 1, [1, 3, 7]),
        (4, [4, 8, 12]),
        (np.int64(4), [4, 8, 12]),
    ],
    ids=str,
)
def test_exchanges_take_place_when_the_schedule_says(schedule: Any, expected: list[int]) -> None:
    assert observed(schedule, 12) == expected
    if callable(schedule):
        assert predicted(schedule, 12) == expected


def test_a_call_of_sync_starts_the_period_anew() -> None:
    x = np.zeros(1)
    optimizer = ModelAverageOptimizer(SGD(1.0), [("x", x)], 4)
    rounds = []
    for step in range(1, 9):
        optimizer.step([np.ones(1)])
        if step == 3:
            optimizer.synchronizer.sync()
        rounds.append(optimizer.synchronizer.rounds)
    assert rounds == [0, 0, 1, 1, 1, 1, 2, 2]


def test_an_iteration_without_update_counts() -> None:
    x = np.zeros(1)
    synchronizer = ModelAverageOptimizer(SGD(1.0), [("x", x)], 3).synchronizer
    assert [synchronizer.step(updated=updated) for updated in (True, False, False, True)] == [False, False, True, False]
    assert (synchronizer.counters.local_steps, synchronizer.counters.skipped_updates) == (4, 2)


def test_as_schedule() -> None:
    schedule = PostLocal(2, 3)
    assert as_schedule(schedule, "period") is schedule
    assert as_schedule(7, "period") == Every(7)
    assert type(Every(as_schedule(np.int32(7), "period")(0)).period) is int


@pytest.mark.parametrize("returned", [0, -1, 1.0, True, None, "3"])
def test_a_schedule_must_return_a_positive_int(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"returned at step 5 must be an int >= 1\. Received: "):
        next_exchange(lambda step: returned, 5)


@pytest.mark.parametrize("schedule", [Every(3), PostLocal(2, 5)], ids=str)
def test_schedules_are_values(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(pickle.loads(pickle.dumps(schedule))) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.period = 1  # type: ignore[attr-defined]


def test_different_schedules_are_different() -> None:
    assert len({Every(3), Every(4), PostLocal(2, 3), PostLocal(3, 3), PostLocal(3, 2)}) == 5
