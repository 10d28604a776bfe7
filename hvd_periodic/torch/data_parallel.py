"""A ``DistributedDataParallel`` around the model, and the ranks whose gradients it averages at every step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator
from hvd_periodic.ranks import named


def island_of(
    module: torch.nn.Module | None, communicator: Communicator, asynchronous: bool
) -> TorchDistributedCommunicator | None:
    """Return the ranks that average their gradients with this rank; None if there are none, or in an elastic job.

    The ranks of an island of an elastic job leave and join together, and agree by themselves.

    Raises:
        ValueError: the ranks that exchange average their gradients at every step, so that no exchange changes anything;
            or asynchronous exchange.
    """
    parts = [] if module is None or communicator.between_islands else module.modules()
    found = [TorchDistributedCommunicator(p.process_group) for p in parts if isinstance(p, DistributedDataParallel)]
    for averaged in found:
        if averaged.size > 1 and asynchronous:
            raise ValueError(
                "asynchronous=True does not work with a DistributedDataParallel: ranks that average their gradients "
                "would exchange at different times, and differ from then on"
            )
        exchanging = set(communicator.global_ranks)
        if communicator.size > 1 and exchanging <= set(averaged.ranks):
            raise ValueError(
                f"The DistributedDataParallel averages the gradients of {named(averaged.ranks)} at every step, and "
                f"these exchange among themselves ({sorted(exchanging)}), so that nothing would be left to "
                "exchange. Train the module that it wraps, and pass that, model.module; or average within groups and "
                "exchange between them, with groups = hvdp.node_groups(), "
                "DistributedDataParallel(model, process_group=groups.local) and process_set=groups.cross here"
            )
    return next((averaged for averaged in found if averaged.size > 1), None)


def averaging_among(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> list[DistributedDataParallel]:
    """Return the active wrappers that average gradients of these parameters among all of these ranks of the job.

    Trainers wrap models after optimizers are made, and a parameter has no reference to its wrapper. Therefore this
    searches all objects of the process, when a synchronizer is made and when training begins. It does not find a
    wrapper that was made in between and hidden by ``gc.freeze()``.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    remember_wrappers()
    ours = set(map(id, tensors))
    return [
        wrapper
        for wrapper in _wrappers
        if any(id(parameter) in ours for parameter in wrapper.module.parameters())
        and wrapper.require_backward_grad_sync
        and len(ranks) > 1
        and set(ranks) <= _ranks_of(wrapper)
    ]


def _ranks_of(wrapper: DistributedDataParallel) -> set[int]:
    """Return the ranks whose gradients a wrapper averages; none if its process group was destroyed."""
    try:
        return set(dist.get_process_group_ranks(wrapper.process_group))
    except KeyError:
        return set()


_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
"""The wrappers that a search has found, as long as they exist."""


def remember_wrappers() -> None:
    """Search all objects of the process for wrappers, except for those whose construction has failed."""
    if dist.is_available() and dist.is_initialized():
        _wrappers.update(
            wrapper
            for wrapper in gc.get_objects()
            if DistributedDataParallel in type(wrapper).__mro__ and "require_backward_grad_sync" in vars(wrapper)
        )


def switch_off(wrapper: DistributedDataParallel) -> None:
    """Permanently stop the wrapper from averaging gradients and broadcasting buffers, as ``no_sync()`` does."""
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


def refuse_averaging(tensors: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
    """Raise a RuntimeError if gradients are averaged between ranks that exchange."""
    if averaging_among(tensors, ranks):
        raise RuntimeError(
            "DistributedDataParallel averages the gradients of ranks that exchange, which leaves nothing to exchange: "
            "train the module that it wraps. With accelerate: hvd_periodic.torch.huggingface.prepare(accelerator, "
            "model, optimizer, ...)"
        )
