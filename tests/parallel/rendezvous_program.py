"""A worker of an elastic job over torch.distributed; see ``test_rendezvous.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.rendezvous_program SCENARIO FOLDER NUMBER

Every worker descends on a quadratic of its rank. Whoever begins a stretch of training says so in ``FOLDER/begun``, and
at the end everybody writes what it has.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from tests.parallel.elastic_events import FOLDER, begin, die, end, once
from tests.parallel.elastic_scenarios import MOMENTUM, PERIOD, RATE, SIZE, target
from tests.parallel.rendezvous_scenarios import SCENARIOS, Scenario


def happen(scenario: Scenario, step: int, state: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    happened = (FOLDER / "victim").exists()
    if step == scenario.step and size == scenario.workers and rank == size - 1 and once("victim"):
        (FOLDER / "victim").write_text(str(os.getpid()))
        if scenario.what == "kill":
            die()
        os.kill(os.getpid(), signal.SIGSTOP)
    late = step == scenario.step - 2 and size < scenario.workers and not happened  # At the start, or at the exchange.
    again = happened and step == scenario.wait_step and size == scenario.wait_size
    if late or (again and once(f"wait.{rank}")):
        while not state.job._state.view.waiting:
            time.sleep(0.05)


def main(scenario: Scenario, number: int) -> None:
    """Train."""
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    algorithm = {"easgd": hvdp.EASGD, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}[scenario.algorithm]
    optimizer = hvdp.PeriodicOptimizer(local, model, algorithm(), PERIOD, center=scenario.center)
    state = hvdp.elastic.State(model, optimizer, commit="exchange", batch=0)

    (FOLDER / f"here.{number}").touch()
    while not all((FOLDER / f"here.{other}").exists() for other in range(scenario.workers)):
        time.sleep(0.05)

    @hvdp.elastic.run
    def train(state: Any) -> str:
        begin(dist.get_rank(), dist.get_world_size(), optimizer.synchronizer.local_steps)
        while state.batch < scenario.steps:
            step = state.batch
            happen(scenario, step, state)
            model.x.grad = model.x.detach() - torch.tensor(target(dist.get_rank(), step), dtype=torch.float64)
            state.batch += 1
            optimizer.step()
        optimizer.finalize()
        return "done"

    assert train(state) == "done"
    assert "horovod" not in sys.modules
    with optimizer.center():
        center = model.x.tolist()
    steps = optimizer.synchronizer.local_steps
    end(dist.get_rank(), x=model.x.tolist(), center=center, steps=steps, batch=state.batch)


if __name__ == "__main__":
    main(SCENARIOS[sys.argv[1]], int(sys.argv[3]))
