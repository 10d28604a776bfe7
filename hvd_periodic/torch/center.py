"""Export of the center."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from hvd_periodic.torch.model import original_module_name, original_name
from hvd_periodic.torch.neutral import neutrally
from hvd_periodic.torch.optimizer import PeriodicOptimizer, synchronizer_of
from hvd_periodic.torch.synchronizer import Synchronizer


@neutrally
def center_state_dict(model: torch.nn.Module, optimizer: PeriodicOptimizer | Synchronizer) -> dict[str, Any]:
    """Return ``model.state_dict()`` with the values of the center, under the original names and in the original dtypes.

    For a model that ``torch.compile`` wraps, these are the names in the model that was compiled.

    Averaged buffers have the values of the last exchange; tensors that take no part in exchanges (frozen and local
    parameters, local buffers) have this rank's values. All values are copies. If the center is on every rank, a single
    rank may call this function.

    Args:
        model: the model that was trained, or one that contains its parameters.
        optimizer: its optimizer, or its synchronizer.

    Raises:
        TypeError: ``model`` or ``optimizer`` has another type.
        ValueError: the model holds none of the optimizer's parameters.

    Example::

        if hvd.rank() == 0:
            torch.save(hvdp.center_state_dict(model, optimizer), "model.pt")
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, (PeriodicOptimizer, Synchronizer)):
        raise TypeError(
            "center_state_dict(model, optimizer) takes a module and an optimizer or synchronizer of this package. "
            f"Received: {type(model).__name__}, {type(optimizer).__name__}"
        )
    synchronizer = synchronizer_of(optimizer)
    exchanged = set(map(id, synchronizer.replica.tensors))
    if not any(id(parameter) in exchanged for parameter in model.parameters()):
        raise ValueError(
            "`model` holds none of the parameters that `optimizer` exchanges: pass the model it was made for"
        )
    with nullcontext() if synchronizer.center_reader.in_center_block else synchronizer.center():
        state = model.state_dict()
        renamed: Any = type(state)((original_name(name), value) for name, value in copied(state).items())
    if hasattr(state, "_metadata"):
        renamed._metadata = {original_module_name(name): version for name, version in state._metadata.items()}
    exported: dict[str, Any] = renamed
    return exported


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the values of a model's state dict."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }
