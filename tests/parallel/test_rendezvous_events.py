"""Random events in elastic jobs over torch.distributed: workers are killed, stopped, ended and started.

Which events happen is a matter of the seed, and when they do of the machine: what comes of them has to be what the
equations say for whoever took part in each stretch of training, whatever that was.
"""

from __future__ import annotations

import pytest

from tests.parallel.rendezvous_events import EventfulJob, play
from tests.parallel.rendezvous_scenarios import EVENTS

pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

OF_A_JOB = -(-100 // len(EVENTS))
"""Events in each job, of 100 in all."""

SEED = 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventfulJob]:
    """Run all jobs at once."""
    return play({name: tmp_path_factory.mktemp("job") for name in EVENTS}, OF_A_JOB, SEED)


@pytest.mark.parametrize("name", EVENTS)
def test_what_workers_have_after_random_events(jobs: dict[str, EventfulJob], name: str) -> None:
    """All have the center that the equations say, and their replicas; digits are learned as if nothing had happened."""
    assert len(jobs[name].happened) >= OF_A_JOB
    jobs[name].check()
