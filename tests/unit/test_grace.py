"""Asynchronous workers that wait for each other's pushes within a grace, and take the center together."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.asynchronous.ledger import Ledger
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.sockets import OverSockets

FOREVER = 1e6
"""Seconds; a group then ends when all workers are in it."""


def trained(
    communicator: Communicator,
    algorithm: Algorithm,
    place: str = "window",
    steps: int = 12,
    together: bool = False,
    **options: Any,
) -> tuple[list[np.ndarray], Any]:
    """Return the replica after every step and at the end, and the counters; with different gradients on each worker."""
    if place != "window":
        communicator = OverSockets(cast(ThreadCommunicator, communicator))
        options |= {"center": place}
    x, y = np.linspace(-1, 1, 5), np.full((2, 3), 0.1)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x, "y": y}, algorithm, 3, process_set=communicator, **options)
    seen = []
    for number in range(steps):
        optimizer.step([np.sin(x + communicator.rank), np.cos(y * (number + 2 + communicator.rank))])
        seen += [x.copy(), y.copy()]
        if together:  # Nobody pushes again before all have taken the center.
            communicator.allgather_object(None, "stepped")
    optimizer.synchronizer.finalize()
    return [*seen, x, y], optimizer.synchronizer.counters


def test_a_ledger_has_one_group_at_a_time() -> None:
    """Three workers, a grace of 2 s: two at 10 and 11, closed at 12; three at 12, 13 and 13.5; one at 13.6."""
    ledger = Ledger(1, np.zeros(Ledger.size(1, 3), np.int64))
    assert ledger.gather(0, 10.0, 2.0) == (1, 2.0)
    assert ledger.gather(0, 11.0, 2.0) == (1, 1.0)
    assert ledger.gather(1, 11.5, 2.0) == (1, 0.5)
    assert ledger.gather(1, 12.0, 2.0) == (1, 0.0)
    assert ledger.gather(0, 12.0, 2.0) == (2, 2.0)
    assert ledger.gather(1, 12.5, 2.0) == (1, 0.0), "the others may see it later"
    assert ledger.gather(0, 13.0, 2.0) == (2, 1.0)
    assert ledger.gather(0, 13.5, 2.0) == (2, 0.0), "all are in it"
    assert ledger.gather(2, 13.5, 2.0) == (2, 0.0)
    assert ledger.gather(0, 13.6, 2.0) == (3, 2.0)
    assert "group" not in ledger.save()


@pytest.mark.parametrize(
    ("algorithm", "place"),
    covering(
        [Averaging(), DiLoCo(), DiLoCo(0.3, 0.6, nesterov=False), SlowMo(0.5, 0.9), BMUF(0.3)],
        ["window", "root", "sharded"],
        together=1,
    ),
    ids=str,
)
def test_a_group_of_all_workers_is_a_synchronous_round(algorithm: Algorithm, place: str) -> None:
    """Nobody in it is discounted."""
    options: dict[str, Any] = {"asynchronous": True, "grace_seconds": FOREVER, "staleness_power": 0.5, "together": True}
    found = run_ranks(3, lambda communicator: trained(communicator, algorithm, place, **options))
    expected = run_ranks(3, lambda communicator: trained(communicator, algorithm))
    for (here, counters), (there, _) in zip(found, expected, strict=True):
        assert counters.rounds == 4
        assert counters.staleness_max <= 2, "the others of the same group"
        for one, other in zip(here, there, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", ["window", "root"])
def test_nobody_waits_longer_than_the_grace(place: str) -> None:
    """The last worker ends early; the groups of the others end without it, and all leave with one center."""

    def work(communicator: Communicator) -> Any:
        steps = 3 if communicator.rank == 2 else 12
        return trained(communicator, DiLoCo(), place, steps, asynchronous=True, grace_seconds=0.01)

    found = run_ranks(3, work)
    assert [counters.rounds for _, counters in found] == [4, 4, 1]
    for seen, _ in found:
        np.testing.assert_array_equal(seen[-2], found[0][0][-2])


def test_one_worker_is_synchronous_to_the_bit() -> None:
    options: dict[str, Any] = {"asynchronous": True, "grace_seconds": FOREVER}
    for algorithm in (Averaging(), DiLoCo(), SlowMo(0.5, 0.9), BMUF(0.3)):
        ((here, _),) = run_ranks(1, lambda c, kind=algorithm: trained(c, kind, **options))
        ((there, _),) = run_ranks(1, lambda c, kind=algorithm: trained(c, kind))
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("algorithm", "grace", "text"),
    [
        (EASGD(), 1.0, "`grace_seconds` is, with asynchronous=True, for averaging, DiLoCo, SlowMo and BMUF"),
        (AGN(), 1, "`grace_seconds` is, with asynchronous=True, for averaging, DiLoCo, SlowMo and BMUF"),
        (DiLoCo(), -1.0, "`grace_seconds` must be"),
        (DiLoCo(), float("nan"), "`grace_seconds` must be"),
        (DiLoCo(), "1", "`grace_seconds` must be"),
    ],
)
def test_what_is_refused(algorithm: Algorithm, grace: Any, text: str) -> None:
    found = errors(2, lambda c: trained(c, algorithm, asynchronous=True, grace_seconds=grace))
    assert all(text in each for _, each in found), found


def test_workers_agree_on_it() -> None:
    found = errors(2, lambda c: trained(c, DiLoCo(), asynchronous=True, grace_seconds=1.0 + c.rank))
    assert all("grace_seconds" in text for _, text in found), found
