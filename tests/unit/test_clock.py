"""What ranks agree on when a schedule is asked: learning rate, seconds, loss, memory; different on each of them."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import QSR, AdaComm, Clock, Communicator, Doubling, Every, Piecewise, Seconds
from hvd_periodic.numpy import SGD, ModelAverageOptimizer
from tests.covering import covering
from tests.helpers import errors, readable, run_ranks

N = 3


class Watched:
    """A function of the clock that keeps the clocks it was asked with; not those of questions before ranks meet."""

    def __init__(self, period: Callable[[Clock], int]) -> None:
        self.period = period
        self.clocks: list[Clock] = []

    def __call__(self, clock: Clock) -> int:
        if clock.learning_rate is not None:  # What depends on it, is asked once ranks have met.
            self.clocks.append(clock)
        return self.period(clock)


def optimizer_of(communicator: Communicator, period: Any, rate: float = 0.1, **options: Any) -> ModelAverageOptimizer:
    return ModelAverageOptimizer(SGD(rate), {"x": np.zeros(1)}, period, process_set=communicator, **options)


def exchanges(optimizer: ModelAverageOptimizer, steps: int, before: Callable[[int], object]) -> list[int]:
    """Train; return the steps of the exchanges. ``before`` is called with the number of each step, from 1."""
    seen = []
    for step in range(1, steps + 1):
        before(step)
        rounds = optimizer.synchronizer.rounds
        optimizer.step([np.ones(1)])
        if optimizer.synchronizer.rounds > rounds:
            seen.append(step)
    return seen


def test_ranks_are_asked_with_the_same_clock() -> None:
    """Rates .1, .2, .3: the first rank's. Losses 1, 2 per step on ranks 0 and 2: means 1.5 and 5."""

    def work(communicator: Communicator) -> list[Clock]:
        watched = Watched(lambda clock: 2)
        optimizer = optimizer_of(communicator, watched, 0.1 * (1 + communicator.rank))
        for step in range(4):
            if communicator.rank != 1 and step < 2:
                optimizer.synchronizer.report(1 + step + communicator.rank * 1.75)
            optimizer.step([np.ones(1)])
        return watched.clocks

    first, *others = run_ranks(N, work)
    assert others == [first] * (N - 1)
    start, after_two, after_four = first
    assert start == Clock(learning_rate=0.1)
    assert (after_two.step, after_two.round, after_two.period, after_two.learning_rate) == (2, 1, 2, 0.1)
    assert after_two.loss == (1.5 + 5.0) / 2
    assert after_two.step_seconds is not None
    assert after_two.step_seconds > 0
    assert (after_four.step, after_four.round, after_four.loss) == (4, 2, None)


def test_the_rate_is_that_of_the_rank_with_most_updates() -> None:
    def work(communicator: Communicator) -> list[float | None]:
        watched = Watched(lambda clock: 2)
        optimizer = optimizer_of(communicator, watched, 0.1 * (1 + communicator.rank))
        for step in range(4):
            if step == 1 and communicator.rank == 0:
                optimizer.skip()
            else:
                optimizer.step([np.ones(1)])
        return [clock.learning_rate for clock in watched.clocks]

    assert run_ranks(N, work) == [[0.1, 0.2, 0.2]] * N


def test_the_slowest_rank_decides() -> None:
    def work(communicator: Communicator) -> tuple[list[int], list[float | None]]:
        watched = Watched(Seconds(0.3))
        optimizer = optimizer_of(communicator, watched)
        found = exchanges(optimizer, 8, lambda step: time.sleep(0.1 if communicator.rank == 1 else 0.001))
        return found, [clock.step_seconds for clock in watched.clocks]

    first, *others = run_ranks(N, work)
    assert others == [first] * (N - 1)
    found, seconds = first
    assert found[0] == 1, "to measure"
    assert seconds[0] is None
    assert all(measured is not None and measured >= 0.1 for measured in seconds[1:])
    assert all(later - earlier <= 3 for earlier, later in itertools.pairwise(found))
    assert len(found) >= 3


