"""Reshards the state of an outer optimizer for another number of ranks."""

from __future__ import annotations

from typing import Any

from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.outer.stretches import Form, cut, put, stretches_of
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any], form: Form) -> Any:
    """Return the saved state of the center's optimizer, resharded for the current ranks.

    The optimizer of a sharded center is elementwise. State in the shape of a part of the center is therefore
    concatenated and split again; state for a whole tensor, such as Adam's step count, is copied.

    Args:
        saved: the state saved by another number of ranks, with one entry per shard or in full.
        synchronizer: the synchronizer of the current ranks, which exchange synchronously.
        form: the format of the states.
    """
    exchanger, layout = synchronizer.exchanger, synchronizer.tensor_groups.parameters.values.layout
    divided = isinstance(synchronizer.exchanged.outer, PerFragmentOptimizer)
    sharded = isinstance(exchanger.placement, Sharded)
    was_sharded = isinstance(saved, dict) and "sharded" in saved
    shares = saved["sharded"] if was_sharded else [saved]
    count = synchronizer.membership.communicator.size if sharded else 1
    if saved is None or (len(shares) == count and was_sharded == sharded):
        return saved
    made: list[list[Any]] = [[] for _ in range(count)]
    for index, fragment in enumerate(exchanger.context.fragments if divided else [None]):
        states = [share["fragments"][index] if divided else share for share in shares]
        held = [stretches_of(layout, rank, len(shares), fragment) for rank in range(len(shares))]
        whole: dict[int, dict[Any, Any]] = {}
        for state, stretches in zip(states, held, strict=True):
            for stretch, entries in form.entries(state, stretches):
                put(whole.setdefault(stretch[0], {}), stretch, entries, layout, form)
        example = next((rank for rank, stretches in enumerate(held) if stretches), 0)
        for rank in range(count):
            stretches = stretches_of(layout, rank, count, fragment)
            kept = {part: cut(whole[part[0]], part, layout, form) for part in stretches if part[0] in whole}
            made[rank].append(form.state(kept, stretches, states[example], held[example]))
    parts_of_ranks = [{"fragments": parts} if divided else parts[0] for parts in made]
    return {"sharded": parts_of_ranks} if sharded else parts_of_ranks[0]
