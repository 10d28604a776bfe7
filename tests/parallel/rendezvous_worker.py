"""What happens to a worker of an elastic job over torch.distributed in the tests, whatever framework it trains with."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from hvd_periodic.elastic.state import CommittedState
from tests.parallel.elastic_events import FOLDER, die, once
from tests.parallel.elastic_scenarios import PERIOD
from tests.parallel.rendezvous_scenarios import Scenario, replace_file
from tests.parallel.silence import count_silence, falls_silent


class UserError(Exception):
    """An error of the user's function."""


class CountsNewStarts(CommittedState):
    """Counts how often this process has begun as a new worker."""

    forgotten = 0

    def forget(self) -> None:
        super().forget()
        self.forgotten += 1


def arrive(scenario: Scenario, number: int, position: int = 0) -> None:
    """Say that this worker is there, or its rank at a position, and wait for those with which the job begins."""
    if scenario.what != "events":
        count_silence(until="wait.0")
    (FOLDER / (f"here.{number}.{position}" if position else f"here.{number}")).write_text(str(os.getpid()))
    if scenario.what != "events":
        wait_for(*(f"here.{other}" for other in range(scenario.workers)))


def happen(scenario: Scenario, step: int, state: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    happened, down = (FOLDER / "victim").exists(), scenario.what == "down"
    if down and rank == 0:
        replace_file(FOLDER / "reached", step)
    if step == scenario.step and size == scenario.workers and rank == size - 1 and once("victim"):
        (FOLDER / "victim").write_text(str(os.getpid()))
        falls_silent(state)
        if scenario.saves != "manifest":  # Else, it dies when the set is completed.
            befall(scenario.what)
    if down and step == scenario.step + 2 * PERIOD and rank == size - 1 and size == scenario.workers:
        die()
    late = (
        scenario.what != "events" and step == scenario.step - 2 and size < scenario.workers and not happened
    )  # At the start, or at the exchange.
    again = happened and step == scenario.wait_step and size == scenario.wait_size and once(f"wait.{rank}")
    if late or (again and scenario.again):
        while not state.job._state.view.waiting:
            time.sleep(0.05)


def befall(what: str) -> None:
    """Let something happen to this process."""
    if what in ("kill", "torchrun"):
        die()
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise UserError
    wait_for("down" if what == "down" else "wait.0")  # Until the rendezvous has ended, or others have gone on without.


def wait_for(*names: str) -> None:
    """Wait until files exist."""
    while not all((FOLDER / name).exists() for name in names):
        time.sleep(0.05)
