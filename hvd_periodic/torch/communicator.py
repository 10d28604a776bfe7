"""The ranks that exchange: ranks of Horovod, or of torch.distributed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import isfunction
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator, register
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.comm.local import only_rank
from hvd_periodic.comm.subset import Subset
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator, register_group

VARIABLE = "HVD_PERIODIC_COMM"
"""Environment variable with the backend to use if no process set implies one: ``"horovod"`` or ``"torch"``."""


def communicator_of(process_set: Any) -> Communicator:
    """Return the communicator over a set of ranks, or the communicator that was passed in its place.

    Args:
        process_set: a process set of Horovod; a ``torch.distributed.ProcessGroup``; a ``DeviceMesh`` of one dimension;
            a function that returns the ranks of this rank's group, over Horovod; or a communicator. None: all ranks of
            the backend that ``HVD_PERIODIC_COMM`` names; else of Horovod if it is initialized, and of torch.distributed
            if only that is. If the backend is not initialized, and no launcher has started other processes: this
            process alone.

    Raises:
        RuntimeError: the chosen backend is not initialized, and this process is one of several.
        ValueError: this rank is not in the set; or a mesh of several dimensions.
    """
    if isinstance(process_set, Communicator):
        return process_set
    if isfunction(process_set):
        if _chosen() == "torch":
            raise ValueError(
                "A function as `process_set` is for Horovod: over torch.distributed pass a ProcessGroup. "
                f"Received: {process_set!r}"
            )
        return Subset(communicator_of(None), process_set)
    unknown = _unknown()
    chosen = _chosen()
    initialized = _has_torch() if chosen == "torch" else horovod() is not None
    if process_set is None and not initialized and (alone := only_rank()) is not None:
        if unknown is not None:
            raise unknown
        return alone
    communicator = _made(process_set, chosen)
    communicator.problem = unknown or _disagreement()
    return communicator


def everyone() -> tuple[Communicator, Callable[[list[int]], Any]]:
    """Return all ranks of the job, and a function that makes process sets; initializes Horovod if no backend is.

    Raises:
        RuntimeError: the chosen backend is not initialized, or not installed.
    """
    if _chosen() == "torch":
        return TorchDistributedCommunicator(), register_group
    if horovod() is None and find_spec("horovod") is not None:
        importlib.import_module("horovod.torch").init(process_sets="dynamic")
    return _made(None, _chosen()), lambda ranks: register(horovod(), ranks)


def _chosen() -> str:
    """Return the backend to use if no process set implies one; empty if none is initialized."""
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked in ("horovod", "torch"):
        return asked
    return "horovod" if horovod() is not None else "torch" if _has_torch() else ""


def horovod() -> Any:
    """Return Horovod's module if it is initialized, else None; Horovod need not be installed."""
    module = sys.modules.get("horovod.torch")
    return module if module is not None and module.is_initialized() else None


def _made(process_set: Any, chosen: str) -> JobCommunicator:
    if dist.is_available():
        if isinstance(process_set, DeviceMesh):
            return TorchDistributedCommunicator(_of_mesh(process_set))
        if isinstance(process_set, dist.ProcessGroup) or process_set == dist.GroupMember.NON_GROUP_MEMBER:
            return TorchDistributedCommunicator(process_set)
    if process_set is None and chosen == "torch":
        return TorchDistributedCommunicator()
    if process_set is None and not chosen:
        raise RuntimeError(
            "Neither Horovod nor torch.distributed is initialized: call hvd.init() or "
            "torch.distributed.init_process_group() before the optimizer is constructed"
        )
    if find_spec("horovod") is None:
        raise RuntimeError(
            "Horovod is not installed, but the environment or `process_set` asks for it: pass a "
            "torch.distributed.ProcessGroup, a DeviceMesh of one dimension or a communicator. "
            f"Received: {VARIABLE}={os.environ.get(VARIABLE, '')!r}, process_set={process_set!r}"
        )
    return HorovodCommunicator("horovod.torch", process_set, torch.from_numpy)


def _has_torch() -> bool:
    return dist.is_available() and dist.is_initialized()


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of this rank in a mesh."""
    if mesh.ndim != 1:
        raise ValueError(
            "`process_set` must be a DeviceMesh of one dimension: pass the one over which ranks exchange, as in "
            f"mesh[{(mesh.mesh_dim_names or ('replicate',))[0]!r}]. Received: {mesh}"
        )
    return mesh.get_group()


def _unknown() -> ValueError | None:
    """Return an error if the environment variable has an invalid value."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in ("", "horovod", "torch"):
        return None
    return ValueError(f"The environment variable {VARIABLE} must be 'horovod' or 'torch'. Received: {asked!r}")


def _disagreement() -> ValueError | None:
    """Return an error if Horovod and torch.distributed are both initialized and number this rank differently."""
    hvd = horovod()
    if hvd is None or not _has_torch():
        return None
    of_horovod, of_torch = (hvd.rank(), hvd.size()), (dist.get_rank(), dist.get_world_size())
    if of_horovod == of_torch:
        return None
    return ValueError(
        "Horovod and torch.distributed are both initialized and must number ranks equally: this is rank "
        f"{of_horovod[0]} of {of_horovod[1]} of Horovod, and rank {of_torch[0]} of {of_torch[1]} of torch.distributed. "
        "Initialize one of them; or the second with rank and size of the first"
    )
