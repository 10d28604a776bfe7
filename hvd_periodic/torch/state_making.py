"""Steps that libraries take to let an optimizer make its state, and that train nothing."""

from __future__ import annotations

import sys

import torch

from hvd_periodic.torch.gradient_averaging import innermost, plain_class

_LIBRARIES = ("horovod.torch.functions", "torch.distributed.checkpoint.state_dict")
"""They call ``step()`` with gradients of zero: ``hvd.broadcast_optimizer_state``, ``get_optimizer_state_dict``."""

_BETWEEN = ("torch.optim.", "torch.utils.", "torch._dynamo.", "hvd_periodic.")
"""Modules whose frames are between the caller of ``step()`` and what asks."""


def makes_state_only() -> bool:
    """Return whether the step that is being taken is one by which a library makes the state of an optimizer."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _LIBRARIES


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the innermost optimizer step, and take back what it does to the parameters: weight decay would move them.

    Of an ``hvd.DistributedOptimizer``, which would wait for other ranks, the one steps that it was made of.
    """
    plain = innermost(optimizer)
    parameters = [p for group in plain.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        before = [parameter.clone() for parameter in parameters]
        plain_class(plain).step(plain)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
