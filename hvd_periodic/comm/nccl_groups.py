"""NCCL in the process groups of elastic jobs: what has to be set before, and how groups end in which a rank was lost.

Written from PyTorch's source and documentation, and not yet run on GPUs.

A collective of NCCL with a rank that is lost stays under way on the GPU, and destroying its group waits for it.
Aborting the group ends it. Where several groups have such collectives, NCCL has to abort them together. By default,
PyTorch ends the process when NCCL notices an error; with ``TORCH_NCCL_BLOCKING_WAIT``, whoever waits for the collective
gets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hvd_periodic.comm.rendezvous_settings import NCCL

BACKENDS = "cpu:gloo,cuda:nccl"
"""The backends of a group with NCCL."""

_DEVICE = torch.device("cuda")


def require_nccl() -> None:
    """Let NCCL's errors reach whoever waits; before the first group is made.

    Raises:
        RuntimeError: this process has no NCCL, or no GPU.
    """
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        lacks = "no GPU" if dist.is_available() and dist.is_nccl_available() else "no NCCL in its PyTorch"
        raise RuntimeError(
            f"{NCCL} is set, and this process has {lacks}: unset it for all workers, which use Gloo then"
        )
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"


def connect(group: Any) -> None:
    """Let all ranks of a group connect over NCCL, if it has NCCL: otherwise, its first collective does; collective."""
    for backend in _backends([group]):
        if hasattr(backend, "eager_connect_single_device"):
            backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))


def abort(groups: Iterable[Any]) -> None:
    """End all collectives over NCCL in some groups, together; local."""
    backends = _backends(groups)
    together = backends[0] if backends and hasattr(backends[0], "_group_start") else None
    if together is not None:
        together._group_start()
    for backend in backends:
        backend.abort()
    if together is not None:
        together._group_end()


def _backends(groups: Iterable[Any]) -> list[Any]:
    """Return what carries CUDA tensors in each group, unless Gloo does."""
    of_groups = [group._get_backend(_DEVICE) for group in groups if _DEVICE in group._device_types]
    return [backend for backend in of_groups if backend.name() != "gloo"]
