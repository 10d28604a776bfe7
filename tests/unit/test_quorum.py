"""Rounds with a quorum: the numbers of the reference, who takes part, limits, invariants, refusals."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hvd_periodic import Communicator, Compression, PostLocal
from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.asynchronous import rounds as rounds_module
from hvd_periodic.asynchronous.rounds import Quorum, Rounds
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.transports import LocalMemory, NoSharedMemoryError
from hvd_periodic.journal.files import read_run_log
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.sync.combinations import as_quorum
from hvd_periodic.sync.synchronous import Synchronous
from tests.helpers import TIMEOUT_SECONDS, errors, outcomes, run_ranks

CURVATURE, MINIMUM, RATE, PERIOD = (0.5, 1.0, 2.0), (3.0, -1.0, 0.5), 0.1, 2
"""Of workers with F_i = h_i (x − b_i)²/2."""

SETS = [[0, 1], [0, 1, 2], [1, 2], [0, 1, 2]]


ADOPTED = [[0, 1, 2], [0, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
"""Rounds, of which the third and the fifth are those of finalize(); after the third, another parameter comes."""


def check_adopted(reports: Sequence[Any]) -> None:
    """Check what ranks report of these rounds: center and newcomer after the third, and the center at the end."""
    for report in reports:
        assert report["comes"][:2] == [report["alone"][0], [1.0, 1.0]]
        assert report["comes"][2] == pytest.approx(report["alone"][2], rel=1e-12)
        assert report["comes"] == reports[0]["comes"]
        assert report["comes"][3][0] < 1.0


@pytest.fixture(params=["window", "service"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rounds in shared memory, and through messages."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", request.param)
    return str(request.param)


class Trainer:
    """A worker on its quadratic."""

    def __init__(self, communicator: Communicator, algorithm: Algorithm, **options: Any) -> None:
        self.rank, self.x, self.communicator = communicator.rank, np.zeros(1), communicator
        self.local = SGD(RATE)
        self.optimizer = PeriodicOptimizer(
            self.local, {"x": self.x}, algorithm, PERIOD, process_set=communicator, **options
        )
        self.optimizer.synchronizer.begin()

    def replay(self, sets: Sequence[Sequence[int]]) -> None:
        self.optimizer.synchronizer.exchanger.replay(sets)  # type: ignore[attr-defined]
        self.communicator.allgather_object(None, "replayed")

    def period(self) -> None:
        for _ in range(PERIOD):
            self.optimizer.step([CURVATURE[self.rank] * (self.x - MINIMUM[self.rank])])

    def centers_after(self, sets: Sequence[Sequence[int]]) -> list[float]:
        """Return the center after each round of given workers, of whom each takes a period of steps before."""
        self.replay([sorted(members) for members in sets])
        centers = []
        for members in sets:
            if self.rank in members:
                self.period()
            self.communicator.allgather_object(None, "closed")
            centers.append(self.center())
            self.communicator.allgather_object(None, "seen")
        return centers

    def center(self) -> float:
        return float(self.optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"][0])


def rounds(algorithm: Algorithm, sets: Sequence[Sequence[int]] = SETS, **options: Any) -> list[tuple[Any, Any, float]]:
    """Return of every worker its rounds, with x after each, and c at the end."""

    def work(communicator: Communicator) -> tuple[Any, Any, float]:
        trainer = Trainer(communicator, algorithm, quorum=2, **options)
        trainer.replay(sets)
        seen = []
        for number, members in enumerate(sets):
            if communicator.rank in members:
                trainer.period()
                seen.append((number, float(trainer.x[0])))
        communicator.allgather_object(None, "done")
        return seen, trainer.optimizer.synchronizer.counters, trainer.center()

    return run_ranks(3, work)


TABLE: dict[str, tuple[Algorithm, dict[str, Any], Sequence[float]]] = {
    "averaging": (Averaging(), {}, [0.05125, 0.140505208, 0.096866276, 0.168707706]),
    "averaging, discounted": (
        Averaging(),
        {"staleness_power": 0.5},
        [0.05125, 0.130687149, 0.089748183, 0.140894034],
    ),
    "diloco": (DiLoCo(), {}, [0.0681625, 0.213775038, 0.204778413, 0.302937413]),
    "elastic averaging": (EASGD(0.25), {}, [0.025625, 0.097671484, 0.023871586, 0.14610129]),
    "agn, sum": (AGN(), {"outer_optimizer": SGD(0.1)}, [0.05125, 0.185132812, 0.129221289, 0.22591021]),
    "agn, average": (
        AGN("average"),
        {"outer_optimizer": SGD(0.1, 0.9)},
        [0.025625, 0.094542969, 0.141069482, 0.215558986],
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", TABLE)
def test_numbers(case: str) -> None:
    algorithm, options, expected = TABLE[case]
    for length in range(1, len(SETS) + 1):
        for _, _, center in rounds(algorithm, SETS[:length], **options):
            assert center == pytest.approx(expected[length - 1], abs=5e-9)


def test_without_enough_shared_memory_rounds_are_through_messages() -> None:
    """Of two pieces of memory there is room for the first one only, which is closed again."""

    def work(communicator: Communicator) -> Any:
        shared_memory, made = communicator.shared_memory, []

        def allocate(nbytes: int, later: int = 0) -> Any:
            if made:
                raise NoSharedMemoryError("rank 0: there is no room")
            made.append(shared_memory(nbytes, later))
            return made[0]

        with patch.object(communicator, "shared_memory", allocate):
            trainer = Trainer(communicator, Averaging(), quorum=2)
        exchanger: Any = trainer.optimizer.synchronizer.exchanger
        return trainer.centers_after(SETS), exchanger.worker.transport.description

    with patch.object(LocalMemory, "close") as closed:
        results = run_ranks(3, work)
    assert closed.call_count == 3
    for centers, description in results:
        assert centers == pytest.approx(TABLE["averaging"][2], abs=5e-9)
        assert description == "messages to rank 0, which closes rounds"


def test_replicas_of_elastic_averaging() -> None:
    results = rounds(EASGD(0.25))
    last = [seen[-1][1] for seen, _, _ in results]
    assert last == pytest.approx([0.478677379, -0.290441984, 0.250068475], abs=5e-9)


class Clock:
    now = 0.0


def coming(periods: Sequence[float], quorum: Quorum, until: float) -> list[tuple[float, list[int]]]:
    """Return when rounds close, and with whom: each worker comes a period of its own after the last round it was in.

    The first round closes at 0.
    """
    clock, closes = Clock(), list[tuple[float, list[int]]]()
    rounds = Rounds(range(len(periods)), quorum, now=lambda: clock.now)
    due = dict.fromkeys(range(len(periods)), 0.0)
    for tick in range(round(until / 0.01) + 1):
        clock.now = tick * 0.01 + 1e-6
        for worker, at in list(due.items()):
            if clock.now >= at:
                rounds.come(worker)
                del due[worker]
        members = rounds.members()
        if members is not None:
            rounds.close(members)
            closes.append((round(tick * 0.01, 2), members))
            due |= {worker: clock.now + periods[worker] - 1e-3 for worker in members}
    return closes


def test_always_late_by_half_a_period_is_every_second_round() -> None:
    found = coming([1, 1.05, 1.5], Quorum(2, 0.1), 4.5)
    assert [members for _, members in found] == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert [at for at, _ in found] == pytest.approx([0, 1.15, 2.2, 3.35, 4.4], abs=0.03)


def test_the_default_grace_is_a_tenth_of_the_time_to_the_quorum() -> None:
    found = coming([1, 1, 9], Quorum(2), 5)
    assert [at for at, _ in found] == pytest.approx([0, 1.1, 2.2, 3.3, 4.4], abs=0.05)
    assert [members for _, members in found[1:]] == [[0, 1]] * 4
    assert coming([1, 1.05, 9], Quorum(1, 0), 1.5)[1] == (1.0, [0])


def at_rest(quorum: Quorum, came: Sequence[int] = (0, 1, 2), timeout: float | None = None) -> tuple[Rounds, Clock]:
    """Return rounds of three workers after the first."""
    clock = Clock()
    rounds = Rounds([10, 11, 12], quorum, lambda: timeout, lambda: clock.now)
    for worker in range(3):
        assert rounds.members() is None
        rounds.come(worker)
    assert rounds.members() == [0, 1, 2]
    rounds.close([0, 1, 2])
    clock.now = 1.0
    return rounds, clock


def test_who_is_in_another_call_or_gone_is_not_waited_for() -> None:
    rounds, clock = at_rest(Quorum(3))
    rounds.come(0)
    rounds.apart(1, starts=True)
    clock.now = 50.0
    assert rounds.members() is None, "worker 2 trains"
    rounds.come(2)
    assert rounds.members() == [0, 2]
    rounds.close([0, 2])
    rounds.come(2)
    rounds.gone([0])
    assert rounds.members() == [2]
    rounds.apart(1, starts=False)
    assert rounds.members() is None


def test_who_is_leaving_waits_for_the_last_round() -> None:
    rounds, clock = at_rest(Quorum(2, 0.5))
    rounds.come(0, leaving=True)
    rounds.come(1)
    assert rounds.members() is None, "q is 2, and so many others are left"
    rounds.come(2)
    assert rounds.members() == [1, 2]
    rounds.close([1, 2])
    rounds.come(1, leaving=True)
    clock.now = 99.0
    assert rounds.members() is None
    rounds.come(2)
    assert rounds.members() == [2]
    rounds.close([2])
    rounds.come(2, leaving=True)
    assert rounds.members() == [0, 1, 2]


def test_who_is_leaving_waits_for_those_who_are_not_back_from_a_call_of_all() -> None:
    rounds, _ = at_rest(Quorum(2, 0.5))
    for worker in range(3):
        rounds.apart(worker, starts=True)
    for worker in (0, 1):
        rounds.apart(worker, starts=False)
        rounds.come(worker, leaving=True)
    assert rounds.members() is None
    rounds.apart(2, starts=False)
    rounds.come(2, leaving=True)
    assert rounds.members() == [0, 1, 2]


def test_save_on_some_ranks_and_finalize_on_others_is_an_error() -> None:
    """Each would wait for the other."""
    rounds, _ = at_rest(Quorum(2, 0.5))
    rounds.come(0, leaving=True)
    for worker in (1, 2):
        rounds.apart(worker, starts=True)
    assert rounds.members() is None
    ((worker, text),) = rounds.in_vain().items()
    assert worker == 0
    assert text.startswith("Rank 11 is in save() or another call that all ranks make, and rank 10 in")


def test_after_an_error_of_different_calls_those_who_are_not_back_are_in_no_later_call() -> None:
    rounds, _ = at_rest(Quorum(2, 0.5))
    rounds.apart(2, starts=True)
    rounds.come(0, leaving=True)
    assert list(rounds.in_vain()) == [0]
    rounds.dismiss([0])
    for worker in (0, 1, 2):  # finalize() of the first and an audit() of the last have ended.
        rounds.apart(worker, starts=False)
    for worker in (0, 1, 2):
        rounds.apart(worker, starts=True)
    rounds.apart(0, starts=False)
    rounds.come(0, leaving=True)
    assert rounds.in_vain() == {}, "rank 12 is about to end the same call"


def test_who_has_died_in_another_call_is_not_waited_for() -> None:
    rounds, clock = at_rest(Quorum(2, 0.5), timeout=5.0)
    rounds.apart(0, starts=True)
    rounds.gone([0])
    clock.now = 9.0
    for worker in (1, 2):
        rounds.come(worker, leaving=True)
    assert rounds.in_vain() == {}
    assert rounds.members() == [1, 2]


def test_who_comes_to_rounds_again_is_in_no_other_call() -> None:
    rounds, _ = at_rest(Quorum(2, 0.5))
    rounds.apart(1, starts=True)
    rounds.stay_out(1, starts=False)
    rounds.come(0, leaving=True)
    assert rounds.in_vain() == {}


def test_who_ends_without_finalize_is_not_waited_for() -> None:
    rounds, clock = at_rest(Quorum(2, 0.5))
    rounds.stay_out(2, starts=True)
    rounds.come(0)
    clock.now = 9.0
    assert rounds.members() is None, "q is 2, and worker 1 trains"
    rounds.come(1)
    assert rounds.members() == [0, 1]
    rounds.close([0, 1])
    for worker in (0, 1):
        rounds.come(worker, leaving=True)
    assert rounds.members() == [0, 1]


def test_who_comes_counts_again() -> None:
    rounds, clock = at_rest(Quorum(2, 0.5))
    rounds.stay_out(2, starts=True)
    rounds.come(2)
    clock.now = 9.0
    assert rounds.members() is None
    rounds.come(0)
    clock.now = 18.0
    assert rounds.members() == [0, 2]


def test_a_grace_may_be_longer_than_the_timeout() -> None:
    rounds, clock = at_rest(Quorum(2, grace=10.0), timeout=5.0)
    for worker in (0, 1):
        rounds.come(worker)
    clock.now = 8.0
    assert rounds.members() is None
    clock.now = 11.5
    assert (rounds.members(), rounds.failure) == ([0, 1], None)


def test_time_in_which_the_root_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it goes on, it has to receive what others have sent meanwhile; other time counts, whoever comes."""
    now = 0.0
    monkeypatch.setattr(rounds_module, "time", SimpleNamespace(monotonic=lambda: now))
    rounds = Rounds([10, 11, 12], Quorum(2, 0.5), lambda: 5.0)
    for worker in range(3):
        rounds.come(worker)
    rounds.close([0, 1, 2])
    for _ in range(40):
        now += 0.5
        assert rounds.members() is None
    rounds.come(0)
    now += 1000.0
    assert rounds.members() is None
    assert rounds.failure is None
    rounds.come(1)
    assert rounds.members() is None, "the grace begins"
    now += 0.6
    assert rounds.members() == [0, 1]
    rounds.close([0, 1])
    rounds.come(2)
    for _ in range(10):
        now += 0.6
        assert rounds.members() is None
    assert "rank 12 waited for ranks 10 and 11 longer than timeout_seconds=5" in str(rounds.failure)


