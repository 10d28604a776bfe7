"""The state of a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_periodic.torch.center_optimizer import fresh_copy
from hvd_periodic.torch.gradient_averaging import innermost
from hvd_periodic.torch.replica import TorchReplica
from hvd_periodic.vectors.store import Store


class TorchOptimizerState:
    """What a torch optimizer keeps of every parameter that is exchanged, in its shape.

    Args:
        optimizer: the local optimizer.
        replica: the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, replica: TorchReplica) -> None:
        self._optimizer, self._replica = innermost(optimizer), replica
        self._initial: dict[str, float] | None = None

    def entries(self) -> Mapping[str, Sequence[tuple[str, torch.Tensor]]]:
        """Return it by the optimizer's keys, such as ``exp_avg``."""
        kept = [
            (name, parameter, key, value)
            for name, parameter in zip(self._replica.names, self._replica.tensors, strict=True)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]
        # Of a parameter without dimensions, also what counts has its shape.
        counters = {"step"} | {key for _, parameter, key, value in kept if value.dim() == 0 < parameter.dim()}
        entries: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter, key, value in kept:
            if value.shape == parameter.shape and key not in counters:
                entries.setdefault(key, []).append((name, value))
        return {key: entries[key] for key in sorted(entries)}

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[torch.Tensor]:
        """Return tensors as a store."""
        return self._replica.store_of(pairs)

    @torch.no_grad()
    def reset(self) -> None:
        """Fill all with what a new optimizer has: zeros, or what its constructor sets, such as Adagrad's."""
        if self._initial is None:
            self._initial = _initial_values(self._optimizer)
        for key, pairs in self.entries().items():
            for _, tensor in pairs:
                tensor.fill_(self._initial.get(key, 0.0))


def _initial_values(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what the entries start from that exist before the first step."""
    probe = torch.zeros(2)
    state = fresh_copy(optimizer, probe).state.get(probe, {})
    return {key: float(value[0]) for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
