"""What happens to a worker of an elastic job over torch.distributed in the tests, whatever framework it trains with."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from tests.parallel.elastic_events import FOLDER, die, once
from tests.parallel.rendezvous_scenarios import Scenario
from tests.parallel.silence import count_silence, falls_silent


class UserError(Exception):
    """An error of the user's function."""


def arrive(scenario: Scenario, number: int) -> None:
    """Say that this worker is there, and wait for those with which the job begins."""
    if scenario.what != "events":
        count_silence(until="wait.0")
    (FOLDER / f"here.{number}").write_text(str(os.getpid()))
    while scenario.what != "events" and not all(
        (FOLDER / f"here.{other}").exists() for other in range(scenario.workers)
    ):
        time.sleep(0.05)


def happen(scenario: Scenario, step: int, state: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    happened = (FOLDER / "victim").exists()
    if step == scenario.step and size == scenario.workers and rank == size - 1 and once("victim"):
        (FOLDER / "victim").write_text(str(os.getpid()))
        falls_silent(state)
        befall(scenario.what)
    late = (
        scenario.what != "events" and step == scenario.step - 2 and size < scenario.workers and not happened
    )  # At the start, or at the exchange.
    again = happened and step == scenario.wait_step and size == scenario.wait_size and once(f"wait.{rank}")
    if late or (again and scenario.again):
        while not state.job._state.view.waiting:
            time.sleep(0.05)


def befall(what: str) -> None:
    """Let something happen to this process."""
    if what == "kill":
        die()
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise UserError
    wait_for_the_others()


def wait_for_the_others() -> None:
    """Wait until they have gone on without this process."""
    while not (FOLDER / "wait.0").exists():
        time.sleep(0.05)
