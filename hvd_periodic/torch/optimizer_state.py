"""The state of a torch optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_periodic.torch.copies import fresh_copy
from hvd_periodic.torch.dtypes import as_real
from hvd_periodic.torch.gradient_averaging import innermost, plain_class
from hvd_periodic.torch.replica import TorchReplica
from hvd_periodic.vectors.store import Store

_MARK = 0.73918246
"""A value at which no optimizer state starts unless it copies the parameter."""


class TorchOptimizerState:
    """The state that the local optimizer keeps for every exchanged parameter, in the parameter's shape."""

    complete = False

    def __init__(self, optimizer: torch.optim.Optimizer, replica: TorchReplica) -> None:
        self._optimizer, self._replica = innermost(optimizer), replica
        self._levels = self._optimizer is not optimizer
        self._start: dict[str, float | None] = {}

    def entries(self) -> Mapping[str, Sequence[tuple[str, torch.Tensor]]]:
        """Return the state by the optimizer's keys, such as ``exp_avg``.

        An optimizer has no state for a parameter before its first gradient. As other ranks may have had one of a
        ``"present"`` parameter, zeros stand in, which nothing else reads.
        """
        kept = [
            (name, parameter, key, value)
            for name, parameter in zip(self._replica.names, self._replica.tensors, strict=True)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        ]
        # For a parameter without dimensions, step counters have its shape, too.
        counters = {"step"} | {key for _, parameter, key, value in kept if value.dim() == 0 < parameter.dim()}
        entries: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter, key, value in kept:
            if value.shape == parameter.shape and key not in counters:
                entries.setdefault(key, []).append((name, value))
        return {key: self._completed(key, entries[key]) for key in sorted(entries)}

    def _completed(self, key: str, pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Return an entry with zeros for the present parameters that have no state yet, in the order of parameters."""
        state, present, found = self._optimizer.state, set(self._replica.present), dict(pairs)
        of_name = dict(zip(self._replica.names, self._replica.tensors, strict=True))
        for group in self._optimizer.param_groups:
            members = {id(parameter) for parameter in group["params"]}
            names = [name for name, parameter in of_name.items() if id(parameter) in members]
            begun = [name for name in names if state.get(of_name[name])]
            if not begun or any(name in found for name in begun):
                missing = [name for name in names if name in present and not state.get(of_name[name])]
                found |= {name: torch.zeros_like(of_name[name]) for name in missing}
        return [(name, found[name]) for name in of_name if name in found]

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[torch.Tensor]:
        """Return tensors as a store."""
        return self._replica.store_of(pairs)

    def learn_start(self) -> None:
        """Learn the initial state from one step of a copy, with a gradient of zero."""
        try:
            self._start = _start_of(self._optimizer)
        except Exception as error:
            raise TypeError(
                "`optimizer_state='reset'` and `nonfinite='skip'` need the initial state of "
                f"{type(self._optimizer).__name__}, and a copy that would show it cannot be made "
                f"({type(error).__name__}: {error})"
            ) from error

    def moves_untouched(self, names: Collection[str]) -> str | None:
        """Return what moves rows without gradients: another level or optimizer, momentum, weight decay, max_norm."""
        if self._levels:
            return "an optimizer whose own exchanges move them"
        name = plain_class(self._optimizer).__name__
        if not isinstance(self._optimizer, _SPARSE):
            return f"{name}, which moves all rows, or is not known to leave them alone"
        of_name = dict(zip(self._replica.names, self._replica.tensors, strict=True))
        tables = {id(of_name[each]) for each in names}
        for group in self._optimizer.param_groups:
            for setting in ("momentum", "weight_decay"):
                if group.get(setting) and not tables.isdisjoint(map(id, group["params"])):
                    return f"{name} with {setting}={group[setting]!r}"
        return self._replica.named.renormalizes(tables)

    @torch.no_grad()
    def reset(self, but: Collection[str] = ()) -> None:
        """Set all entries to those of a new optimizer: zeros, the parameters, or values from its settings."""
        of_name = dict(zip(self._replica.names, self._replica.tensors, strict=True))
        for key, pairs in self.entries().items():
            start = self._start.get(key, 0.0)
            for name, tensor in pairs:
                if name in but:
                    continue
                if start is None:
                    tensor.copy_(of_name[name])
                else:
                    as_real(tensor).fill_(start)  # Optimizers fill both parts, as Adagrad does.
        if isinstance(self._optimizer, torch.optim.SGD):  # Momentum starts as None, not as zeros.
            for name, parameter in of_name.items():
                if name not in but and "momentum_buffer" in self._optimizer.state.get(parameter, {}):
                    self._optimizer.state[parameter]["momentum_buffer"] = None


_SPARSE = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)
"""Optimizers that leave rows without gradients alone, without momentum and weight decay."""


def _start_of(optimizer: torch.optim.Optimizer) -> dict[str, float | None]:
    """Return the value that fills each entry of a new optimizer; None for a copy of the parameter."""
    probe = torch.nn.Parameter(torch.full((2, 1), _MARK))
    trial = fresh_copy(optimizer, probe)
    for group in trial.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    probe.grad = torch.zeros_like(probe)
    trial.step()
    kept = {key: value for key, value in trial.state.get(probe, {}).items() if isinstance(value, torch.Tensor)}
    return {
        key: None if torch.equal(value, torch.full((2, 1), _MARK)) else float(value[0, 0])
        for key, value in kept.items()
        if value.shape == probe.shape
    }
