"""A job under elastic Horovod that goes on while ranks come and go; see ``test_elastic_state.py``.

horovodrun --gloo --host-discovery-script ... python -m tests.parallel.elastic_state_program SCENARIO FOLDER

Every worker descends on a quadratic of its rank. Whoever begins a stretch of training says so in ``FOLDER/begun``, and
at the end everybody writes what it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.torch import elastic
from tests.parallel import elastic_scenarios as scenarios

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


def die() -> NoReturn:
    """End this process as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("It lives on")


def once(name: str) -> bool:
    """Return whether this is the first call by any process."""
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def at_collective(number: int, moment: str) -> None:
    """Die before, in or after a collective, counted from now on."""
    begin: dict[str, Callable[..., Any]] = {
        name: getattr(HorovodCommunicator, name) for name in ("gather_integers", "allreduce")
    }
    count = 0

    def counted(which: str, self: HorovodCommunicator, /, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count < number:
            return begin[which](self, *arguments, **options)
        if moment == "before":
            die()
        result = begin[which](self, *arguments, **options)
        if moment == "after" and callable(result):
            result()
        die()

    for name in begin:
        setattr(HorovodCommunicator, name, partialmethod(partial(counted, name)))


def main(scenario: scenarios.Scenario) -> None:
    """Train; die where the scenario says so."""
    hvd.init()
    if scenario.collectives:
        HorovodCommunicator.encloses = 0
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(scenarios.SIZE, dtype=torch.float64))
    local = torch.optim.SGD(model.parameters(), lr=scenarios.RATE, momentum=scenarios.MOMENTUM)
    algorithm = {"easgd": hvdp.EASGD, "averaging": hvdp.Averaging, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}
    optimizer = hvdp.PeriodicOptimizer(
        local, model, algorithm[scenario.algorithm](), scenarios.PERIOD, overlap=scenario.overlap
    )
    state = elastic.State(model, optimizer, commit="exchange", batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun = {"pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": optimizer.synchronizer.local_steps}
        with (FOLDER / "begun").open("a") as file:
            file.write(json.dumps(begun) + "\n")
        while state.batch < scenarios.STEPS:
            step = state.batch
            for event in scenario.events:
                if event.step == step and (event.rank is None or event.rank == hvd.rank()) and hvd.size() == event.size:
                    happen(event, step)
            model.x.grad = model.x.detach() - torch.tensor(scenarios.target(hvd.rank(), step), dtype=torch.float64)
            state.batch += 1
            optimizer.step()
        optimizer.finalize()

    def happen(event: scenarios.Event, step: int) -> None:
        if event.what == "wait":  # Others join at the next exchange.
            (FOLDER / event.name).touch()
            while state._host_messages.empty():
                time.sleep(0.05)
        elif event.what == "forget" and once(f"{event.name}.{hvd.rank()}"):
            del state.commits.held[max(state.commits.held)]
        elif event.what == "kill" and once(event.name):
            die()
        elif event.what in ("before", "in", "after") and once(event.name):
            at_collective(event.number, event.what)

    train(state)
    synchronizer = optimizer.synchronizer
    with optimizer.center():
        center = model.x.tolist()
    result = {
        "pid": os.getpid(),
        "rank": hvd.rank(),
        "x": model.x.tolist(),
        "center": center,
        "steps": synchronizer.local_steps,
        "batch": state.batch,
    }
    (FOLDER / f"end.{hvd.rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(scenarios.SCENARIOS[sys.argv[1]])
