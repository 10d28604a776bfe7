"""An ``hvd.DistributedOptimizer`` inside: which ranks average their gradients at every step."""

from __future__ import annotations

from typing import Any

import torch

from hvd_periodic.comm.horovod import HorovodCommunicator

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
