"""Elastic jobs over torch.distributed whose workers are islands of two ranks; against the equations of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import PERIOD, STEPS, expected
from tests.parallel.launch import ROOT, environment, python
from tests.parallel.rendezvous_job import OF_ISLANDS, RANKS, numbered, rendezvous, torchrun
from tests.parallel.rendezvous_scenarios import Scenario
from tests.parallel.tiers import thorough

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

SECONDS = 100
"""Within which a job ends."""

ISLANDS = 2
STEP, WAIT_STEP = 9, 13
"""Local steps before which it happens, and before which the other island waits until one waits to take part."""


SCENARIOS = {
    "sharded, as is its center, killed": Scenario("diloco", "sharded", workers=2, inside="fully_shard"),
    "replicated, under torchrun": Scenario("easgd", "sharded", workers=2, what="torchrun", inside="ddp"),
    "sharded, in flight, one rank stopped": Scenario("agn", workers=2, what="stop", inside="fully_shard", overlap=2),
    "replicated, killed in flight": Scenario(
        "diloco", workers=2, what="in flight", inside="ddp", overlap=2, commit="call"
    ),
    "replicated, on the root, one rank raises an error": Scenario(
        "diloco", "root", workers=2, what="raise", inside="ddp"
    ),
}
"""What happens to the last of two islands, which is the root."""


class Job:
    """The islands of a scenario."""

    def __init__(self, name: str, folder: Path, address: str) -> None:
        self.name, self.scenario, self.folder, self._address = name, SCENARIOS[name], folder, address
        self.processes: list[subprocess.Popen[bytes]] = []
        self._islands, self._followed = 0, False

    def start(self) -> None:
        """Start one more island."""
        number, self._islands = self._islands, self._islands + 1
        program = [*python("torch alone"), "-m", "tests.parallel.rendezvous_islands_program"]
        command = [*program, self.name, str(self.folder), str(number)]
        if self.scenario.what == "torchrun":
            self._run([*torchrun(restarts=1), *command])
        else:
            for position in range(RANKS):
                self._run([*command, str(position)])

    def _run(self, command: list[str]) -> None:
        settings = {
            "HVD_PERIODIC_RENDEZVOUS": self._address,
            "HVD_PERIODIC_JOB": self.name,
            "HVD_PERIODIC_RANKS": f"{ISLANDS - 1}:{ISLANDS}",
            "HVD_PERIODIC_LOST_SECONDS": "600",
            "HVD_PERIODIC_JOIN_SECONDS": f"{60 * PATIENCE}",
            **OF_ISLANDS,
        }
        with (self.folder / f"output.{len(self.processes)}").open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment() | settings,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def is_over(self) -> bool:
        """Return whether all have ended; once the others have gone on, start another island, or wake the stopped."""
        if not self._followed and (self.folder / "wait.0").exists():
            self._followed = True
            if self.scenario.what == "stop":
                os.kill(int((self.folder / f"pid.{RANKS - 1}").read_text()), signal.SIGCONT)
            elif self.scenario.what in ("kill", "in flight"):
                self.start()
        return all(process.poll() is not None for process in self.processes)

    def output(self) -> str:
        """Return what the ranks have printed."""
        files = sorted(self.folder.glob("output.*"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def stretches(self, position: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the step at which each stretch of training began, and the processes with a position, by island."""
        lines = [json.loads(line) for line in (self.folder / "begun").read_text().splitlines()]
        lines = sorted(
            (line for line in lines if line["position"] == position), key=lambda line: (line["round"], line["rank"])
        )
        found = []
        for _, group in groupby(lines, key=lambda line: line["round"]):
            stretch = list(group)
            if len(stretch) == stretch[0]["size"]:  # Else it had no exchange.
                found.append((stretch[0]["step"], [(line["pid"], line["forgotten"]) for line in stretch]))
        return found

    def end(self, island: int, position: int) -> dict[str, Any]:
        """Return what a rank had in the end."""
        rank = f"{island}.{position}" if position else island
        found: dict[str, Any] = json.loads((self.folder / f"end.{rank}.json").read_text())
        return found

    def stop(self) -> None:
        """End all processes that are left."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its ranks; so does what runs a rank.
        for process in self.processes:
            try:
                process.wait(10 * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module", params=[next(iter(SCENARIOS)), *map(thorough, list(SCENARIOS)[1:])])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run a scenario."""
    with rendezvous() as address:
        found = Job(request.param, tmp_path_factory.mktemp("islands"), address)
        try:
            for _ in range(ISLANDS):
                found.start()
            deadline = time.monotonic() + PATIENCE * SECONDS
            while not found.is_over() and time.monotonic() < deadline:
                time.sleep(0.1)
            yield found
        finally:
            found.stop()