def test_time_before_which_one_who_decides_was_stopped_does_not_count() -> None:
    """In shared memory, others decide meanwhile; if all were stopped, nobody is late or given up."""
    rounds, clock = at_rest(Quorum(2, 0.5), timeout=5.0)
    for worker in (0, 1):
        rounds.come(worker)
    clock.now = rounds.awake_since = 1000.0
    assert rounds.members() is None
    clock.now = 1000.4
    assert rounds.members() is None
    clock.now = 1000.6
    assert rounds.members() == [0, 1]
    rounds.close([0, 1])
    rounds.come(2)
    clock.now = rounds.awake_since = 2000.0
    assert (rounds.members(), rounds.failure) == (None, None)
    clock.now = 2005.1
    assert (rounds.members(), rounds.failure is None) == (None, False)


def test_the_default_grace_is_of_time_in_which_nobody_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(rounds_module, "time", SimpleNamespace(monotonic=lambda: now))
    rounds = Rounds([10, 11, 12], Quorum(2))
    for worker in range(3):
        rounds.come(worker)
    rounds.close([0, 1, 2])
    for _ in range(40):
        now += 0.5
        assert rounds.members() is None
    rounds.come(0)
    rounds.come(1)
    now += 0.9
    assert rounds.members() is None
    now += 0.9
    assert rounds.members() is None
    now += 0.3
    assert rounds.members() == [0, 1], "a tenth of 20 seconds"


