"""Adapts saved states to other names, to other buffer policies, and to sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.torch.model import NamedTensors, original_name
from hvd_periodic.torch.outer import TorchOuterOptimizer
from hvd_periodic.torch.sharded_parameters import as_sharded, shard_of


def translated(state: Any, groups: TensorGroups[Any], named: NamedTensors) -> Any:
    """Return a synchronizer's saved state, translated to these groups as far as possible.

    The insertions of ``torch.compile`` are removed from names. Buffers that are no longer exchanged are left out;
    buffers that were not exchanged before start from their current values.
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
    in_flight = state.get("under_way")
    if in_flight is not None:
        in_flight = in_flight | {"snapshot": _renamed(in_flight["snapshot"])}
    return state | {"vectors": vectors, "under_way": in_flight}


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return nested values in which the results of a function replace the tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_tensors(change, each) for each in value)
    return value


def _renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {original_name(name): tensor for name, tensor in tensors.items()}


def check_moving(state: Mapping[str, Any], outer: Any) -> None:
    """Raise a ValueError if exchanges have taken place, and the state of the center optimizer is missing.

    ``torch.distributed.checkpoint`` loads only the entries of the state that it is given, and leaves out all others.
    """
    moving, rounds = state.get("center_optimizer"), state.get("counters", {}).get("rounds", 0)
    if not isinstance(outer, TorchOuterOptimizer) or not isinstance(moving, Mapping) or not rounds:
        return
    if not moving.get("state", True) and outer.keeps_state():
        raise ValueError(
            f"The state was saved after {rounds} exchanges, but lacks the state of {outer.name}, which moves the "
            "center: torch.distributed.checkpoint loads only the keys of the state_dict() that it is given. Call "
            "synchronizer.sync() on all ranks before state_dict()"
        )


def with_sharded_tensors(
    state: dict[str, Any], sharded: Mapping[str, Any], names: Sequence[str], outer: Any
) -> dict[str, Any]:
    """Return a synchronizer's state in which the tensors of a sharded parameter are sharded like the parameter.

    This tells ``torch.distributed.checkpoint`` which ranks hold which parts. A tensor in another shape than the shard,
    such as one n-th of the center, stays as it is. ``names`` are those of all exchanged parameters, in order.
    """
    if not sharded:
        return state

    def like(name: str, value: Any) -> Any:
        owner = sharded.get(name)
        fits = owner is not None and isinstance(value, torch.Tensor) and value.shape == shard_of(owner).shape
        return as_sharded(value, owner) if fits else value

    def of_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: like(name, tensor) for name, tensor in tensors.items()}

    of_parameters = [name for name in ("parameters", FROM_ROOT) if name in state["vectors"]]
    vectors = state["vectors"] | {
        group: {key: of_names(tensors) for key, tensors in state["vectors"][group].items()} for group in of_parameters
    }
    in_flight, moving = state["under_way"], state["center_optimizer"]
    if in_flight is not None:
        in_flight = in_flight | {"snapshot": of_names(in_flight["snapshot"])}
    if isinstance(outer, TorchOuterOptimizer) and moving is not None and "state" in moving:
        owners = [names[number] for group in outer.grouping() for number in group]
        kept = {
            i: {key: like(owners[i], value) for key, value in own.items()}
            for i, own in moving["state"].items()
            if isinstance(i, int)  # State that belongs to no parameter has another key.
        }
        moving = moving | {"state": moving["state"] | kept}
    return state | {"vectors": vectors, "under_way": in_flight, "center_optimizer": moving}
