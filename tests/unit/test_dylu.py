"""DyLU: every worker's steps by its speed, which is told at each push and kept with the center."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from hvd_periodic import Clock, Communicator, DyLU
from hvd_periodic.algorithms import EASGD, Algorithm, DiLoCo
from hvd_periodic.asynchronous.ledger import Ledger
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.sync.planner import forecast
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.sockets import OverSockets

SECONDS = (0.58, 0.75, 1.51, 3.33)
"""Per local step, of the workers of the paper."""

N = len(SECONDS)


class Worker:
    """A worker whose clock the test sets."""

    def __init__(
        self, communicator: Communicator, algorithm: Algorithm, place: str, states: Sequence[Any] = ()
    ) -> None:
        if place != "window":
            communicator = OverSockets(cast(ThreadCommunicator, communicator))
        self.communicator = communicator
        self.optimizer = PeriodicOptimizer(
            SGD(0.1),
            {"x": np.zeros(3)},
            algorithm,
            DyLU(50),
            asynchronous=True,
            center="sharded" if place == "sharded" else "root",
            process_set=communicator,
        )
        if states:
            self.optimizer.synchronizer.load_state_dict(states[communicator.rank])
        self.optimizer.synchronizer.begin()

    @property
    def state(self) -> dict[str, Any]:
        """What is saved; of this worker."""
        return self.optimizer.synchronizer.state_dict()

    def push(self, seconds: float | None) -> int:
        """Train until a push, with steps of so many seconds; return the period that follows."""
        synchronizer = self.optimizer.synchronizer
        synchronizer.progress.step_seconds = lambda local_steps: seconds  # type: ignore[method-assign]
        rounds = synchronizer.rounds
        while synchronizer.rounds == rounds:
            self.optimizer.step([np.ones(3)])
        return synchronizer.counters.next_exchange - synchronizer.local_steps

    def in_turn(self, seconds: Sequence[float | None]) -> int:
        """Push once, in the order of ranks; return the period that follows."""
        period = 0
        for rank, each in enumerate(seconds):
            if rank == self.communicator.rank:
                period = self.push(each)
            self.communicator.allgather_object(None, "pushed")
        return period


def of_ranks(size: int, work: Callable[[Worker], Any], *options: Any) -> list[Any]:
    """Run workers as threads; close their connections."""

    def run(communicator: Communicator) -> Any:
        worker = Worker(communicator, *options)
        found = work(worker)
        worker.optimizer.synchronizer.finalize()
        return found

    return run_ranks(size, run)


@pytest.mark.parametrize(
    ("speed", "steps"), [(None, 50), (1.0, 50), (0.5, 25), (0.299999, 14), (0.29 / 0.58, 25), (0.0199, 1), (1e-9, 1)]
)
def test_the_formula(speed: float | None, steps: int) -> None:
    """⌊50 v⌋, at least 1."""
    assert DyLU(50)(Clock(step=100, round=3, period=7, relative_speed=speed)) == steps


def test_the_periods_cannot_be_foreseen() -> None:
    assert forecast(DyLU(50), 3) == []


def test_a_ledger_compares_speeds_once_all_are_told() -> None:
    """Workers of 2, 8 and 4 steps per second; the second becomes slower, and once does not know its speed."""
    ledger = Ledger(2, np.zeros(Ledger.size(2, 3), np.int64))
    told = [(0, 2.0), (1, 8.0), (0, 2.0), (2, 4.0), (0, 2.0), (1, 1.0), (1, 0.0), (2, 4.0)]
    assert [ledger.begin(*each)[1] for each in told] == [0, 0, 0, 0.5, 0.25, 0.25, 0.25, 1.0]
    assert [ledger.pushes.tolist(), ledger.rounds.tolist()] == [[3, 3, 2], [0]]


@pytest.mark.parametrize(
    ("algorithm", "place"), covering([DiLoCo(), EASGD(0.5)], ["window", "root", "sharded"]), ids=str
)
def test_workers_push_about_equally_often(algorithm: Algorithm, place: str) -> None:
    """In turn: the last one knows all speeds at its first push, the others at their second."""

    def work(worker: Worker) -> list[int]:
        slower = [0.58, 0.75, None, 0.29]  # the fourth is now the fastest, and the third does not know
        return [worker.in_turn(seconds) for seconds in (SECONDS, SECONDS, slower, slower)]

    found = of_ranks(N, work, algorithm, place)
    assert found == [[50, 50, 50, 25], [50, 38, 38, 19], [50, 19, 19, 9], [8, 8, 50, 50]]


def saved(worker: Worker) -> Any:
    """Return the state after two pushes of each, as it is in a file."""
    for _ in range(2):
        worker.in_turn(SECONDS)
    state = worker.state
    worker.communicator.allgather_object(None, "saved")
    return pickle.loads(pickle.dumps(state)) | {"pushes": json.loads(json.dumps(state["pushes"]))}


def resumed(states: Sequence[Any], place: str, size: int = N) -> list[list[int]]:
    """Return the periods after two pushes of each worker, which go on from their states."""

    def work(worker: Worker) -> list[int]:
        return [worker.in_turn(SECONDS[:size]) for _ in range(2)]

    return of_ranks(size, work, DiLoCo(), place, states)


@pytest.mark.parametrize("place", ["window", "sharded"])
def test_speeds_are_saved_with_the_center(place: str) -> None:
    """All are known at once; of a version without them, and of another number of workers, once all have told."""
    states = of_ranks(N, saved, DiLoCo(), place)
    assert [state["pushes"]["speeds"] for state in states] == [[1 / seconds for seconds in SECONDS]] * N
    assert [state["counters"]["next_exchange"] for state in states] == [150, 138, 119, 66]
    assert resumed(states, place) == [[50, 50], [38, 38], [19, 19], [8, 8]]
    for state in states:
        del state["pushes"]["speeds"]
    assert resumed(states, place) == [[50, 50], [50, 38], [50, 19], [8, 8]]
    assert resumed(states, place, size=2) == [[50, 50], [38, 38]]


@pytest.mark.parametrize("options", [{}, {"quorum": 2}, {"quorum": 1}, {"fragments": 2}, {"overlap": 1}], ids=str)
def test_it_is_for_asynchronous_training(options: dict[str, Any]) -> None:
    def work(communicator: Communicator) -> None:
        algorithm: Any = EASGD(0.5)
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(3)}, algorithm, DyLU(50), process_set=communicator, **options)

    for kind, text in errors(2, work):
        assert kind is ValueError
        assert text.startswith("DyLU gives each worker its own number of local steps")
        assert text.endswith("Received: DyLU(period=50)")


@pytest.mark.parametrize(("asynchronous", "last"), [(False, None), (True, 1.0)])
def test_other_schedules_know_the_relative_speed_in_asynchronous_training(
    asynchronous: bool, last: float | None
) -> None:
    def work(communicator: Communicator) -> float | None:
        seen: list[float | None] = []

        def look(clock: Clock) -> int:
            seen.append(clock.relative_speed)
            return 1

        options: dict[str, Any] = {"asynchronous": asynchronous, "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": np.zeros(3)}, DiLoCo(), look, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.progress.step_seconds = lambda steps: 1.0 + communicator.rank  # type: ignore[method-assign]
        for _ in range(3):
            communicator.allgather_object(None, "all have told")
            optimizer.step([np.ones(3)])
        optimizer.synchronizer.finalize()
        return seen[-1]

    assert run_ranks(2, work) == [last, last and last / 2]
