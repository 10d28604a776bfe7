"""Random events in elastic jobs over torch.distributed: workers are killed, stopped, ended and started.

Which events happen is a matter of the seed, and when they do of the machine: what comes of them has to be what the
equations say for whoever took part in each stretch of training, whatever that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.parallel.rendezvous_events import SIGNALS, EventfulJob, play
from tests.parallel.rendezvous_scenarios import EVENTS, UNDISTURBED

pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

OF_A_JOB = -(-100 // len(EVENTS))
"""Events in each job, of 100 in all."""

SEED = 0

AS_GOOD = 0.02
"""Fraction of test images in which an undisturbed run may be better."""


def test_there_is_a_job_for_each_pair_of_options() -> None:
    """Of those that go together: overlap and 8 bits need the center on every rank."""
    options = ("diloco", "easgd", "agn"), ("replicated", "root", "sharded"), (False, True), (False, True)
    possible = [case for case in product(*options) if case[1] == "replicated" or not (case[2] or case[3])]
    found = [(job.algorithm, job.center, job.overlap > 0, job.int8) for job in EVENTS.values() if not job.digits]
    assert pairs(found) == pairs(possible)


def pairs(cases: Sequence[tuple[Any, ...]]) -> set[Any]:
    """Return all pairs of values, each with its place."""
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventfulJob]:
    """Run all jobs at once."""
    return play({name: tmp_path_factory.mktemp("job") for name in EVENTS | UNDISTURBED}, OF_A_JOB, SEED)


@pytest.mark.parametrize("name", EVENTS)
def test_what_workers_have_after_random_events(jobs: dict[str, EventfulJob], name: str) -> None:
    """After every event and in the end, all have the center and the replicas that the equations say."""
    assert len(jobs[name].events) >= OF_A_JOB
    jobs[name].check()


def test_everything_has_happened(jobs: dict[str, EventfulJob]) -> None:
    assert {kind for job in jobs.values() for kind in job.events} == {*SIGNALS, "start"}


def test_digits_are_learned_as_if_nothing_had_happened(jobs: dict[str, EventfulJob]) -> None:
    [undisturbed] = UNDISTURBED
    jobs[undisturbed].check()
    accuracies = [jobs[name].end(0)["accuracy"] for name in ("digits", undisturbed)]
    assert accuracies[0] >= accuracies[1] - AS_GOOD, accuracies
