"""A worker of an elastic job with an elastic sampler; see ``test_elastic_sampler.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.sampler_program LOADER FOLDER NUMBER

LOADER is a class, with the number of processes that load: torch.utils.data.DataLoader:0. Every worker writes which
examples it processes, in which round and before which local step, and from which step each round goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from tests.parallel.elastic_events import FOLDER, die, once
from tests.parallel.silence import count_silence, falls_silent

WORKERS, EXAMPLES, EPOCHS, BATCH, PERIOD = 3, 49, 4, 2, 4
DIES, WAITS = 9, 13
"""Local steps from which on the last of three workers dies, a step after an exchange, and two wait for another."""


def happen(step: int, state: Any) -> None:
    """Let happen to this process what is to happen before a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if step >= DIES and step % PERIOD == 1 and size == WORKERS and rank == size - 1 and once("victim"):
        (FOLDER / "victim").write_text(str(os.getpid()))
        falls_silent(state)
        die()
    happened = (FOLDER / "victim").exists()
    if size < WORKERS and step >= (WAITS if happened else DIES - 2):  # At first, too, one may come late.
        if happened:
            (FOLDER / "another").touch()
        while not state.job._state.view.waiting:
            time.sleep(0.05)


def note(file: str, **what: Any) -> None:
    """Write a line into a file."""
    with (FOLDER / file).open("a") as lines:
        lines.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


def loader_of(words: str, data: torch.Tensor, sampler: hvdp.elastic.ElasticSampler) -> Any:
    """Return the loader that the command line asks for."""
    name, processes = words.split(":")
    module, _, of_module = name.rpartition(".")
    loader = getattr(import_module(module), of_module)
    return loader(data, BATCH, sampler=sampler, num_workers=int(processes))


def main(loader_words: str, number: str) -> None:
    """Train."""
    model = torch.nn.Linear(1, 1)
    optimizer = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model, PERIOD)
    data = torch.arange(EXAMPLES)
    sampler = hvdp.elastic.ElasticSampler(data)
    loader = loader_of(loader_words, data, sampler)
    state = hvdp.elastic.State(
        model, optimizer, commit="exchange", min_ranks=WORKERS - 1, max_ranks=WORKERS, sampler=sampler
    )

    count_silence(until="another")
    (FOLDER / f"here.{number}").touch()
    while not all((FOLDER / f"here.{other}").exists() for other in range(WORKERS)):
        time.sleep(0.05)

    @hvdp.elastic.run
    def train(state: Any) -> None:
        synchronizer, turn = optimizer.synchronizer, state.job._state.view.round
        note("begun", round=turn, step=synchronizer.local_steps)
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for batch, examples in enumerate(loader):
                happen(synchronizer.local_steps, state)
                note("seen", round=turn, step=synchronizer.local_steps, epoch=epoch, examples=examples.tolist())
                optimizer.zero_grad()
                model(examples[:, None].float()).sum().backward()
                sampler.record_batch(batch, BATCH)
                optimizer.step()
        optimizer.finalize()

    train(state)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3])
