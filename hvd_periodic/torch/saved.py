"""Saved states of models that had other names, or other policies of buffers; or whose parameters are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.torch.divided import as_divided, shard_of
from hvd_periodic.torch.model import NamedTensors, original_name
from hvd_periodic.torch.outer import TorchOuterOptimizer


def translated(state: Any, groups: TensorGroups[Any], named: NamedTensors) -> Any:
    """Return a synchronizer's saved state as one of these groups, as far as it can be.

    Names lose what ``torch.compile`` puts into them. Buffers that were exchanged then and no longer are, are left out;
    those that are exchanged only now start from what they are.
    """
    if not isinstance(state, dict) or not isinstance(state.get("vectors"), Mapping):
        return state
    vectors = {
        name: {key: _renamed(tensors) for key, tensors in saved.items()} for name, saved in state["vectors"].items()
    }
    buffers = {name for name, _ in named.buffers}
    for group in groups.statistics:
        present = dict(zip((s.name for s in group.values.layout.specs), group.values.tensors(), strict=True))
        then = vectors.get(group.name, {}).get("center", {})
        kept = {name: value for name, value in then.items() if name in present or name not in buffers}
        vectors[group.name] = {"center": {name: value.clone() for name, value in present.items()} | kept}
    under_way = state.get("under_way")
    if under_way is not None:
        under_way = under_way | {"snapshot": _renamed(under_way["snapshot"])}
    return state | {"vectors": vectors, "under_way": under_way}


def _renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {original_name(name): tensor for name, tensor in tensors.items()}


def check_moving(state: Mapping[str, Any], outer: Any) -> None:
    """Raise a ValueError where exchanges have passed, and the state of what moves the center is missing.

    ``torch.distributed.checkpoint`` loads what the state that it is given has, and leaves out what else was saved.
    """
    moving, rounds = state.get("center_optimizer"), state.get("counters", {}).get("rounds", 0)
    if not isinstance(outer, TorchOuterOptimizer) or not isinstance(moving, Mapping) or not rounds:
        return
    if not moving.get("state", True) and outer.optimizer.keeps_state():
        raise ValueError(
            f"The state was saved after {rounds} exchanges, and has nothing of the state of {outer.name}, which moves "
            "the center: torch.distributed.checkpoint loads what the state_dict() that it is given has. Call "
            "synchronizer.sync() on all ranks before that"
        )


def divided(state: dict[str, Any], parameters: Mapping[str, Any], names: Sequence[str], outer: Any) -> dict[str, Any]:
    """Return a synchronizer's state in which what belongs to a divided parameter is divided like it.

    So ``torch.distributed.checkpoint`` knows which ranks have what. What is in another shape than the shard, such as
    one n-th of the center, stays as it is.

    Args:
        state: a synchronizer's.
        parameters: those that are divided, by name.
        names: of all that are exchanged, in order.
        outer: what moves the center.
    """
    if not parameters:
        return state

    def like(name: str, value: Any) -> Any:
        owner = parameters.get(name)
        fits = owner is not None and isinstance(value, torch.Tensor) and value.shape == shard_of(owner).shape
        return as_divided(value, owner) if fits else value

    def of_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: like(name, tensor) for name, tensor in tensors.items()}

    vectors = state["vectors"] | {"parameters": {k: of_names(v) for k, v in state["vectors"]["parameters"].items()}}
    under_way, moving = state["under_way"], state["center_optimizer"]
    if under_way is not None:
        under_way = under_way | {"snapshot": of_names(under_way["snapshot"])}
    if isinstance(outer, TorchOuterOptimizer) and moving is not None and "state" in moving:
        owners = [names[number] for group in outer.grouping() for number in group]
        kept = {
            i: {key: like(owners[i], value) for key, value in own.items()}
            for i, own in moving["state"].items()
            if isinstance(i, int)  # What belongs to no parameter has another key.
        }
        moving = moving | {"state": moving["state"] | kept}
    return state | {"vectors": vectors, "under_way": under_way, "center_optimizer": moving}
