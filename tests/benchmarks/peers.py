"""Methods of other packages that exchange periodically, where these are installed: accelerate and torchft.

    bash run_scripts/benchmark_training.sh 1gbit --peers

Each is set up as its documentation says, over Gloo, and with what makes it fastest here: torchft reduces in buckets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed
from torch import nn

from tests.benchmarks.methods import Make, Method, Task, counted, join, local_step, own_address

os.environ.setdefault("RUST_LOG", "warn")  # How much torchft tells; it reads this when it is imported.

FRAGMENTS = 2
DELAY = 4
"""Of Streaming DiLoCo: steps that a fragment travels."""


def accelerate_local_sgd(task: Task, model: nn.Module, period: int) -> Method:
    """Return accelerate's ``LocalSGD``."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    join()
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, task.optimizer(model))
    local_sgd = LocalSGD(accelerator=accelerator, model=prepared, local_sgd_steps=period)
    local_sgd.__enter__()

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(task.loss(prepared))
        optimizer.step()
        local_sgd.step()

    return counted(model, step, period)


def torchft_local_sgd(task: Task, model: nn.Module, period: int) -> Method:
    """Return torchft's ``LocalSGD``."""
    from torchft.local_sgd import LocalSGD

    optimizer = task.optimizer(model)
    return _in_torchft(task, model, optimizer, lambda manager: LocalSGD(manager, model, optimizer, period), period)


def torchft_diloco(fragments: int, delay: int) -> Make:
    """Return what makes torchft's ``DiLoCo``, streaming if there are several fragments."""

    def make(task: Task, model: nn.Module, period: int) -> Method:
        from torchft.local_sgd import DiLoCo

        parts = parts_of(model, fragments)
        optimizer = task.optimizer(model)
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        options: dict[str, Any] = {"use_bucketization": True, "fragment_sync_delay": delay, "pin_memory": False}
        return _in_torchft(
            task,
            model,
            optimizer,
            lambda manager: DiLoCo(manager, parts, optimizer, outer, period, **options),
            period,
        )

    return make


def parts_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Return a model, cut between its children into so many parts of about equal size; it is a sequence of them."""
    children = list(model.children())
    total = sum(parameter.numel() for parameter in model.parameters())
    parts: list[list[nn.Module]] = [[] for _ in range(count)]
    before = 0
    for child in children:
        parts[min(before * count // total, count - 1)].append(child)
        before += sum(parameter.numel() for parameter in child.parameters())
    return [nn.Sequential(*part) for part in parts]


def _in_torchft(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, enter: Callable[[Any], Any], period: int
) -> Method:
    """Return the steps of what torchft adds to an optimizer, with a lighthouse of its own on the first rank."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    join()
    logging.getLogger("torchft").setLevel(logging.WARNING)
    held: list[Any] = []
    if hvd.rank() == 0:
        held.append(LighthouseServer("[::]:0", hvd.size(), join_timeout_ms=60_000))
    port = hvd.broadcast_object(held[0].address().rsplit(":", 1)[1] if held else None, name="lighthouse port")
    host = hvd.broadcast_object(own_address(), name="lighthouse host")
    store = torch.distributed.TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=hvd.size(),
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr=own_address(),
        store_port=store.port,
        lighthouse_addr=f"http://{host}:{port}",
        replica_id=str(hvd.rank()),
        hostname=own_address(),
    )
    entered = enter(manager)
    entered.__enter__()

    def leave() -> None:
        entered.__exit__(None, None, None)
        hvd.barrier()
        manager.shutdown()
        hvd.barrier()
        if hvd.rank() == 0:
            held[0].shutdown()
        held.clear()

    held.append(store)
    method = counted(model, partial(local_step, task, model, optimizer), period)
    return Method(method.step, bytes_sent=method.bytes_sent, leave=leave)


_ACCELERATE: dict[str, Make] = {"accelerate LocalSGD": accelerate_local_sgd}
_TORCHFT: dict[str, Make] = {
    "torchft LocalSGD": torchft_local_sgd,
    "torchft DiLoCo": torchft_diloco(1, 0),
    f"torchft Streaming DiLoCo, {FRAGMENTS} fragments": torchft_diloco(FRAGMENTS, DELAY),
}

METHODS = {
    name: make
    for package, methods in (("accelerate", _ACCELERATE), ("torchft", _TORCHFT))
    if find_spec(package) is not None
    for name, make in methods.items()
}
"""By name; those of packages that are installed."""
