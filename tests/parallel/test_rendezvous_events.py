"""Random events happen to elastic jobs over torch.distributed; see ``rendezvous_events.py``.

A longer run: ``python -m tests.benchmarks.soak_elastic``.
"""

from __future__ import annotations

import pytest

from tests.parallel.rendezvous_events import EventfulJob, play
from tests.parallel.rendezvous_scenarios import EVENTS

pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

NUMBER = 14
"""Events in each job."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventfulJob]:
    """Run all jobs at once."""
    return play({name: tmp_path_factory.mktemp("job") for name in EVENTS}, NUMBER, seed=0)


@pytest.mark.parametrize("name", EVENTS)
def test_jobs_survive_random_events(jobs: dict[str, EventfulJob], name: str) -> None:
    """In the end, all workers have the replicas and the center of the equations, replayed with who took part when."""
    jobs[name].check()