def test_after_the_timeout_who_trains_is_told_although_others_leave() -> None:
    rounds, clock = at_rest(Quorum(2), timeout=5.0)
    rounds.come(0, leaving=True)
    rounds.come(1)
    clock.now = 7.0
    assert rounds.members() is None
    assert "longer than timeout_seconds=5" in str(rounds.failure)
    assert rounds.given_up == []


def test_after_the_timeout_a_round_fails_and_those_who_leave_go_on() -> None:
    rounds, clock = at_rest(Quorum(2), timeout=60.0)
    rounds.come(0)
    clock.now = 61.1
    assert rounds.members() is None
    assert rounds.failure is not None
    assert "rank 10 waited for ranks 11 and 12 longer than timeout_seconds=60" in rounds.failure

    rounds, clock = at_rest(Quorum(2), timeout=60.0)
    rounds.come(0, leaving=True)
    rounds.come(2, leaving=True)
    clock.now = 60.5
    assert rounds.members() is None
    clock.now = 61.5
    assert rounds.members() == [0, 2]
    assert rounds.given_up == [1]
    rounds.come(1)
    assert rounds.failure == "Rank 11 came after the others had ended without it"


def test_the_first_round_waits_for_all_that_live() -> None:
    clock = Clock()
    rounds = Rounds([0, 1, 2], Quorum(1, 0.0), now=lambda: clock.now)
    rounds.come(0)
    clock.now = 1e6
    assert rounds.members() is None
    rounds.gone([2])
    rounds.come(1)
    assert rounds.members() == [0, 1]


