"""Lets a torch replica detect weights that training code assigns."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch

from hvd_periodic.replica import SOME, Replica
from hvd_periodic.torch.divided import shard_of
from hvd_periodic.torch.model import NamedTensors


class WatchedTensors(Replica[torch.Tensor]):
    """The part of a replica that :class:`~hvd_periodic.sync.assigned.Assigned` queries.

    Attributes:
        named: the tensors of the model.
        tensors: the parameters that take part, in order.
    """

    named: NamedTensors
    tensors: list[torch.Tensor]

    how_to_exclude = (
        "Set requires_grad = False on them before the optimizer is made; or register them as buffers, and say what "
        "exchanges make of them: buffers={'PATTERN': 'average'}"
    )
    how_to_exchange = (
        "Change them alike on all ranks; or say what exchanges make of them, if they are buffers: "
        "buffers={'PATTERN': 'average'}, and 'local' if each rank is to have its own"
    )

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return the parameters that have a gradient now, by index."""
        return {i for i in among if self.tensors[i].grad is not None}

    def unexchanged(self) -> dict[str, torch.Tensor]:
        """Return frozen parameters, and buffers that are local by default."""
        frozen = {name: parameter for name, parameter in self.named.parameters if not parameter.requires_grad}
        return frozen | self.named.local_by_default()

    def some_of(self, tensor: Any, like: Any = None) -> np.ndarray:
        """Return some elements of a tensor on any device; none if it is on the meta device."""
        flat = shard_of(tensor).detach()
        flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
        flat = flat[:: max(1, flat.numel() // SOME)]
        if flat.is_meta:
            return np.zeros(0)
        return (flat if like is None else flat.to(like.dtype)).to("cpu", torch.float64).numpy()
