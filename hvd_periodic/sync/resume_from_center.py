"""Resume from a checkpoint written by a different set of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


def start_from_saved_center(levels: Sequence[ReplicaSynchronizer[Any]], state: Mapping[str, Any]) -> None:
    """Set the replica to a saved center and keep the counters; local; call it once every level's state is loaded.

    Worker vectors, exchanges in flight and error feedback belonged to the former ranks' replicas and are dropped. The
    centers of inner levels start from the same values.

    Args:
        levels: nested optimizers, the outermost first.
        state: the state that the outermost has loaded.
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