def oracle(kind: str, sets: Sequence[Sequence[int]], weights: Sequence[float], power: float) -> list[float]:
    """Return c after every round, from the equations."""
    x, h, since = [0.0] * 3, [0.0] * 3, [0] * 3
    c, kept, centers = 0.0, 0.0, []
    pending = [True] * 3
    for number, members in enumerate(sets):
        for i in range(3):
            if pending[i]:
                for _ in range(PERIOD):
                    x[i] -= RATE * CURVATURE[i] * (x[i] - MINIMUM[i])
            pending[i] = i in members
        w = {i: weights[i] * (1 + number - since[i]) ** -power for i in members}
        g = sum(w[i] * (h[i] - x[i]) for i in members) / sum(w.values())
        if kind == "averaging":
            out = c = c - g
        elif kind == "slowmo":
            kept = 0.5 * kept + g / RATE
            out = c = c - 0.9 * RATE * kept
        else:  # BMUF: η = 1 − 1/3.
            kept = 2 / 3 * kept - 0.9 * g
            c += kept
            out = c + 2 / 3 * kept
        for i in members:
            x[i] = h[i] = out
            since[i] = number + 1
        centers.append(c)
    return centers


LONG = [[0, 1, 2], [0, 2], [0, 2], [1, 2], [0, 1], [1, 0, 2], [0, 1]]


@pytest.mark.parametrize("power", [0.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "algorithm"), [("averaging", Averaging()), ("slowmo", SlowMo(0.5, 0.9)), ("bmuf", BMUF(None, 0.9))]
)
def test_long_absence_weights_and_staleness(kind: str, algorithm: Algorithm, power: float) -> None:
    weights = (1.0, 3.0, 0.5)

    def work(communicator: Communicator) -> list[float]:
        weight = weights[communicator.rank]
        trainer = Trainer(communicator, algorithm, quorum=2, weight=weight, staleness_power=power)
        return trainer.centers_after(LONG)

    expected = oracle(kind, LONG, weights, power)
    for centers in run_ranks(3, work):
        assert centers == pytest.approx(expected, rel=1e-12)