def test_an_island_leaves_and_joins_as_one_worker(job: Job) -> None:
    """Its ranks start from the shards of the center, and the outer state, of the same positions in the other island."""
    what = job.scenario.what
    codes = sorted(process.poll() is not None and process.returncode for process in job.processes)
    killed = [-signal.SIGKILL] * RANKS if what in ("kill", "in flight") else []
    launched = ISLANDS * (1 if what == "torchrun" else RANKS)
    assert codes == [*killed, *[0] * launched], job.output()

    found = [job.stretches(position) for position in range(RANKS)]
    stretches = numbered(found[0])
    assert all(numbered(others) == stretches for others in found), job.output()
    *_, before, last = [len(islands) for _, islands in stretches]
    if what == "raise":
        assert (before, last) == (ISLANDS, ISLANDS - 1), job.output()
    else:
        assert last == ISLANDS, job.output()
        # torchrun may start an island again before the other one has gone on alone.
        assert before == ISLANDS - 1 or what == "torchrun", job.output()
        assert len({island for _, islands in stretches for island in islands}) == ISLANDS + 1

    center, workers = expected(job.scenario.algorithm, stretches, overlap=job.scenario.overlap)
    for island, worker in enumerate(workers.values()):
        for end in (job.end(island, position) for position in range(RANKS)):
            assert end["steps"] == STEPS
            assert end["center"] == job.end(0, 0)["center"]
            assert end["pid"] in [pid for of_position in found for pid, _ in of_position[-1][1]]
            np.testing.assert_allclose(end["center"], center, rtol=0, atol=1e-12)
            np.testing.assert_allclose(end["x"], worker.x, rtol=0, atol=1e-12)


def test_steps_of_an_exchange_in_flight_are_undone(job: Job) -> None:
    """All ranks of the other island had gone on from it, and return to the commit before it."""
    if job.scenario.what != "in flight":
        pytest.skip("No exchange was in flight")
    reached = [int((job.folder / f"reached.{position}").read_text()) for position in range(RANKS)]
    assert reached == [STEP] * RANKS
    *_, again, _ = [step for step, _ in job.stretches(0)]
    assert again == PERIOD * (STEP // PERIOD) - 1


def test_the_others_of_an_island_hear_of_an_error(job: Job) -> None:
    """They wait in collectives of DistributedDataParallel, and the process that has raised it lives on."""
    if job.scenario.what != "raise":
        pytest.skip("Nobody raised an error")
    raised = [json.loads((job.folder / f"raised.{position}").read_text()) for position in range(RANKS)]
    text = f"Rank {RANKS - 1} of this island has raised an error, so the island has left the job"
    heard = ["IslandRankError", f"{text}: UserError: of my own"]
    assert raised == [*[heard] * (RANKS - 1), ["UserError", "of my own"]], job.output()


def test_an_excluded_island_joins_as_a_new_one(job: Job) -> None:
    """One rank of it was stopped, and the other gave signs of life."""
    if job.scenario.what != "stop":
        pytest.skip("Nobody was stopped")
    assert "The other ranks have gone on without this process, which joins as a new one" in job.output()
