"""A rank of an island of an elastic job over torch.distributed; see ``test_rendezvous_islands.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.rendezvous_islands_program SCENARIO FOLDER NUMBER [POSITION]

Random events happen to it as well; see ``rendezvous_events.py``.

Islands descend on quadratics: the mean gradient of its ranks is that of a worker of ``rendezvous_program.py``. Without
a position, torchrun has started the ranks of the island.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_periodic.torch as hvdp
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator
from tests.parallel.elastic_events import FOLDER, at_collective, begin, die, end, once
from tests.parallel.elastic_scenarios import MOMENTUM, PERIOD, RATE, SIZE, target
from tests.parallel.rendezvous_job import RANKS
from tests.parallel.rendezvous_program import State, forgets_sums, goes_on
from tests.parallel.rendezvous_scenarios import ISLAND_EVENTS, Scenario, replace_file
from tests.parallel.rendezvous_worker import UserError, arrive, wait_for
from tests.parallel.silence import falls_silent
from tests.parallel.test_rendezvous_islands import ISLANDS, SCENARIOS, STEP, WAIT_STEP

ALGORITHMS = {"easgd": hvdp.EASGD, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}


class Quadratic(torch.nn.Module):
    """Two tensors of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        parts = torch.zeros(SIZE, dtype=torch.float64).split([SIZE - 1, 1])
        self.parts = torch.nn.ParameterList(part.clone() for part in parts)

    def forward(self, point: torch.Tensor) -> torch.Tensor:
        """Return half the squared distance to a point."""
        return 0.5 * (torch.cat(list(self.parts)) - point).square().sum()


def connect(number: int) -> int:
    """Initialize torch.distributed with the ranks of this island; return the position of this one."""
    if len(sys.argv) > 4:
        meeting = f"file://{FOLDER}/island.{number}"
        dist.init_process_group("gloo", init_method=meeting, rank=int(sys.argv[4]), world_size=RANKS)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank()


def happen(scenario: Scenario, step: int, state: Any, position: int) -> None:
    """Let happen to the last island what is to happen; let the other wait until an island waits to take part."""
    island, islands = state.place()
    happened, in_flight = (FOLDER / "victim.1").exists(), scenario.what == "in flight"
    if islands == ISLANDS and island == 0 and step <= STEP:
        replace_file(FOLDER / f"reached.{position}", step)
    before = PERIOD * (STEP // PERIOD) - 1 if in_flight else STEP  # Before the step with the exchange.
    if step == before and islands == ISLANDS and island == ISLANDS - 1 and once(f"victim.{position}"):
        replace_file(FOLDER / f"pid.{position}", os.getpid())
        wait_for(*(f"pid.{other}" for other in range(RANKS)))
        if scenario.what == "raise":
            if position == RANKS - 1:
                raise UserError("of my own")
            return
        if position == 0:
            falls_silent(state, int((FOLDER / f"pid.{RANKS - 1}").read_text()))
        wait_for("silent")
        if in_flight:
            at_collective(TorchDistributedCommunicator, 2, "before")
        elif scenario.what == "kill":
            die()
        elif position == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL if scenario.what == "torchrun" else signal.SIGSTOP)
    late = step == STEP - 3 and islands < ISLANDS and not happened  # At the start.
    alone = happened and step == WAIT_STEP and islands == ISLANDS - 1 and once(f"wait.{position}")
    if (late or (alone and scenario.what != "raise")) and position == 0:
        while not state.job._state.view.waiting:
            time.sleep(0.05)


def main(scenario: Scenario, number: int) -> None:
    """Train."""
    position = connect(number)
    model: Any = Quadratic()
    if scenario.inside == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = hvdp.PeriodicOptimizer(
        local,
        model,
        ALGORITHMS[scenario.algorithm](),
        PERIOD,
        center=scenario.center,
        root_rank=ISLANDS - 1,
        overlap=scenario.overlap,
    )
    if scenario.what == "in flight":  # Small data would travel with the handshake.
        TorchDistributedCommunicator.piggyback_limit_bytes = 0
    state = State(model, optimizer, commit=scenario.commit, batch=0)
    arrive(scenario, number, position)
    if scenario.what != "events":
        wait_for(*(f"here.{each}.{place}" for each in range(ISLANDS) for place in range(1, RANKS)))

    @hvdp.elastic.run
    def train(state: Any) -> str:
        steps, (island, islands) = optimizer.synchronizer.local_steps, state.place()
        of_rank = {"position": position, "forgotten": state.forgotten, "forgets_sums": forgets_sums(optimizer)}
        begin(island, islands, steps, round=state.job._round, **of_rank)
        while goes_on(scenario, state.batch, island if position == 0 else RANKS * islands):
            step = state.batch
            if scenario.what != "events":
                happen(scenario, step, state, position)
            apart = 0.5 * (-1) ** position * (1 + step % 3)
            optimizer.zero_grad()
            model(torch.tensor(target(island, step), dtype=torch.float64) + apart).backward()
            state.batch += 1
            optimizer.step()
            if scenario.commit == "call" and state.batch % PERIOD == PERIOD - 1:
                state.commit()
        optimizer.finalize()
        return "done"

    try:
        assert train(state) == "done"
    except (UserError, RuntimeError) as error:
        if scenario.what != "raise":
            raise
        replace_file(FOLDER / f"raised.{position}", [type(error).__name__, str(error)])
        wait_for("wait.0", *(f"raised.{other}" for other in range(RANKS)))
        return
    assert "horovod" not in sys.modules
    island, _ = state.place()
    replica = values(model)
    with optimizer.center():
        center = values(model)
    end(
        f"{island}.{position}" if position else island,
        x=replica,
        center=center,
        steps=optimizer.synchronizer.local_steps,
    )
    dist.barrier()
    dist.destroy_process_group()


def values(model: torch.nn.Module) -> list[float]:
    """Return all parameters; the ranks of the island gather them."""
    whole: list[Any] = [getattr(each, "full_tensor", each.detach)() for each in model.parameters()]
    found: list[float] = torch.cat([each.detach().reshape(-1) for each in whole]).tolist()
    return found


if __name__ == "__main__":
    main((SCENARIOS | ISLAND_EVENTS)[sys.argv[1]], int(sys.argv[3]))