EVERY: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "averaging": (Averaging(), {}),
    "diloco": (DiLoCo(), {}),
    "slowmo": (SlowMo(), {}),
    "bmuf": (BMUF(), {}),
    "easgd": (EASGD(rho=0.1), {}),
    "agn": (AGN(), {"outer_optimizer": SGD(0.1, 0.9)}),
    "agn, average": (AGN("average"), {"outer_optimizer": SGD(0.1, 0.9)}),
    "by work": (Averaging(), {"weight": "steps"}),
}

COMPRESSED: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "top-k": (DiLoCo(), {"compression": Compression.topk(0.3)}),
    "easgd, int8": (EASGD(rho=0.1), {"compression": Compression.int8}),
}


def arrays() -> dict[str, Any]:
    return {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.full(4, np.float32(0.3)), "none": np.zeros((0, 2))}


def made(
    communicator: Communicator, name: str, xs: dict[str, Any], period: int = PERIOD, **options: Any
) -> PeriodicOptimizer:
    algorithm, more = (EVERY | COMPRESSED)[name]
    optimizer = PeriodicOptimizer(SGD(0.1, 0.5), xs, algorithm, period, process_set=communicator, **options, **more)
    optimizer.synchronizer.begin()
    return optimizer


def step(optimizer: PeriodicOptimizer, xs: dict[str, Any], rank: int) -> None:
    optimizer.step([np.sin(x + rank + place) for place, x in enumerate(xs.values())])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", EVERY)
def test_rounds_of_all_are_synchronous_to_the_bit(name: str) -> None:
    def work(communicator: Communicator, **options: Any) -> list[Any]:
        xs, seen = arrays(), []
        optimizer = made(communicator, name, xs, **options)
        if options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 5)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(4 * PERIOD + 1):
            step(optimizer, xs, communicator.rank)
            seen += [x.copy() for x in xs.values()]
            if number % PERIOD == 1:
                with optimizer.center():
                    seen += [x.copy() for x in xs.values()]
        optimizer.finalize()
        return [*seen, *xs.values()]

    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_quorum_of_all_is_the_synchronous_exchange() -> None:
    def work(communicator: Communicator) -> type:
        return type(made(communicator, "diloco", arrays(), quorum=3, grace_seconds=1).synchronizer.exchanger)

    assert run_ranks(3, work) == [Synchronous] * 3


@pytest.mark.usefixtures("way")
def test_elastic_averaging_conserves_the_sum() -> None:
    """Whoever takes part: what moves the replicas between rounds is all that the sum changes by."""

    def work(communicator: Communicator) -> Any:
        x, rank = np.full(5, 1.0 + communicator.rank), communicator.rank
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, EASGD(0.25), 1, process_set=communicator, quorum=1)
        synchronizer, moved = optimizer.synchronizer, 0.0
        synchronizer.begin()
        synchronizer.exchanger.replay(LONG)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        for number, members in enumerate(LONG):
            if rank in members:
                moved -= 0.1 * rank + number
                optimizer.step([np.full(5, 0.1 * rank + number)])
        communicator.allgather_object(None, "done")
        return x, moved, synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"]

    results = run_ranks(3, work)
    total = sum(x for x, _, _ in results) + results[0][2]
    np.testing.assert_allclose(total - sum(moved for _, moved, _ in results), 4.0, rtol=1e-13)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", EVERY | COMPRESSED)
def test_all_leave_with_the_same_center(name: str) -> None:
    """After different numbers of steps: one that has left long before takes part in the last round with what it had."""

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, name, xs, quorum=2, grace_seconds=0.0)
        for _ in range(3 + 4 * communicator.rank):
            step(optimizer, xs, communicator.rank)
        optimizer.finalize()
        replica = [x.copy() for x in xs.values()]
        with optimizer.center():
            center = [x.copy() for x in xs.values()]
        before = optimizer.synchronizer.counters
        optimizer.finalize()  # Nobody has a step since: nothing moves.
        assert optimizer.synchronizer.rounds == before.rounds
        with optimizer.center():
            again = [x.copy() for x in xs.values()]
        return replica, center, again

    results = run_ranks(3, work)
    for replica, center, again in results:
        for here, later, there in zip(center, again, results[0][1], strict=True):
            np.testing.assert_array_equal(here, there)
            np.testing.assert_array_equal(later, there)
        for x, c in zip(replica, center, strict=True):
            assert name.startswith(("easgd", "bmuf")) or (x == c).all()


