"""DistributedDataParallel around a model that exchanges now and then: gradients that it averages leave nothing to do."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def averaging(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> list[DistributedDataParallel]:
    """Return what averages gradients of these parameters between several of these ranks of the job, and is not off.

    A parameter does not know of it, and trainers wrap models after optimizers are made: all objects of the process are
    looked at, once, and only where torch.distributed is there.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    ours = set(map(id, tensors))
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [
        wrapper
        for wrapper in found
        if wrapper.require_backward_grad_sync
        and len(set(dist.get_process_group_ranks(wrapper.process_group)) & set(ranks)) > 1
        and any(id(parameter) in ours for parameter in wrapper.module.parameters())
    ]


def switch_off(wrapper: DistributedDataParallel) -> None:
    """Let it average no gradients and give no buffers to others from now on, as within its ``no_sync()``."""
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


def refuse_averaging(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise a RuntimeError where gradients are averaged between ranks that exchange."""
    if averaging(tensors, ranks):
        raise RuntimeError(
            "DistributedDataParallel averages the gradients of ranks that exchange, which leaves nothing to exchange: "
            "train the module inside of it. With accelerate: hvd_periodic.torch.huggingface.prepare(accelerator, "
            "model, optimizer, ...)"
        )
