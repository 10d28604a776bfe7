"""The state of the center's optimizer, cut for another number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.outer.divided import Divided
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.torch.outer import TorchOuterOptimizer
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Layout, chunk

Stretch = tuple[int, int, int]
"""A parameter, and the first and the past-the-last element of a part of it."""


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any]) -> Any:
    """Return what a checkpoint holds of the center's optimizer as these ranks hold it.

    An optimizer whose center may be cut is elementwise: what it keeps in the shape of a part of the center is put
    together to that of the whole, and cut anew; what counts for a whole tensor, such as Adam's steps, is taken over.

    Args:
        saved: of ranks of another number, each with its share or with the whole.
        synchronizer: of these ranks, which exchange synchronously.
    """
    outer, course = synchronizer.exchanged.outer, synchronizer.course
    if saved is None or not isinstance(outer, (TorchOuterOptimizer, Divided)):
        return saved
    divided, layout = isinstance(outer, Divided), synchronizer.tensor_groups.parameters.values.layout
    shares = saved.get("sharded") or [saved]
    first: Any = outer.parts[0] if isinstance(outer, Divided) else outer
    fragments: Sequence[Fragment | None] = course.setting.fragments if divided else [None]
    count = synchronizer.membership.communicator.size if isinstance(course.placement, Sharded) else 1
    made: list[list[Any]] = [[] for _ in range(count)]
    for index, fragment in enumerate(fragments):
        states = [share["fragments"][index] if divided else share for share in shares]
        places = [_places(layout, rank, len(shares), fragment, first.grouping()) for rank in range(len(shares))]
        whole = _put_together(states, places, layout)
        for rank in range(count):
            place = _places(layout, rank, count, fragment, first.grouping())
            made[rank].append(_cut(whole, states[0]["param_groups"], place, layout))
    cut = [{"fragments": parts} if divided else parts[0] for parts in made]
    return {"sharded": cut} if isinstance(course.placement, Sharded) else cut[0]


def _places(
    layout: Layout, rank: int, size: int, fragment: Fragment | None, grouping: Sequence[Sequence[int]]
) -> list[list[Stretch | None]]:
    """Return the parts of parameters that a rank holds, by parameter group; None where it has nothing of one."""
    share = layout if size == 1 else layout.restrict(lambda bucket: chunk(bucket.size, rank, size))
    stretches = list(share.sources)
    if fragment is not None:
        indices = {bucket.index for bucket in fragment.buckets}
        part = share.restrict(lambda bucket: (0, bucket.size if bucket.index in indices else 0))
        of_share = [(share.sources[tensor], start, stop) for tensor, start, stop in part.sources]
        stretches = [(owner, first + start, first + stop) for (owner, first, _), start, stop in of_share]
    return [[s for owner in group for s in stretches if s[0] == owner] or [None] for group in grouping]


def _put_together(states: Sequence[Any], places: Sequence[list[list[Stretch | None]]], layout: Layout) -> Any:
    """Return what is kept of every parameter, by key: flat and whole, or what counts for all of it."""
    whole: dict[int, dict[str, Any]] = {}
    for state, place in zip(states, places, strict=True):
        for index, stretch in _numbered(state["param_groups"], place):
            if stretch is None:
                continue
            owner, start, stop = stretch
            for key, value in state["state"].get(index, {}).items():
                kept = whole.setdefault(owner, {})
                if _in_shape(value, stretch, layout):
                    kept.setdefault(key, value.new_zeros(layout.specs[owner].size))[start:stop] = value.reshape(-1)
                else:
                    kept.setdefault(key, value)
    return whole


def _cut(whole: Any, groups: Sequence[Any], place: list[list[Stretch | None]], layout: Layout) -> dict[str, Any]:
    """Return the state dict of a rank that holds these parts."""
    state: dict[int, dict[str, Any]] = {}
    numbered: list[dict[str, Any]] = []
    for group, stretches in zip(groups, place, strict=True):
        first = sum(len(other["params"]) for other in numbered)
        numbered.append({**group, "params": list(range(first, first + len(stretches)))})
    for index, stretch in _numbered(numbered, place):
        if stretch is None or stretch[0] not in whole:
            continue
        owner, start, stop = stretch
        state[index] = {
            key: value[start:stop].clone().reshape(_shape(stretch, layout))
            if _is_flat(value, owner, layout)
            else copy.deepcopy(value)  # Each counts its own steps.
            for key, value in whole[owner].items()
        }
    return {"state": state, "param_groups": numbered}


def _numbered(groups: Sequence[Any], place: list[list[Stretch | None]]) -> Iterator[tuple[int, Stretch | None]]:
    """Yield the number of every tensor in a state dict, and what it is a part of.

    Raises:
        ValueError: the parameters are grouped otherwise than they were.
    """
    if [len(group["params"]) for group in groups] != [len(stretches) for stretches in place]:
        raise ValueError(
            "The state of the center optimizer was saved with other parameter groups: start anew from the saved center"
        )
    for group, stretches in zip(groups, place, strict=True):
        yield from zip(group["params"], stretches, strict=True)


def _shape(stretch: Stretch, layout: Layout) -> tuple[int, ...]:
    owner, start, stop = stretch
    spec = layout.specs[owner]
    return spec.shape if stop - start == spec.size else (stop - start,)


def _in_shape(value: Any, stretch: Stretch, layout: Layout) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == _shape(stretch, layout)


def _is_flat(value: Any, owner: int, layout: Layout) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == (layout.specs[owner].size,)
