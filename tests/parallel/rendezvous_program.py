"""A worker of an elastic job over torch.distributed; see ``test_rendezvous.py`` and ``rendezvous_events.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.rendezvous_program SCENARIO FOLDER NUMBER

Every worker descends on a quadratic of its rank. Whoever begins a stretch of training says so in ``FOLDER/begun``, and
at the end everybody writes what it has.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from tests.parallel.elastic_events import FOLDER, begin, die, end, once
from tests.parallel.elastic_scenarios import MOMENTUM, PERIOD, RATE, SIZE, target
from tests.parallel.rendezvous_scenarios import EVENTS, FIXED, HANGING, SCENARIOS, Scenario, read_file, replace_file


class UserError(Exception):
    """An error of the user's function."""


class State(hvdp.elastic.State):
    """Counts how often this process has begun as a new worker."""

    forgotten = 0

    def forget(self) -> None:
        super().forget()
        self.forgotten += 1


def goes_on(scenario: Scenario, step: int) -> bool:
    """Return whether another step comes; where others say so, wait until it may come."""
    if scenario.what != "events":
        return step < scenario.steps
    if dist.get_rank() == 0 and step % PERIOD == 0:
        replace_file(FOLDER / "progress", step)
    while True:
        fence, last = read_file(FOLDER / "fence")
        if step < fence:
            time.sleep(0.005 * (1 + dist.get_rank() % 2))
            return True
        if last:
            return False
        time.sleep(0.02)


def target_of(scenario: Scenario, step: int) -> Sequence[torch.Tensor]:
    """Return where this rank descends to in a step, for each parameter."""
    values = FIXED if scenario.fixed else target(dist.get_rank(), step)
    return torch.tensor(values, dtype=torch.float64).split(SIZE // 2)


def happen(scenario: Scenario, step: int, state: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    happened = (FOLDER / "victim").exists()
    if step == scenario.step and size == scenario.workers and rank == size - 1 and once("victim"):
        (FOLDER / "victim").write_text(str(os.getpid()))
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


def main(scenario: Scenario, number: int) -> None:
    """Train."""
    model = torch.nn.Module()
    model.x, model.y = (torch.nn.Parameter(torch.zeros(SIZE // 2, dtype=torch.float64)) for _ in range(2))
    model.y.requires_grad = not scenario.thaws
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    algorithm = {"easgd": hvdp.EASGD, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}[scenario.algorithm]
    optimizer = hvdp.PeriodicOptimizer(
        local,
        model,
        algorithm(),
        PERIOD,
        center=scenario.center,
        overlap=scenario.overlap,
        fragments=scenario.fragments,
        compression=hvdp.Compression.int8 if scenario.int8 else hvdp.Compression.none,
        timeout_seconds=scenario.timeout,
    )
    state = State(model, optimizer, commit="exchange", batch=0, thawed=not scenario.thaws)

    (FOLDER / f"here.{number}").write_text(str(os.getpid()))
    while scenario.what != "events" and not all(
        (FOLDER / f"here.{other}").exists() for other in range(scenario.workers)
    ):
        time.sleep(0.05)

    @hvdp.elastic.run
    def train(state: Any) -> str:
        steps, number = optimizer.synchronizer.local_steps, state.job._state.view.round
        begin(dist.get_rank(), dist.get_world_size(), steps, round=number, forgotten=state.forgotten)
        while goes_on(scenario, state.batch):
            step = state.batch
            if scenario.what != "events":
                happen(scenario, step, state)
            if step == scenario.thaws and not state.thawed:
                model.y.requires_grad = state.thawed = True
                optimizer.adopt()
            for parameter, to in zip(model.parameters(), target_of(scenario, step), strict=True):
                parameter.grad = parameter.detach() - to if parameter.requires_grad else None
            state.batch += 1
            optimizer.step()
        optimizer.finalize()
        return "done"

    try:
        assert train(state) == "done"
    except UserError:
        wait_for_the_others()
        return
    assert "horovod" not in sys.modules
    replica = values(model)
    with optimizer.center():
        center = values(model)
    end(dist.get_rank(), x=replica, center=center, steps=optimizer.synchronizer.local_steps, batch=state.batch)


def values(model: torch.nn.Module) -> list[float]:
    """Return all parameters."""
    found: list[float] = torch.cat([each.detach() for each in model.parameters()]).tolist()
    return found


if __name__ == "__main__":
    main((SCENARIOS | HANGING | EVENTS)[sys.argv[1]], int(sys.argv[3]))
