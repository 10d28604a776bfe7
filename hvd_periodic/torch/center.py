"""Export of the center."""

from __future__ import annotations

from typing import Any

import torch

from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.synchronizer import Synchronizer


def center_state_dict(model: torch.nn.Module, optimizer: PeriodicOptimizer | Synchronizer) -> dict[str, Any]:
    """Return ``model.state_dict()`` with the values of the center, under the original names and in the original dtypes.

    Averaged buffers have the values of the last exchange; what takes no part in exchanges (frozen parameters, local
    buffers) is this rank's. All values are copies. Nothing is communicated, so one rank may call it alone.

    Args:
        model: the model that was trained, or one that contains its parameters.
        optimizer: its optimizer, or its synchronizer.

    Raises:
        TypeError: another kind of model or optimizer.
        ValueError: the model holds none of the parameters of the optimizer.

    Example::

        if hvd.rank() == 0:
            torch.save(hvdp.center_state_dict(model, optimizer), "model.pt")
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, (PeriodicOptimizer, Synchronizer)):
        raise TypeError(
            "center_state_dict(model, optimizer) takes a module and an optimizer or synchronizer of this package. "
            f"Received: {type(model).__name__}, {type(optimizer).__name__}"
        )
    synchronizer = optimizer.synchronizer if isinstance(optimizer, PeriodicOptimizer) else optimizer
    replica = synchronizer.replica
    parameters, buffers, integers = synchronizer.center_tensors()
    held = dict(zip(map(id, replica.tensors + replica.buffer_tensors), parameters + buffers, strict=True))
    start = 0
    for tensor in replica.integer_tensors:
        held[id(tensor)] = torch.tensor(integers[start : start + tensor.numel()])
        start += tensor.numel()
    state = model.state_dict(keep_vars=True)
    if not any(id(value) in held for value in state.values()):
        raise ValueError(
            "`model` holds none of the parameters that `optimizer` exchanges: pass the model it was made for"
        )
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone()
            state[name] = copy.copy_(held[id(value)].reshape(value.shape)) if id(value) in held else copy
    return state