def test_periods_follow_the_rate_from_the_first_on() -> None:
    """A scheduler that is made after the optimizer sets the first rate: (.2/.1)² = 4, not (.2/.01)²."""

    def work(communicator: Communicator) -> list[int]:
        local = SGD(0.01)
        optimizer = ModelAverageOptimizer(
            local, {"x": np.zeros(1)}, QSR(base=2, coefficient=0.2), process_set=communicator
        )
        local.learning_rate = 0.1

        def decay(step: int) -> None:
            if step > 5:
                local.learning_rate = 0.05

        return exchanges(optimizer, 30, decay)

    assert run_ranks(N, work) == [[4, 8, 24]] * N  # at step 8: (.2/.05)² = 16


def test_adacomm_among_ranks() -> None:
    """Mean losses 4, 1, 1, .25 of the rounds, though rank 2 reports nothing: 4, 4, 2, 1, 1."""

    def work(communicator: Communicator) -> list[int]:
        optimizer = optimizer_of(communicator, AdaComm(initial=4, every_rounds=1))

        def report(step: int) -> None:
            loss = 4.0 if step <= 4 else 1.0 if step <= 10 else 0.25
            if communicator.rank < 2:
                optimizer.synchronizer.report(loss * (0.5 + communicator.rank))

        return exchanges(optimizer, 13, report)

    assert run_ranks(N, work) == [[4, 8, 10, 11, 12, 13]] * N


SCHEDULES = [
    Every(3),
    Piecewise({0: 2, 5: 4}),
    Doubling(1, 2, 6),
    QSR(2, 0.2),
    AdaComm(6, 1),
    lambda clock: 2 if clock.loss is None or clock.loss > 1 else 3,
]


@functools.cache
def run_and_resumed(schedule: Any, saved_at: int | None, on_root_only: bool) -> list[tuple[list[int], list[Any]]]:
    """Return the steps of the exchanges of two ranks, and what they kept, in a run that may be resumed once."""
    steps = 24

    def train(communicator: Communicator) -> tuple[list[int], list[Any]]:
        local = SGD(0.1)

        def build() -> ModelAverageOptimizer:
            return ModelAverageOptimizer(local, {"x": np.zeros(1)}, schedule, process_set=communicator)

        optimizer, found, kept = build(), [], []
        for step in range(1, steps + 1):
            if saved_at is not None and step == saved_at + 1:
                state = pickle.loads(pickle.dumps(optimizer.synchronizer.state_dict()))
                optimizer = build()
                if communicator.rank == 0 or not on_root_only:
                    optimizer.synchronizer.load_state_dict(state)
            local.learning_rate = (0.1 if step < 10 else 0.06) * (1 + communicator.rank / 10)
            same = 0 if on_root_only else communicator.rank  # what the root reported, is all that it brings
            optimizer.synchronizer.report((3.0 + same) / step)
            optimizer.step([np.ones(1)])
            if optimizer.synchronizer.counters.last_exchange == step:
                found.append(step)
                kept.append(optimizer.synchronizer.progress.notes.memory)
        return found, kept

    return run_ranks(2, train)


@pytest.mark.parametrize(
    ("schedule", "saved_at", "on_root_only"), covering(SCHEDULES, (0, 7, 8, 12), (False, True)), ids=readable
)
def test_a_resumed_run_exchanges_at_the_same_steps(schedule: Any, saved_at: int, on_root_only: bool) -> None:
    """Losses and rates differ between ranks; those reported before the save count after it."""
    expected = run_and_resumed(schedule, None, on_root_only)
    assert expected[0] == expected[1]
    assert run_and_resumed(schedule, saved_at, on_root_only) == expected


def test_the_next_exchange_of_a_measured_schedule_is_saved() -> None:
    def work(communicator: Communicator) -> tuple[int, list[int]]:
        optimizer = optimizer_of(communicator, Seconds(0.2))
        exchanges(optimizer, 3, lambda step: time.sleep(0.02))
        state = copy.deepcopy(optimizer.synchronizer.state_dict())
        again = optimizer_of(communicator, Seconds(0.2))
        again.synchronizer.load_state_dict(state)
        return state["counters"]["next_exchange"] - 3, exchanges(again, 30, lambda step: time.sleep(0.02))

    first, second = run_ranks(2, work)
    assert first == second
    assert first[1][0] == first[0], "the one that was planned"
    assert len(first[1]) > 1, "measured anew"


