"""Resume from a checkpoint that was written by other ranks, or another number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


def start_from_saved_center(levels: Sequence[ReplicaSynchronizer[Any]], state: Mapping[str, Any]) -> None:
    """Let the replica start from a saved center, with the counters; local, once the state of every level is loaded.

    The worker's vectors, and what was under way or not sent, were of replicas that are no more. The centers of levels
    inside start from the same.

    Args:
        levels: optimizers that are in one another, the outermost first.
        state: that the outermost has loaded.
    """
    outermost = levels[0]
    outermost.startup.start_from_center(state)
    vectors = {
        group.name: {key: state["vectors"][group.name][key] for key in group.center_state}
        | {key: outermost.replica.save(store) for key, store in group.worker.items()}
        for group in outermost.tensor_groups
    }
    progress = outermost.progress
    now = {"counters": asdict(progress.counters), "notes": asdict(progress.notes), "under_way": None}
    outermost.load_state_dict({**state, "vectors": vectors, **now})
    for level in levels[1:]:
        level.exchanger.discard()
        level.tensor_groups.reset()
