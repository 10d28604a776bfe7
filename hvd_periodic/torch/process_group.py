"""Initializes torch.distributed with the ranks of Horovod, for trainers that depend on it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.stall_protocol import own_addresses

_store: Any = getattr(dist, "TCPStore", None)
"""None in builds of PyTorch without torch.distributed."""

_NAME = "hvd_periodic.init_process_group"


def init_process_group(backend: str | None = None) -> None:
    """Initialize ``torch.distributed`` with the ranks of Horovod; all ranks call this, after ``hvd.init()``.

    transformers and accelerate get ranks from ``torch.distributed``, and from environment variables that ``torchrun``
    sets: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. This sets
    them, too, with a free port on the host of rank 0. Call it before ``Accelerator()`` and ``TrainingArguments``.

    Args:
        backend: as in ``torch.distributed.init_process_group``. Default: PyTorch's choice for its devices.

    Raises:
        RuntimeError: Horovod is not initialized, or knows only one of several ranks that were started.

    Example::

        hvd.init()
        hvdp.init_process_group()
        accelerator = Accelerator()
    """
    ranks = HorovodCommunicator("horovod.torch", None, torch.from_numpy)
    with ranks.tracker.at("init_process_group()"):
        served = build_on_all(ranks, _NAME, lambda: _served(ranks) if ranks.rank == 0 else None)
        host, port = ranks.broadcast_object(served and (served.host, served.port), _NAME, root=0)
    local_rank, local_size = ranks.on_this_host
    told = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    os.environ.update({variable: str(value) for variable, value in told.items()})
    store = _store(host, port, ranks.size) if served is None else served
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)


def _served(ranks: HorovodCommunicator) -> Any:
    """Return the store through which ranks find each other, on a free port of this host."""
    return _store(own_addresses(ranks.one_host)[0], 0, ranks.size, is_master=True, wait_for_workers=False)
