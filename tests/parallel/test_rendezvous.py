"""Elastic jobs over torch.distributed: workers are killed, stopped and started; against the equations.

All jobs meet at one rendezvous, at the same time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import expected
from tests.parallel.launch import ROOT, environment, python
from tests.parallel.rendezvous_scenarios import SCENARIOS, Scenario
from tests.parallel.test_elastic_state import _stretches

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

SECONDS = 100
"""Within which all jobs end."""


class Job:
    """The processes of a scenario.

    Args:
        name: of the scenario.
        folder: for its files.
        rendezvous: host and port.
    """

    def __init__(self, name: str, folder: Path, rendezvous: str) -> None:
        self.name, self.folder, self._rendezvous = name, folder, rendezvous
        self.scenario = SCENARIOS[name]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._followed = False

    def start(self) -> None:
        """Start one more worker."""
        number = len(self.processes)
        settings = {
            "HVD_PERIODIC_RENDEZVOUS": self._rendezvous,
            "HVD_PERIODIC_JOB": self.name,
            "HVD_PERIODIC_RANKS": f"2:{self.scenario.workers}",
            "HVD_PERIODIC_LOST_SECONDS": "15",
            "HVD_PERIODIC_JOIN_SECONDS": f"{60 * PATIENCE}",
        }
        with (self.folder / f"output.{number}").open("wb") as output:
            process = subprocess.Popen(
                [
                    *python("torch alone"),
                    "-m",
                    "tests.parallel.rendezvous_program",
                    self.name,
                    str(self.folder),
                    str(number),
                ],
                env=environment() | settings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)

    def is_over(self) -> bool:
        """Return whether all have ended; once the others have gone on, start another, or wake the stopped one."""
        if not self._followed and (self.folder / "wait.0").exists():
            self._followed = True
            if self.scenario.what == "stop":
                os.kill(int((self.folder / "victim").read_text()), signal.SIGCONT)
            else:
                self.start()
        return all(process.poll() is not None for process in self.processes)

    def output(self) -> str:
        """Return what the workers have printed."""
        files = sorted(self.folder.glob("output.*"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Run all scenarios at once."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hvd_periodic", "rendezvous", "--port", "0"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    found = {}
    try:
        port = server.stdout.readline().strip().rpartition(":")[2]
        for name in SCENARIOS:
            found[name] = Job(name, tmp_path_factory.mktemp("job"), f"127.0.0.1:{port}")
            for _ in range(SCENARIOS[name].workers):
                found[name].start()
        deadline = time.monotonic() + PATIENCE * SECONDS
        while sum(not job.is_over() for job in found.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield found
    finally:
        for process in [server, *(process for job in found.values() for process in job.processes)]:
            process.kill()
            process.wait()
        server.stdout.close()


def check(job: Job) -> list[list[int]]:
    """Compare what workers have with the equations; return the processes of each stretch of training."""
    scenario: Scenario = job.scenario
    codes = [process.poll() for process in job.processes]
    stretches = _stretches(job.folder / "begun")
    center, workers = expected(scenario.algorithm, stretches)
    assert len(workers) == scenario.workers, job.output()
    assert sorted(codes, key=str) == sorted([0] * scenario.workers + [-9] * (scenario.what == "kill"), key=str)
    for rank, (process, worker) in enumerate(workers.items()):
        end = json.loads((job.folder / f"end.{rank}.json").read_text())
        assert (end["pid"], end["steps"], end["batch"]) == (process, scenario.steps, scenario.steps), job.output()
        np.testing.assert_allclose(end["center"], center, rtol=0, atol=1e-12)
        np.testing.assert_allclose(end["x"], worker.x, rtol=0, atol=1e-12)
    return [processes for _, processes in stretches]


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.what == "kill"])
def test_a_killed_worker_is_replaced(jobs: dict[str, Job], name: str) -> None:
    """The others go on in the same processes, and a process that starts later takes the center."""
    stretches = check(jobs[name])
    victim = int((jobs[name].folder / "victim").read_text())
    at = max(number for number, processes in enumerate(stretches) if victim in processes)
    others = set(stretches[at]) - {victim}
    assert set(stretches[at + 1]) == others
    assert others < set(stretches[-1])
    assert len(set(stretches[-1]) - set().union(*stretches[: at + 2])) == 1


def test_a_stopped_worker_is_excluded(jobs: dict[str, Job]) -> None:
    """When it wakes up, it joins as a new one, and nothing of what it had counts."""
    job = jobs["stopped, and joins again"]
    stretches = check(job)
    victim = int((job.folder / "victim").read_text())
    assert victim in stretches[-1]
    without = [processes for processes in stretches if victim not in processes]
    assert set(stretches[-1]) - {victim} in [set(processes) for processes in without]
    assert "The other ranks have gone on without this process, which joins as a new one" in job.output()