@pytest.mark.usefixtures("way")
def test_a_slow_rank_joins_the_rounds_of_others_with_all_it_has(tmp_path: Path) -> None:
    """Sets are what the run logs say, and replaying them leads to the same bits."""
    ahead = threading.Event(), threading.Event()

    def work(communicator: Communicator, slow: bool, sets: Sequence[Sequence[int]] = ()) -> Any:
        xs, rank = arrays(), communicator.rank
        options = {"run_log": tmp_path / "log"} if slow else {}
        optimizer = made(communicator, "diloco", xs, quorum=2, grace_seconds=0.0, staleness_power=0.3, **options)
        if sets:
            optimizer.synchronizer.exchanger.replay(sets)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(3 * PERIOD if rank == 2 else 12 * PERIOD):
            if rank < 2 and number == 6 * PERIOD:
                ahead[rank].set()
            if slow and rank == 2 and number == PERIOD:
                assert all(event.wait(TIMEOUT_SECONDS) for event in ahead)
            step(optimizer, xs, rank)
        optimizer.finalize()
        with optimizer.center():
            return [x.copy() for x in xs.values()], optimizer.synchronizer.counters

    timed = run_ranks(3, lambda communicator: work(communicator, slow=True))
    lines = [line for rank in read_run_log(tmp_path / "log").values() for line in rank if line["event"] == "exchanged"]
    members = {line["number"]: line["members"] for line in lines}
    sets = [members[number] for number in range(1, len(members) + 1)]
    assert sets[0] == [0, 1, 2]
    assert [0, 1] in sets
    for number, members_of_round in members.items():
        assert sum(line["number"] == number for line in lines) == len(members_of_round)
    assert timed[0][1].pushes_missed + timed[1][1].pushes_missed < timed[2][1].pushes_missed
    again = run_ranks(3, lambda communicator: work(communicator, slow=False, sets=sets))
    for (here, _), (there, _) in zip(timed, again, strict=True):
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("way")
def test_a_rank_that_cannot_go_on_ends_all() -> None:
    def work(communicator: Communicator) -> None:
        xs = arrays()
        optimizer = made(communicator, "diloco", xs, quorum=2)
        step(optimizer, xs, communicator.rank)
        if communicator.rank == 1:
            xs["w"][0, 1] = np.nan
        step(optimizer, xs, communicator.rank)

    texts = [text for kind, text in errors(3, work) if kind is RuntimeError]
    assert "parameter 'w' is not finite at step 2" in texts[1]
    for other in (0, 2):
        assert texts[other].startswith("Rank 1 cannot go on: parameter 'w' is not finite at step 2")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("text", "start"), [("θ", "θ"), ("ü" * 900, "ü" * 400), ("x" + "ü" * 900, "xü"), ("\udcff.txt", "?.txt")]
)
def test_the_others_read_texts_that_are_not_ascii(text: str, start: str) -> None:
    """Also those that are cut in the middle of a character, and names of files that are not UTF-8."""

    def work(communicator: Communicator) -> None:
        xs = arrays()
        optimizer = made(communicator, "diloco", xs, quorum=2)
        exchanger: Any = optimizer.synchronizer.exchanger
        if communicator.rank == 1:
            exchanger.tell_failure(OSError(text))
            raise OSError(text)
        for _ in range(PERIOD):
            step(optimizer, xs, communicator.rank)

    texts = [told for _, told in errors(3, work)]
    for other in (0, 2):
        assert texts[other].startswith(f"Rank 1 cannot go on: {start}")
        assert set(texts[other]) <= {*"Rank 1 cannot go on: ?", *text}


@pytest.mark.usefixtures("way")
def test_saves_do_not_wait_for_rounds() -> None:
    """Two save while the third, which saves later, is in a round with a quorum of three, cut to itself."""

    def work(communicator: Communicator) -> Any:
        xs, rank = arrays(), communicator.rank
        optimizer = made(communicator, "averaging", xs, quorum=2)
        for _ in range(PERIOD):
            step(optimizer, xs, rank)
        if rank == 2:
            for _ in range(PERIOD):
                step(optimizer, xs, rank)
        optimizer.synchronizer.handshake.meet(Purpose.SAVE)
        return optimizer.synchronizer.counters.rounds

    assert run_ranks(3, work) == [1, 1, 2]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [{"quorum": 2}, {"asynchronous": True}], ids=str)
def test_a_resumed_optimizer_of_the_center_has_the_settings_of_the_root_on_all_ranks(kind: dict[str, Any]) -> None:
    """Any of them may step the center in shared memory."""

    def started(communicator: Communicator, xs: dict[str, Any]) -> PeriodicOptimizer:
        options: dict[str, Any] = {"process_set": communicator, "outer_optimizer": SGD(0.1, 0.9)} | kind
        return PeriodicOptimizer(SGD(0.1), xs, AGN(), PERIOD, **options)

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = started(communicator, xs)
        for _ in range(PERIOD):
            step(optimizer, xs, communicator.rank)
        communicator.allgather_object(None, "at rest")
        state = optimizer.synchronizer.state_dict()
        state["center_optimizer"]["learning_rate"] = 0.01
        communicator.allgather_object(None, "saved")
        resumed = started(communicator, xs)
        if communicator.rank != 2:
            resumed.synchronizer.load_state_dict(state)
        resumed.synchronizer.begin()
        return resumed.synchronizer.exchanged.center_optimizer.hyperparameters()["learning_rate"]

    assert run_ranks(3, work) == [0.01] * 3


