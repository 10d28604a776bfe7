"""A ``DistributedDataParallel`` around the model: whose gradients it averages at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator
from hvd_periodic.ranks import named


def island_of(
    module: torch.nn.Module | None, communicator: Communicator, asynchronous: bool
) -> TorchDistributedCommunicator | None:
    """Return the ranks that average their gradients with this one; None where none do.

    Args:
        module: the model, if it is known.
        communicator: the ranks that exchange.
        asynchronous: whether they exchange without waiting for each other.

    Raises:
        ValueError: ranks that exchange average their gradients at every step, so that no exchange changes anything; or
            asynchronous exchange.
    """
    parts = [] if module is None else module.modules()
    found = [TorchDistributedCommunicator(p.process_group) for p in parts if isinstance(p, DistributedDataParallel)]
    for averaged in found:
        if averaged.size > 1 and asynchronous:
            raise ValueError(
                "asynchronous=True with a DistributedDataParallel: ranks that average their gradients would exchange "
                "at different moments, and differ from then on"
            )
        exchanging = set(communicator.global_ranks)
        if communicator.size > 1 and exchanging <= set(averaged.ranks):
            raise ValueError(
                f"The DistributedDataParallel averages the gradients of {named(averaged.ranks)} at every step, and "
                f"these exchange among themselves ({sorted(exchanging)}), so that nothing would be left to "
                "exchange. Train the module inside of it, and pass that, model.module; or average inside of groups and "
                "exchange between them, with groups = hvdp.node_groups(), "
                "DistributedDataParallel(model, process_group=groups.local) and process_set=groups.cross here"
            )
    return next((averaged for averaged in found if averaged.size > 1), None)


_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
"""All of this process, since this module is imported: trainers wrap models after optimizers are made."""


def _note(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    """Note who wraps a module; a parameter does not know of it."""
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


register_module_module_registration_hook(_note)


def averaging_among(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> list[DistributedDataParallel]:
    """Return what averages gradients of these parameters between all of these ranks of the job, and is not off."""
    ours = set(map(id, tensors)) if _wrappers else set()
    return [
        wrapper
        for wrapper in list(_wrappers)
        if any(id(parameter) in ours for parameter in wrapper.module.parameters())
        and wrapper.require_backward_grad_sync
        and len(ranks) > 1
        and set(ranks) <= set(dist.get_process_group_ranks(wrapper.process_group))
    ]


def switch_off(wrapper: DistributedDataParallel) -> None:
    """Let it average no gradients and give no buffers to others from now on, as within its ``no_sync()``."""
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


def refuse_averaging(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise a RuntimeError where gradients are averaged between ranks that exchange."""
    if averaging_among(tensors, ranks):
        raise RuntimeError(
            "DistributedDataParallel averages the gradients of ranks that exchange, which leaves nothing to exchange: "
            "train the module inside of it. With accelerate: hvd_periodic.torch.huggingface.prepare(accelerator, "
            "model, optimizer, ...)"
        )
