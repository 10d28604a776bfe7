"""What the ranks of a recording run: ``mpirun -np N python -m docs.figures.job NAME FILE``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from docs.figures.watched import Message, WatchedCommunicator

LINK_BYTES_PER_SECOND = 1e9 / 8

STEP_SECONDS = 0.014, 0.016
"""What a local step takes on each rank: of a device, for which the rank waits."""

Record = dict[str, Any]


def placements(small: bool) -> Record:
    """Return what this rank holds and hands over, in bytes, with the center in each place."""
    elements = 3_000 if small else 3_000_000
    return {center: _held_and_sent(center, elements) for center in ("replicated", "root", "sharded")}


def _held_and_sent(center: str, elements: int) -> Record:
    parameter = torch.nn.Parameter(torch.full((elements,), float(hvd.rank())))
    communicator = WatchedCommunicator()
    optimizer = hvdp.AGNOptimizer(
        torch.optim.SGD([parameter], lr=0.1),
        [("w", parameter)],
        communication_period=2,
        outer_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        center=center,
        process_set=communicator,
    )
    for _ in range(4):
        communicator.messages.clear()
        for _ in range(2):
            parameter.grad = torch.full_like(parameter, 1.0 + hvd.rank())
            optimizer.step()
    sent: dict[str, int] = {}
    for message in _of_parameters(communicator):
        sent[message.collective] = sent.get(message.collective, 0) + message.nbytes
    synchronizer = optimizer.synchronizer
    share = sum(tensor.nbytes for tensor in synchronizer.center_tensors())
    state = synchronizer.exchanged.center_optimizer.state() or {"state": {}}
    momenta = [entry["momentum_buffer"] for entry in state["state"].values()]
    held = {"replica": parameter.nbytes, "center": share, "state": sum(tensor.nbytes for tensor in momenta)}
    optimizer.finalize()
    return {"held": held, "sent": sent}


def overlap(small: bool) -> Record:
    """Return when local steps and messages of this rank began and ended: waiting, overlapped, and in fragments."""
    options = {"waiting": {}, "overlapped": {"overlap": 3}, "in fragments": {"overlap": 3, "fragments": 2}}
    return {name: _trained(small, **chosen) for name, chosen in options.items()}


def _trained(small: bool, **options: Any) -> Record:
    elements, periods = (1_000, 5) if small else (250_000, 40)
    parameters = [torch.nn.Parameter(torch.full((elements,), float(hvd.rank()))) for _ in range(4)]
    communicator = WatchedCommunicator(LINK_BYTES_PER_SECOND)
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        [(f"w{number}", parameter) for number, parameter in enumerate(parameters)],
        interval_steps=8,
        process_set=communicator,
        **options,
    )
    exchanged, taken = _timed(optimizer.synchronizer, "sync"), _timed(optimizer.synchronizer, "land")
    steps = []
    for _ in range(8 * periods):
        begun = time.perf_counter()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        time.sleep(STEP_SECONDS[hvd.rank()])
        optimizer.step()
        steps.append([begun, time.perf_counter()])
    optimizer.finalize()
    return {"steps": steps, "exchanged": exchanged, "taken": taken, "messages": _times(communicator)}


def buckets(small: bool) -> Record:
    """Return when the buckets of this rank were packed, on their way, and taken, in every exchange."""
    elements = 1_000 if small else 25_600_000
    parameter = torch.nn.Parameter(torch.full((elements,), float(hvd.rank())))
    communicator = WatchedCommunicator()
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], interval_steps=1, process_set=communicator
    )
    optimizer.synchronizer.check_agreement()
    group = optimizer.synchronizer.exchanger.tensor_groups.parameters
    begun, finished = _timed(group, "begin"), _timed(group, "finish")
    exchanges = []
    for _ in range(3 if small else 41):
        for notes in (begun, finished, communicator.messages):
            notes.clear()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        exchanges.append({"begin": list(begun), "finish": list(finished), "messages": _times(communicator)})
    optimizer.finalize()
    return {"exchanges": exchanges}


def _timed(thing: Any, method: str) -> list[list[float]]:
    """Let a method of one object note when it is entered and left; return the notes."""
    notes: list[list[float]] = []
    plain = getattr(thing, method)

    def timed(*args: Any) -> Any:
        entered = time.perf_counter()
        result = plain(*args)
        notes.append([entered, time.perf_counter()])
        return result

    setattr(thing, method, timed)
    return notes


def _of_parameters(communicator: WatchedCommunicator) -> list[Message]:
    """Return the messages but for the integers that ranks tell each other at every meeting."""
    return [message for message in communicator.messages if ".parameters." in message.name]


def _times(communicator: WatchedCommunicator) -> list[list[float]]:
    return [[message.begun, message.arrived] for message in _of_parameters(communicator)]


JOBS: dict[str, Callable[[bool], Record]] = {"placements": placements, "overlap": overlap, "buckets": buckets}


def main() -> None:
    """Run one, and let the first rank write what all have noted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=list(JOBS))
    parser.add_argument("--folder", type=Path, required=True, help="where NAME.json is written")
    parser.add_argument("--small", action="store_true", help="small models, to see that this runs")
    arguments = parser.parse_args()
    hvd.init()
    for name in arguments.names:
        ranks = hvd.allgather_object(JOBS[name](arguments.small))
        if hvd.rank() == 0:
            (arguments.folder / f"{name}.json").write_text(json.dumps(ranks))
    hvd.barrier()


if __name__ == "__main__":
    main()
