"""A rendezvous that ends or stops while its job trains, and a worker that does not belong to the job."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import PATIENCE
from tests.parallel.rendezvous_job import Job, rendezvous_server
from tests.parallel.rendezvous_scenarios import DOWN
from tests.parallel.test_rendezvous import go_on_without

pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

SECONDS = 100
"""Within which a job ends."""

ENDS, STOPS, STOPS_FOR_A_WHILE = DOWN
"""The names of the jobs, by what their rendezvous does."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Job]]:
    """Return a function that returns a job when it is over, and runs it at the first call."""
    found: dict[str, Job] = {}

    def job(name: str) -> Job:
        if name not in found:
            found[name] = Job(name, tmp_path_factory.mktemp("down"), "")
            play(found[name])
        return found[name]

    yield job
    for each in found.values():
        each.stop()


def play(job: Job) -> None:
    """Run two workers; end or stop the rendezvous, in one job after a worker with another secret has come; kill one.

    One that stops for a while goes on when the worker has been killed.
    """
    deadline = time.monotonic() + PATIENCE * SECONDS

    def wait(done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < deadline:
            time.sleep(0.1)

    with rendezvous_server() as (job.rendezvous, server):
        job.start()
        job.start()
        wait(lambda: (job.folder / "victim").exists())
        if job.name == ENDS:
            job.start(HVD_PERIODIC_SECRET="of another job")
            wait(lambda: job.processes[-1].poll() is not None)
        os.kill(server.pid, signal.SIGKILL if job.name == ENDS else signal.SIGSTOP)
        (job.folder / "down").touch()
        wait(lambda: any(process.poll() is not None for process in job.processes[:2]))
        if job.name == STOPS_FOR_A_WHILE:
            os.kill(server.pid, signal.SIGCONT)
        wait(lambda: all(process.poll() is not None for process in job.processes))


def test_a_worker_with_another_secret_ends_and_the_others_train_on(jobs: Callable[[str], Job]) -> None:
    job = jobs(ENDS)
    text = (job.folder / "output.2").read_text()
    assert job.processes[2].poll() == 1, text
    assert "has another secret than this worker: set the same HVD_PERIODIC_SECRET" in text
    began, workers = job.stretches()[-1]
    assert began < job.scenario.step, job.output()
    assert len(workers) == job.scenario.workers


@pytest.mark.parametrize(("name", "why"), [(ENDS, ""), (STOPS, "It has not answered for 15 s")])
def test_without_a_rendezvous_training_goes_on_until_a_worker_is_lost(
    jobs: Callable[[str], Job], name: str, why: str
) -> None:
    """Exchanges do not need it, and it knows what happens to the workers."""
    job = jobs(name)
    codes = [process.poll() for process in job.processes[:2]]
    assert sorted(codes, key=str) == [-signal.SIGKILL, 1], job.output()
    text = (job.folder / f"output.{codes.index(1)}").read_text()
    assert re.search(f"cannot be reached, without which no rank can join or be lost: .*{why}", text)
    assert int((job.folder / "reached").read_text()) > job.scenario.step + 4, "It has exchanged in between"


def test_a_rendezvous_that_stops_for_a_while_is_waited_for(jobs: Callable[[str], Job]) -> None:
    """A worker is killed meanwhile, and the other one goes on when the rendezvous does."""
    go_on_without(jobs(STOPS_FOR_A_WHILE))
