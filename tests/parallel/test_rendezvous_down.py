"""A rendezvous that ends while its job trains, and a worker that does not belong to the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import PATIENCE
from tests.parallel.rendezvous_job import Job, rendezvous
from tests.parallel.rendezvous_scenarios import DOWN

pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

SECONDS = 100
"""Within which the job ends."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run two workers; start a third one with another secret; end the rendezvous; then one of the two is killed."""
    [name] = DOWN
    folder, deadline = tmp_path_factory.mktemp("down"), time.monotonic() + PATIENCE * SECONDS

    def wait(done: Callable[[], bool]) -> None:
        while not done() and time.monotonic() < deadline:
            time.sleep(0.1)

    with rendezvous() as address:
        found = Job(name, folder, address)
        try:
            found.start()
            found.start()
            wait(lambda: (folder / "victim").exists())
            found.start(HVD_PERIODIC_SECRET="of another job")
            wait(lambda: found.processes[-1].poll() is not None)
        except BaseException:
            found.stop()
            raise
    try:
        (folder / "down").touch()
        wait(lambda: all(process.poll() is not None for process in found.processes))
        yield found
    finally:
        found.stop()


def test_a_worker_with_another_secret_ends_and_the_others_train_on(job: Job) -> None:
    text = (job.folder / "output.2").read_text()
    assert job.processes[2].poll() == 1, text
    assert "has another secret than this worker: set the same HVD_PERIODIC_SECRET" in text
    assert len(job.stretches()) == 1, job.output()


def test_without_a_rendezvous_training_goes_on_until_a_worker_is_lost(job: Job) -> None:
    """Exchanges do not need it, and it knows what happens to the workers."""
    codes = [process.poll() for process in job.processes[:2]]
    assert sorted(codes, key=str) == [-signal.SIGKILL, 1], job.output()
    text = (job.folder / f"output.{codes.index(1)}").read_text()
    assert "cannot be reached, without which no rank can join or be lost" in text
    assert int((job.folder / "reached").read_text()) > job.scenario.step + 4, "It has exchanged in between"