def test_a_state_of_the_version_before_is_read() -> None:
    optimizer = optimizer_of_one(AdaComm(3, 1))
    exchanges(optimizer, 4, lambda step: optimizer.synchronizer.report(2.0))
    state = optimizer.synchronizer.state_dict()
    del state["notes"]
    again = optimizer_of_one(AdaComm(3, 1))
    again.synchronizer.load_state_dict(state)
    assert exchanges(again, 9, lambda step: again.synchronizer.report(2.0)) == [2, 5, 6, 7, 8, 9]


def optimizer_of_one(period: Any, rate: Any = 0.1) -> ModelAverageOptimizer:
    return ModelAverageOptimizer(SGD(rate), {"x": np.zeros(1)}, period)


def test_what_can_be_reported() -> None:
    synchronizer = optimizer_of_one(5).synchronizer
    for loss in (1, 2.0, np.float32(3.0), np.array(4.0), np.ones(2) @ np.ones(2) * 2.5):
        synchronizer.report(loss)
    assert (
        synchronizer.progress.notes.loss_sum,
        synchronizer.progress.notes.losses,
        synchronizer.progress.notes.loss,
    ) == (
        15.0,
        5,
        3.0,
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "must be a number. Received: NoneType None"),
        ("1", "must be a number. Received: str '1'"),
        (True, "must be a number. Received: bool True"),
        (np.ones(2), "must be a number. Received: ndarray of shape (2,)"),
    ],
)
def test_what_cannot_be_reported(loss: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        optimizer_of_one(5).synchronizer.report(loss)
    assert message in str(caught.value)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_error_on_every_rank(loss: float) -> None:
    def work(communicator: Communicator) -> None:
        optimizer = optimizer_of(communicator, 3)
        exchanges(optimizer, 3, lambda step: optimizer.synchronizer.report(loss if communicator.rank == 1 else 1.0))

    found = errors(N, work)
    assert [kind for kind, _ in found] == [RuntimeError, ValueError, RuntimeError]
    assert all(f"A loss of {loss} was reported at step 0" in text for _, text in found)


def on_rank_1(communicator: Communicator, bad: Callable[[Clock], Any]) -> Callable[[Clock], Any]:
    """Return a function that does something else on rank 1 from step 4 on."""
    return lambda clock: bad(clock) if communicator.rank == 1 and clock.step >= 4 else 2


def fail(clock: Clock) -> int:
    raise KeyError("broken")


def test_a_learning_rate_that_fails_on_one_rank_is_an_error_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        optimizer = optimizer_of(communicator, 2)
        exchanges(optimizer, 2, lambda step: None)

        def broken() -> float:
            raise KeyError("no such group")

        if communicator.rank == 1:
            optimizer.synchronizer.learning_rate = broken
        exchanges(optimizer, 2, lambda step: None)

    texts = [text for _, text in errors(N, work)]
    assert all("The learning rate of the local optimizer cannot be read: KeyError: 'no such group'" in t for t in texts)
    assert [text.startswith("Rank 1 failed") for text in texts] == [True, False, True]


@pytest.mark.parametrize("looks_at_the_rate", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (fail, "The schedule failed: KeyError: 'broken'"),
        (lambda clock: 0, "must be an int >= 1. Received: 0"),
        (lambda clock: 2.5, "must be an int >= 1. Received: 2.5"),
        (lambda clock: math.nan, "must be an int >= 1. Received: nan"),
        (lambda clock: 3, "says different things on different ranks: the next exchange at step 6 on rank 0, and at 7"),
    ],
)
def test_a_schedule_that_fails_on_one_rank_is_an_error_on_every_rank(
    bad: Callable[[Clock], Any], message: str, looks_at_the_rate: bool
) -> None:
    """Also where it can be asked only once the ranks have met."""

    def work(communicator: Communicator) -> None:
        at_start, failing = optimizer_of, False

        def schedule(clock: Clock) -> int:
            looked = clock.learning_rate if looks_at_the_rate else None
            return on_rank_1(communicator, bad)(clock) if failing else 2 if looked != 0 else 1

        optimizer = at_start(communicator, schedule)
        exchanges(optimizer, 2, lambda step: None)
        failing = True
        if looks_at_the_rate:
            inner = schedule

            def late(clock: Clock) -> int:
                _ = clock.learning_rate
                return inner(clock)

            optimizer.synchronizer.planner.schedule = type(optimizer.synchronizer.planner.schedule)(late)  # type: ignore[call-arg]
        exchanges(optimizer, 2, lambda step: None)

    for _, text in errors(N, work):
        assert message in text


