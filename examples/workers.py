"""The workers of a job: those of Horovod, or, with HVD_PERIODIC_COMM=torch, those of torch.distributed."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

OVER_TORCH = os.environ.get("HVD_PERIODIC_COMM") == "torch"

if not OVER_TORCH:
    import horovod.torch as hvd


def init() -> None:
    """Meet the other workers."""
    if not OVER_TORCH:
        hvd.init()
    elif not dist.is_initialized():
        dist.init_process_group()


def rank() -> int:
    """Return the number of this worker."""
    return int(dist.get_rank() if OVER_TORCH else hvd.rank())


def size() -> int:
    """Return how many there are."""
    return int(dist.get_world_size() if OVER_TORCH else hvd.size())


def gather(value: Any) -> list[Any]:
    """Return the values of all workers."""
    if not OVER_TORCH:
        values: list[Any] = hvd.allgather_object(value, name="record")
        return values
    gathered = [None] * size()
    dist.all_gather_object(gathered, value)
    return gathered


def averaging(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Let an optimizer average the gradients of all workers at every step, from the weights of the first."""
    if not OVER_TORCH:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())  # type: ignore[no-any-return]
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer.register_step_pre_hook(lambda *_: _average(model))
    return optimizer


def _average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()
