"""Saved states of models that had other names, or other policies of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.torch.model import NamedTensors, original_name


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
