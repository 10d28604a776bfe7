"""The processes of an elastic job over torch.distributed in the tests, and what has to come of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, environment, python
from tests.parallel.rendezvous_scenarios import (
    DOWN,
    EVENTS,
    ISLAND_EVENTS,
    KERAS,
    KERAS_COMPILED,
    SAVES,
    SCENARIOS,
    THOROUGH,
    UNDISTURBED,
)

JOBS = SCENARIOS | THOROUGH | DOWN | SAVES | KERAS | KERAS_COMPILED | EVENTS | UNDISTURBED | ISLAND_EVENTS

RANKS = 2
"""Of an island."""

OF_ISLANDS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In the environment: else ranks that torchrun starts again find former addresses."""


class Job:
    """The processes of a scenario.

    Args:
        name: of the scenario.
        folder: for its files.
        rendezvous: host and port.
        most: number of workers at most.
    """

    def __init__(self, name: str, folder: Path, rendezvous: str, most: int | None = None) -> None:
        self.name, self.folder, self.rendezvous = name, folder, rendezvous
        self.scenario = JOBS[name]
        self._most = most or self.scenario.workers
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **more: str) -> None:
        """Start one more worker, with more in its environment."""
        number = len(self.processes)
        settings = {
            "HVD_PERIODIC_RENDEZVOUS": self.rendezvous,
            "HVD_PERIODIC_JOB": self.name,
            "HVD_PERIODIC_RANKS": f"{self.scenario.wait_size}:{self._most}",
            "HVD_PERIODIC_LOST_SECONDS": f"{self.scenario.lost}",
            "HVD_PERIODIC_JOIN_SECONDS": f"{60 * PATIENCE}",
            **OF_ISLANDS,
            **more,
        }
        with (self.folder / f"output.{number}").open("wb") as output:
            process = subprocess.Popen(
                [*self._program(), self.name, str(self.folder), str(number)],
                env=environment() | settings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)

    def _program(self) -> list[str]:
        """Return the words of a command line that run a worker."""
        if self.scenario.loop:
            return [*python("tensorflow"), "-m", "tests.parallel.rendezvous_keras_program"]
        if self.scenario.inside:
            return [*torchrun(), *python("torch alone"), "-m", "tests.parallel.rendezvous_islands_program"]
        launcher = torchrun(ranks=1, restarts=1) if self.scenario.what == "torchrun" else []
        return [*launcher, *python("torch alone"), "-m", "tests.parallel.rendezvous_program"]

    def output(self) -> str:
        """Return what the workers have printed."""
        files = sorted(self.folder.glob("output.*"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def stop(self) -> None:
        """End all processes that are left."""
        for number, process in enumerate(self.processes):
            files = [self.folder / f"here.{number}", *self.folder.glob(f"here.{number}.*")]
            left = files if process.poll() is None else []
            process.kill()
            process.wait()
            for file in left:
                with suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)

    @property
    def victim(self) -> int:
        """The process to which it has happened."""
        return int((self.folder / "victim").read_text())

    def end(self, rank: int) -> dict[str, Any]:
        """Return what a rank had in the end."""
        found: dict[str, Any] = json.loads((self.folder / f"end.{rank}.json").read_text())
        return found

    def stretches(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the step at which each stretch of training began, and who took part, in the order of ranks.

        A worker is a process, and how often it has joined as a new one. A stretch that not all ranks have begun had no
        exchange.
        """
        return [
            (stretch[0]["step"], [(line["pid"], line["forgotten"]) for line in stretch]) for stretch in self.begun()
        ]

    def forgetting(self) -> list[set[int]]:
        """Return the ranks that begin each stretch without what they have not sent of sums."""
        return [{line["rank"] for line in stretch if line["forgets_sums"]} for stretch in self.begun()]

    def begun(self) -> list[list[dict[str, Any]]]:
        """Return what the ranks have told when they began each stretch."""
        file = self.folder / "begun"
        lines = [json.loads(line) for line in (file.read_text() if file.exists() else "").splitlines()]
        lines = [line for line in lines if not line.get("position")]  # The other ranks of an island are with the first.
        lines.sort(key=lambda line: (line["round"], line["rank"]))
        found = []
        for _, group in groupby(lines, key=lambda line: line["round"]):
            stretch = list(group)
            assert len({(line["step"], line["size"]) for line in stretch}) == 1, stretch
            if len(stretch) == stretch[0]["size"]:
                found.append(stretch)
        return found


def torchrun(ranks: int = RANKS, restarts: int = 0) -> list[str]:
    """Return the words of a command line that run what follows on the ranks of a worker."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
    return [*launcher, "--nproc-per-node", str(ranks), "--no-python"]


@contextmanager
def rendezvous_server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a rendezvous inside the ``with`` block; return its host and port, and its process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "hvd_periodic", "rendezvous", "--port", "0"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield f"127.0.0.1:{server.stdout.readline().strip().rpartition(':')[2]}", server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@contextmanager
def rendezvous() -> Iterator[str]:
    """Run a rendezvous inside the ``with`` block; return its host and port."""
    with rendezvous_server() as (address, _):
        yield address


def numbered(stretches: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[tuple[int, list[int]]]:
    """Return stretches with one number for every worker."""
    numbers: dict[tuple[int, int], int] = {}
    return [(step, [numbers.setdefault(worker, len(numbers)) for worker in workers]) for step, workers in stretches]