@pytest.mark.parametrize(
    ("schedule", "rate", "message"),
    [
        (QSR(), 0.0, "Received: 0.0 at step 0"),
        (QSR(), None, "needs the learning rate, which is unknown at step 0"),
        (QSR(), "fast", "needs the learning rate, which is unknown at step 0"),
        (AdaComm(2), 0.1, "no rank has reported one in the round that ends at step 2: call synchronizer.report(loss)"),
    ],
)
def test_what_a_schedule_lacks_is_an_error_on_every_rank(schedule: Any, rate: Any, message: str) -> None:
    def work(communicator: Communicator) -> None:
        optimizer = optimizer_of(communicator, schedule, 1.0)
        optimizer.inner.learning_rate = rate  # type: ignore[attr-defined]
        optimizer.step([None])
        optimizer.step([None])

    for kind, text in errors(N, work):
        assert kind is RuntimeError
        assert message in text


def test_the_end_of_training_needs_no_rate() -> None:
    """A cosine has come to 0 when all call finalize(), and nobody asks for the next period."""

    def work(communicator: Communicator) -> tuple[int, int]:
        local = SGD(0.1)
        optimizer = ModelAverageOptimizer(local, {"x": np.zeros(1)}, QSR(3, 0.1), process_set=communicator)
        exchanges(optimizer, 4, lambda step: None)
        local.learning_rate = 0.0
        optimizer.synchronizer.finalize()
        return optimizer.synchronizer.rounds, optimizer.synchronizer.counters.next_exchange

    assert run_ranks(N, work) == [(2, 7)] * N


def test_a_rank_that_has_left_has_no_say() -> None:
    """Rank 0 has ended: the rate is that of rank 1, the loss the mean of ranks 1 and 2."""

    def work(communicator: Communicator) -> list[Clock]:
        watched = Watched(lambda clock: 2)
        optimizer = optimizer_of(communicator, watched, 0.1 * (1 + communicator.rank))
        for _ in range(3 if communicator.rank == 0 else 6):
            optimizer.synchronizer.report(float(communicator.rank))
            optimizer.step([np.ones(1)])
        optimizer.synchronizer.finalize()
        return watched.clocks

    for clocks in run_ranks(N, work):
        assert [(c.step, c.learning_rate, c.loss) for c in clocks[:4]] == [
            (0, 0.1, None),
            (2, 0.1, 1.0),
            (4, 0.2, 1.5),
            (6, 0.2, 1.5),
        ]


def test_an_asynchronous_rank_goes_by_its_own_clock() -> None:
    def work(communicator: Communicator) -> list[int]:
        from hvd_periodic.numpy import ElasticAverageOptimizer

        local = SGD(0.1 / (1 + communicator.rank))
        optimizer = ElasticAverageOptimizer(
            local, {"x": np.zeros(1)}, QSR(1, 0.1), asynchronous=True, process_set=communicator
        )
        found = []
        for step in range(1, 9):
            rounds = optimizer.synchronizer.rounds
            optimizer.step([np.ones(1)])
            if optimizer.synchronizer.rounds > rounds:
                found.append(step)
        optimizer.synchronizer.finalize()
        return found

    assert run_ranks(2, work) == [[1, 2, 3, 4, 5, 6, 7, 8], [4, 8]]
