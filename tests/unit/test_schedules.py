"""Schedules: when exchanges take place."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import (
    QSR,
    AdaComm,
    Clock,
    Doubling,
    DyLU,
    Every,
    LocalCommunicator,
    Piecewise,
    PostLocal,
    Schedule,
    Seconds,
)
from hvd_periodic.numpy import SGD, ModelAverageOptimizer
from hvd_periodic.schedules import as_schedule, next_exchange
from hvd_periodic.sync.planner import forecast, predict, query
from tests.helpers import readable


def observed(period: Any, until: int) -> list[int]:
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
        (PostLocal(start=3, period=4, quiet=True), [7, 11]),
        (PostLocal(start=100, period=4), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (Piecewise({0: 5}), [5, 10]),
        (Piecewise({0: 1, 3: 4}), [1, 2, 3, 7, 11]),
        (Piecewise({6: 1, 0: 4, 9: 3}), [4, 8, 9, 12]),
        (Piecewise({"0": 2, "4": 5}), [2, 4, 9]),  # type: ignore[dict-item]
        (Doubling(start=1, every_rounds=1, limit=4), [1, 3, 7, 11]),
        (Doubling(start=1, every_rounds=2, limit=3), [1, 2, 4, 6, 9, 12]),
        (lambda clock: clock.step + 1, [1, 3, 7]),
        (lambda clock: clock.round + 1, [1, 3, 6, 10]),
        (lambda clock: clock.period + 2, [2, 6, 12]),
        (4, [4, 8, 12]),
        (np.int64(4), [4, 8, 12]),
    ],
    ids=readable,
)
def test_exchanges_take_place_when_the_schedule_says(schedule: Any, expected: list[int]) -> None:
    assert observed(schedule, 12) == expected
    assert [step for step in forecast(as_schedule(schedule, "period"), 12) if step <= 12] == expected


@pytest.mark.parametrize(
    ("schedule", "clock", "expected"),
    [
        (QSR(4, 0.2), Clock(learning_rate=0.1), 4),
        (QSR(4, 0.2), Clock(learning_rate=0.05), 16),
        (QSR(4, 0.2), Clock(learning_rate=0.03), 44),  # 44.4
        (QSR(1, 0.3), Clock(learning_rate=0.1), 9),  # 8.999999999999998 in float64
        (QSR(1, 0.2), Clock(learning_rate=float(np.float32(0.1))), 4),  # 3.99999988, of a float32 rate
        (QSR(2, 0.2, power=3), Clock(learning_rate=0.05), 64),
        (QSR(2, 0.2, power=1), Clock(learning_rate=0.05), 4),
        (QSR(2, 0.2, warmup_steps=100, peak=0.1), Clock(step=99, learning_rate=1e-9), 4),
        (QSR(2, 0.2, warmup_steps=100, peak=0.1), Clock(step=99, learning_rate=0.0), 4),
        (QSR(2, 0.2, warmup_steps=100, peak=0.1), Clock(step=99), 4),
        (QSR(2, 0.2, warmup_steps=100, peak=0.1), Clock(step=100, learning_rate=0.02), 100),
        (Seconds(3.0), Clock(), 1),
        (Seconds(3.0), Clock(period=7), 7),
        (Seconds(3.0), Clock(step_seconds=0.5), 6),
        (Seconds(3.0), Clock(step_seconds=0.7), 4),
        (Seconds(3.0), Clock(step_seconds=4.0), 1),
        (Seconds(3.0), Clock(step_seconds=0.0), 3_000_000),
    ],
    ids=readable,
)
def test_periods_from_what_ranks_find_out(schedule: Schedule, clock: Clock, expected: int) -> None:
    assert schedule(clock) == expected


def test_adacomm_follows_the_loss_and_the_rate() -> None:
    """τ_0 = 16, F_0 = 4, γ_0 = .1; decisions at every second exchange."""
    schedule, memory, periods = AdaComm(initial=16, every_rounds=2), {}, []
    reported: list[tuple[float | None, float]] = [
        (None, 0.1),  # before the first step: τ_0
        (4.0, 0.1),  # F_0, and nothing to compare it with
        (1.0, 0.1),  # √(1/4) 16 = 8
        (0.01, 0.1),  # no decision
        (0.81, 0.1),  # √(.81/4) 16 = 7.2, so 8: not below 8, so 4
        (None, 0.1),  # no decision needs no loss
        (0.16, 0.1),  # √(.04) 16 = 3.2, so 4: not below 4, so 2
        (0.16, 0.1),
        (0.0025, 0.1),  # √(.000625) 16 = .4, so 1
        (0.0025, 0.1),
        (0.0025, 0.1),  # 1 is not below 1, and has no half
    ]
    for rounds, (loss, rate) in enumerate(reported):
        plan = query(schedule, Clock(round=rounds, learning_rate=rate, loss=loss, memory=memory))
        memory = dict(plan.memory)
        periods.append(plan.next_exchange)
    assert periods == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1]
    assert memory == {"period": 1.0, "loss": 4.0, "learning_rate": 0.1}


def test_adacomm_exchanges_less_where_the_rate_is_low() -> None:
    """√(.1/.05 · 1/4) 16 = 11.3."""
    known = {"period": 16.0, "loss": 4.0, "learning_rate": 0.1}
    schedule = AdaComm(initial=16, every_rounds=1)
    assert schedule(Clock(round=5, learning_rate=0.05, loss=1.0, memory=known)) == 12
    assert schedule(Clock(round=5, learning_rate=0.1, loss=1.0, memory=known)) == 8
    assert schedule(Clock(round=5, learning_rate=None, loss=1.0, memory=known)) == 8
    assert AdaComm().remember(Clock(learning_rate=0.0)) == {"period": 10.0}, "a warm-up from 0 has no first rate yet"


@pytest.mark.parametrize(
    ("schedule", "clock", "message"),
    [
        (QSR(), Clock(step=7), "needs the learning rate, which is unknown at step 7: use an optimizer of hvd_periodic"),
        (QSR(), Clock(step=7, learning_rate=0.0), r"positive and finite.*Received: 0\.0 at step 7.*`warmup_steps`"),
        (QSR(), Clock(learning_rate=-0.1), r"Received: -0\.1"),
        (QSR(), Clock(learning_rate=math.inf), "Received: inf"),
        (QSR(), Clock(learning_rate=math.nan), "Received: nan"),
        (QSR(), Clock(learning_rate=1e-20), "would never exchange again at a learning rate of 1e-20"),
        (QSR(), Clock(learning_rate=5e-324), "would never exchange again"),
        (AdaComm(), Clock(step=10, round=1), r"no rank has reported one.*step 10: call synchronizer\.report\(loss\)"),
        (AdaComm(1, 1), Clock(round=2, loss=0.0, memory={"loss": 1.0}), r"needs a loss above 0\. Received: 0\.0"),
        (AdaComm(1, 1), Clock(step=4, round=1, loss=-2.0), r"Received: -2\.0 at step 4"),
        (
            AdaComm(1, 1),
            Clock(round=2, loss=1.0, learning_rate=0.0, memory={"loss": 1.0, "learning_rate": 0.1}),
            r"needs a learning rate above 0\. Received: 0\.0",
        ),
    ],
    ids=readable,
)
def test_clocks_that_a_schedule_cannot_go_by(schedule: Schedule, clock: Clock, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"The schedule failed: ValueError: {type(schedule).__name__}\(.*{message}"):
        query(schedule, clock)


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
    assert type(Every(as_schedule(np.int32(7), "period")(Clock())).period) is int
    assert type(Every(np.int64(7)).argument) is int  # type: ignore[arg-type]


def two(clock: Clock) -> int:
    return 2


def test_a_function_is_a_schedule() -> None:
    schedule = as_schedule(two, "period")
    assert isinstance(schedule, Schedule)
    assert repr(schedule) == repr(two)
    assert schedule.argument is two
    assert schedule == as_schedule(two, "period") == pickle.loads(pickle.dumps(schedule))
    assert schedule != as_schedule(lambda clock: 2, "period")
    assert as_schedule(schedule, "period") is schedule


@pytest.mark.parametrize(
    "function",
    [
        lambda step: step + 1,
        lambda step: 1 if step < 3 else 5,
        lambda step: int(step),
        lambda step: len(range(step)),
        lambda step: math.ceil(math.log(step)),
    ],
)
def test_a_function_of_the_step_is_told_of_the_clock(function: Callable[[Any], int]) -> None:
    with pytest.raises(TypeError, match=r"called with a clock, not with a number of steps \(clock\.step\): "):
        as_schedule(function, "period")(Clock(step=3))
    with pytest.raises(TypeError, match=r"clock\.step"):
        ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, function, process_set=LocalCommunicator())


def test_other_errors_of_a_function_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^unsupported operand type\(s\) for \+: 'int' and 'str'$"):
        as_schedule(lambda clock: clock.step + "1", "period")(Clock())


@pytest.mark.parametrize("returned", [0, -1, 1.0, 2.5, math.nan, True, None, "3"])
def test_a_schedule_must_return_a_positive_int(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"returned at step 5 must be an int >= 1\. Received: "):
        next_exchange(as_schedule(lambda clock: returned, "period"), Clock(step=5))


@pytest.mark.parametrize("schedule", [Every(3), PostLocal(2, 5), Piecewise({0: 3}), QSR(), Seconds(2.0)], ids=readable)
def test_schedules_are_values(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(pickle.loads(pickle.dumps(schedule))) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.period = 1  # type: ignore[attr-defined]


def test_different_schedules_are_different() -> None:
    assert len({Every(3), Every(4), PostLocal(2, 3), PostLocal(3, 3), PostLocal(3, 2)}) == 5
    assert len({Piecewise({0: 1}), Piecewise({0: 2}), Piecewise({0: 1, 5: 2}), Piecewise({5: 2, 0: 1})}) == 3


def test_piecewise_keeps_a_copy_in_order() -> None:
    given = {10: 2, 0: 1}
    schedule = Piecewise(given)
    given[0] = 5
    assert repr(schedule) == "Piecewise(periods={0: 1, 10: 2})"


@pytest.mark.parametrize("bad", [0, -1, 2.5, math.nan, True, "3", None])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda v: Piecewise({0: v}), "The period from step 0 on in `Piecewise(periods=...)`"),
        (lambda v: Doubling(start=v), "`Doubling(start=...)`"),
        (lambda v: Doubling(every_rounds=v), "`Doubling(every_rounds=...)`"),
        (lambda v: Doubling(limit=v), "`Doubling(limit=...)`"),
        (lambda v: QSR(base=v), "`QSR(base=...)`"),
        (lambda v: DyLU(v), "`DyLU(period=...)`"),
        (lambda v: AdaComm(initial=v), "`AdaComm(initial=...)`"),
        (lambda v: AdaComm(every_rounds=v), "`AdaComm(every_rounds=...)`"),
    ],
)
def test_whole_arguments(make: Callable[[Any], object], argument: str, bad: object) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(bad)
    assert str(caught.value).startswith(argument)
    assert str(caught.value).endswith(f"must be an int >= 1. Received: {bad!r}")


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, True, "3", [1]])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda v: QSR(coefficient=v), "`QSR(coefficient=...)`"),
        (lambda v: QSR(power=v), "`QSR(power=...)`"),
        (lambda v: QSR(peak=v), "`QSR(peak=...)`"),
        (lambda v: Seconds(v), "`Seconds(seconds=...)`"),
    ],
)
def test_real_arguments(make: Callable[[Any], object], argument: str, bad: object) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(bad)
    assert str(caught.value).startswith(argument)
    assert str(caught.value).endswith(f"Received: {bad!r}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Piecewise({}), r"must hold a period from step 0 on\. Received: \{\}"),
        (lambda: Piecewise({5: 1}), r"must hold a period from step 0 on\. Received: \{5: 1\}"),
        (lambda: Piecewise({0: 1, -5: 1}), r"Every step in `Piecewise.* must be an int >= 0\. Received: -5"),
        (lambda: Piecewise({0: 1, 2.5: 1}), r"Received: 2\.5"),  # type: ignore[dict-item]
        (lambda: Piecewise({0: 1, "later": 1}), r"Received: 'later'"),  # type: ignore[dict-item]
        (lambda: Piecewise([1, 2]), r"must be a dict from steps to periods\. Received: \[1, 2\]"),  # type: ignore[arg-type]
        (lambda: Doubling(start=8, limit=7), r"`Doubling\(limit=\.\.\.\)`, which is not below `start`,.*>= 8\..*: 7"),
        (lambda: QSR(warmup_steps=-1), r"`QSR\(warmup_steps=\.\.\.\)` must be an int >= 0\. Received: -1"),
        (lambda: QSR(warmup_steps=10), r"`QSR\(peak=\.\.\.\)` must be the learning rate.*peak=None, warmup_steps=10"),
    ],
)
def test_arguments_that_do_not_fit_together(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def catches_exceptions(clock: Clock) -> int:
    try:
        return 1 if clock.loss else 2
    except Exception:
        return 5


def catches_everything(clock: Clock) -> int:
    try:
        return 1 if clock.learning_rate else 2
    except BaseException:
        return 5


@pytest.mark.parametrize("period", [catches_exceptions, catches_everything])
def test_the_answer_of_a_schedule_that_catches_errors_is_no_prediction(period: Callable[[Clock], int]) -> None:
    """It would be that for a clock without the values that ranks share later."""
    schedule = as_schedule(period, "period")
    assert predict(schedule, Clock(step=3)) is None
    assert forecast(schedule, 4) == []
    assert query(schedule, Clock(step=3, loss=1.0, learning_rate=0.1)).next_exchange == 4
