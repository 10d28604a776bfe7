"""Steps that libraries take only to make an optimizer create its state, without training."""

from __future__ import annotations

import torch

from hvd_periodic.frames import calling_module
from hvd_periodic.torch.gradient_averaging import innermost, plain_class

_LIBRARIES = ("horovod.torch.functions", "torch.distributed.checkpoint.state_dict")
"""They call ``step()`` with zero gradients: ``hvd.broadcast_optimizer_state``, ``get_optimizer_state_dict``."""

_BETWEEN = ("torch.optim.", "torch.utils.", "torch._dynamo.", "hvd_periodic.")
"""Prefixes of modules whose frames lie between the caller of ``step()`` and ``makes_state_only()``."""


def makes_state_only() -> bool:
    """Return whether the current step is one that a library takes only to create an optimizer's state."""
    return calling_module(_BETWEEN) in _LIBRARIES


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Step the innermost optimizer, and restore the parameters, which weight decay would move.

    An ``hvd.DistributedOptimizer`` would wait for other ranks, so the step of the class that it wraps runs instead.
    """
    plain = innermost(optimizer)
    parameters = [p for group in plain.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        before = [parameter.clone() for parameter in parameters]
        plain_class(plain).step(plain)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
