"""An ``hvd.DistributedOptimizer`` inside: which ranks average their gradients at every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.schedules import PostLocal, Schedule

NEVER = 2**60
"""Backward passes until a DistributedOptimizer averages gradients that it is to leave alone."""


def innermost(optimizer: Any) -> Any:
    """Return what the optimizers of this package, one in the other, are around."""
    while hasattr(optimizer, "synchronizer"):
        optimizer = optimizer.inner
    return optimizer


def averaged_by(optimizer: Any) -> HorovodCommunicator | None:
    """Return the ranks whose gradients a DistributedOptimizer averages; None of another optimizer.

    Raises:
        TypeError: it is one that averages something else.
        ValueError: it is for ranks of which this is none.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "skip_synchronize"):
        return None
    if not hasattr(optimizer, "process_set"):
        raise TypeError("An hvd.DistributedOptimizer with op=hvd.Adasum has no local steps: use op=hvd.Average")
    return HorovodCommunicator("horovod.torch", optimizer.process_set, torch.from_numpy)


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the innermost optimizer; of a DistributedOptimizer, the one that it was made of."""
    inner = innermost(optimizer)
    return type(inner).__bases__[0] if hasattr(inner, "skip_synchronize") else type(inner)


def post_local(
    communicator: Communicator, averaged: HorovodCommunicator | None, schedule: Schedule
) -> PostLocal | None:
    """Return the schedule of exchanges that begin where the averaging of gradients over the same ranks ends, if so.

    Raises:
        ValueError: the exchanging ranks average their gradients at every step, so that no exchange changes anything.
    """
    if averaged is None or communicator.size == 1:
        return None
    exchanging = set(getattr(communicator, "ranks", range(communicator.size)))
    if not exchanging <= set(averaged.ranks):
        return None
    if isinstance(schedule, PostLocal) and exchanging == set(averaged.ranks):
        return replace(schedule, quiet=True)
    raise ValueError(
        f"The hvd.DistributedOptimizer inside averages the gradients of ranks {averaged.ranks} at every step, and "
        f"these exchange among themselves ({sorted(exchanging)}), so that nothing would be left to exchange. Remove "
        "it; or average inside of groups and exchange between them, with groups = hvdp.node_groups(), "
        "hvd.DistributedOptimizer(..., process_set=groups.local) and process_set=groups.cross here; or stop averaging "
        "at a step, with period=hvdp.PostLocal(start=..., period=...)"
    )