class Hides(SGD):
    """It keeps a number in a dictionary."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.kept = {"steps": 0}

    def step(self, arrays: Any, gradients: Any) -> None:
        self.kept["steps"] += 1
        super().step(arrays, gradients)


@pytest.mark.parametrize("kind", [{"quorum": 2}, {"asynchronous": True}], ids=str)
def test_state_that_ranks_cannot_share_is_refused(kind: dict[str, Any]) -> None:
    def work(communicator: Communicator) -> None:
        options: dict[str, Any] = {"process_set": communicator, "outer_optimizer": Hides()} | kind
        PeriodicOptimizer(SGD(0.1), arrays(), AGN(), PERIOD, **options)

    with pytest.raises(ValueError, match="Hides changes its attribute 'kept' when it steps, but processes can share"):
        run_ranks(3, work)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", EVERY | COMPRESSED)
def test_a_set_that_was_saved_at_rest_resumes_exactly(name: str) -> None:
    """With a rank that was not in the last rounds, and with steps since the last round."""
    first, rest = [[0, 1, 2], [0, 1], [0, 1]], [[1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]

    def go_on(communicator: Communicator, optimizer: PeriodicOptimizer, xs: dict[str, Any]) -> list[Any]:
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay(rest)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        seen = []
        for members in rest:
            while communicator.rank in members:
                before = optimizer.synchronizer.counters.last_exchange
                step(optimizer, xs, communicator.rank)
                if optimizer.synchronizer.counters.last_exchange > before:
                    break
            communicator.allgather_object(None, "closed")
            seen += [x.copy() for x in xs.values()]
            with optimizer.center():
                seen += [x.copy() for x in xs.values()]
            communicator.allgather_object(None, "seen")
        return seen

    def work(communicator: Communicator) -> None:
        xs, rank = arrays(), communicator.rank
        power = {} if name.startswith("easgd") or name == "agn" else {"staleness_power": 0.5}
        optimizer = made(communicator, name, xs, quorum=2, **power)
        optimizer.synchronizer.exchanger.replay(first)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        for members in first:
            for _ in range(PERIOD if rank in members else 0):
                step(optimizer, xs, rank)
        step(optimizer, xs, rank)
        communicator.allgather_object(None, "at rest")
        state, model = optimizer.synchronizer.state_dict(), {key: x.copy() for key, x in xs.items()}
        velocities = copy.deepcopy(optimizer.inner.velocities)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "saved")
        expected = go_on(communicator, optimizer, xs)

        xs = arrays()
        algorithm, more = (EVERY | COMPRESSED)[name]
        resumed = PeriodicOptimizer(
            SGD(0.1, 0.5), xs, algorithm, PERIOD, process_set=communicator, quorum=2, **power, **more
        )
        resumed.synchronizer.load_state_dict(state)
        resumed.inner.velocities = velocities  # type: ignore[attr-defined]
        for key, x in xs.items():
            x[...] = model[key]
        for here, there in zip(go_on(communicator, resumed, xs), expected, strict=True):
            np.testing.assert_array_equal(here, there)

    run_ranks(3, work)


def refusal(size: int, algorithm: Algorithm, **options: Any) -> str:
    """Return the error with which construction ends on every rank, the same text on all."""

    def work(communicator: Communicator) -> None:
        period = options.get("period", PERIOD)
        more = {key: value for key, value in options.items() if key != "period"}
        PeriodicOptimizer(
            SGD(0.1), {"x": np.zeros((2, 2)), "y": np.zeros(2)}, algorithm, period, process_set=communicator, **more
        )

    found = errors(size, work)
    assert {kind for kind, _ in found} <= {ValueError, TypeError}
    (text,) = {text for _, text in found}
    return text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": 0}, "`quorum` must be an int >= 1. Received: 0"),
        ({"quorum": 4}, "`quorum` must be at most the number of ranks, n=3. Received: quorum=4"),
        ({"quorum": 2.0}, "`quorum` must be an int"),
        ({"quorum": True}, "`quorum` must be an int"),
        ({"quorum": 2, "grace_seconds": -1.0}, "`grace_seconds` must be"),
        ({"quorum": 2, "grace_seconds": float("nan")}, "`grace_seconds` must be"),
        ({"quorum": 2, "grace_seconds": "1"}, "`grace_seconds` must be"),
        (
            {"grace_seconds": 1.0},
            "`grace_seconds` is for rounds that do not wait for all ranks: pass `quorum`, or asynchronous=True",
        ),
        ({"quorum": 2, "asynchronous": True}, "`asynchronous` is not available with `quorum`"),
        ({"quorum": 2, "overlap": 1}, "`overlap` is not available with `quorum`"),
        ({"quorum": 2, "fragments": 2}, "`fragments` is not available with `quorum`"),
        ({"quorum": 2, "audit_every": 1}, "`audit_every` is not available with `quorum`"),
        ({"quorum": 2, "center": "sharded"}, "`center` is not available with `quorum`"),
        ({"quorum": 2, "parameters": lambda *_: "present"}, "`parameters` is not available with `quorum`"),
        (
            {"quorum": 2, "parameters": lambda name, _: "rows" if name == "x" else None},
            "`parameters` is not available with `quorum`",
        ),
        (
            {"quorum": 2, "parameters": lambda name, _: "broadcast" if name == "y" else None},
            "parameters='broadcast' is for synchronous exchange",
        ),
        ({"quorum": 2, "optimizer_state": "reset"}, "`optimizer_state` must be 'local' with a quorum"),
        ({"quorum": 2, "period": PostLocal(2, 3, quiet=True)}, "`quorum` cannot begin with a phase"),
        ({"quorum": 2, "center_file": "center"}, "`center_file` is for asynchronous exchange"),
        ({"staleness_power": 0.5}, "`staleness_power` is for asynchronous exchange and for rounds with a quorum"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_go_with_a_quorum_is_refused_on_all_ranks(options: dict[str, Any], text: str) -> None:
    assert text in refusal(3, Averaging(), **options)


@pytest.mark.parametrize("algorithm", [EASGD(), AGN()], ids=lambda each: type(each).__name__)
def test_there_is_no_discount_where_no_mean_is_taken(algorithm: Algorithm) -> None:
    text = refusal(3, algorithm, quorum=2, staleness_power=0.5)
    assert "`staleness_power` is for algorithms that take the mean over ranks" in text


@pytest.mark.parametrize(
    ("algorithm", "size", "least"),
    [
        (Averaging(), 2, 1),
        (Averaging(), 5, 3),
        (DiLoCo(outer_momentum=0.0), 4, 2),
        (DiLoCo(), 4, 3),
        (SlowMo(), 2, 2),
        (BMUF(), 4, 3),
        (AGN("average"), 4, 3),
        (EASGD(), 4, 1),
        (AGN(), 4, 1),
    ],
    ids=str,
)
def test_a_small_quorum_of_a_mean_is_refused(algorithm: Algorithm, size: int, least: int) -> None:
    """Below half; with momentum also half; below two thirds there is a warning."""

    def work(communicator: Communicator) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PeriodicOptimizer(SGD(0.1), {"x": np.zeros(2)}, algorithm, PERIOD, process_set=communicator, quorum=least)
            return [str(each.message) for each in caught]

    assert all(not isinstance(found, Exception) for found in outcomes(size, work))
    if least > 1:
        text = refusal(size, algorithm, quorum=least - 1)
        assert "of the ranks where the center moves by a mean" in text
        assert f"use asynchronous=True. Received: quorum={least - 1} of n={size} ranks" in text


def test_a_quorum_below_two_thirds_is_warned_of() -> None:
    for size, quorum, expected in ((5, 3, True), (3, 2, False), (4, 3, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranks: Any = SimpleNamespace(size=size, elastic=False)
            ranks.handshake_group = ranks
            as_quorum(quorum, None, Averaging(), ranks, outer=False)
        assert [f"is less than two thirds of n={size} ranks" in str(each.message) for each in caught] == [
            True
        ] * expected


@pytest.mark.usefixtures("way")
def test_slowmo_takes_the_learning_rate_of_the_root_or_of_the_lowest_rank_in_the_round() -> None:
    """The root is rank 1; learning rates differ between ranks, and every period moves rank i by −(i + 1)."""
    rates, sets = (0.1, 0.2, 0.4), [[0, 1, 2], [0, 2], [1, 2], [0, 1]]

    def work(communicator: Communicator) -> list[float]:
        x, rank = np.zeros(1), communicator.rank
        local = SGD(1.0)  # Equal at first, as it has to be; then a scheduler of each rank sets it.
        options: dict[str, Any] = {"root_rank": 1, "quorum": 2, "process_set": communicator}
        optimizer = PeriodicOptimizer(local, {"x": x}, SlowMo(0.5, 0.9), 1, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay(sets)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        local.learning_rate, centers = rates[rank], []
        for members in sets:
            if rank in members:
                optimizer.step([np.array([(rank + 1) / rates[rank]])])
            communicator.allgather_object(None, "closed")
            centers.append(float(optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"][0]))
            communicator.allgather_object(None, "seen")
        return centers

    c, u, expected = 0.0, 0.0, []
    for members, rate in zip(sets, (0.2, 0.1, 0.2, 0.2), strict=True):
        u = 0.5 * u + np.mean([rank + 1 for rank in members]) / rate
        c -= 0.9 * rate * u
        expected.append(c)
    for centers in run_ranks(3, work):
        assert centers == pytest.approx(expected, rel=1e-12)
