"""The center across a change of ranks: the full center, its shards, and how the ranks that remain start from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_periodic.sync.synchronizer import ReplicaSynchronizer

Stretch = tuple[str, int, int, Any]
"""A part of a tensor: the tensor's name, the first and the past-the-last element, and the values."""

Vectors = dict[str, dict[str, Any]]
"""State of the center: by key, tensors by name."""


@dataclass(frozen=True)
class Share:
    """A copy of one rank's shard of the center.

    Attributes:
        vectors: stretches of the center's state, by tensor group and by key.
        optimizer_state: state of the center's optimizer on this rank.
    """

    vectors: Mapping[str, Mapping[str, Sequence[Stretch]]]
    optimizer_state: Any


@dataclass(frozen=True)
class FullCenter:
    """The full center, in the format of a checkpoint.

    Attributes:
        vectors: state of the center, by tensor group.
        optimizer_state: state of the center's optimizer, sharded as on the ranks that held the shards.
    """

    vectors: Mapping[str, Vectors]
    optimizer_state: Any

    def within(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a synchronizer's state that lacks the center, completed with it."""
        vectors = {group: saved | self.vectors.get(group, {}) for group, saved in state["vectors"].items()}
        return {**state, "vectors": vectors, "center_optimizer": self.optimizer_state}


def start_from_center(synchronizer: ReplicaSynchronizer[Any], whole: FullCenter | None) -> None:
    """Set the replica of a joining rank, which already has the others' center and counters, to the center; local.

    ``whole`` is the full center, if no rank holds all of it.
    """
    own = synchronizer.checkpoint.save_own
    synchronizer.startup.start_from_center(None if whole is None else whole.within(own()))
    synchronizer.load_state_dict(synchronizer.state_dict() if whole is None else whole.within(own()))


def start_from_saved_center(levels: Sequence[ReplicaSynchronizer[Any]], state: Mapping[str, Any]) -> None:
    """Set the replica to a center that other ranks saved, and keep the counters; local; call it with all states loaded.

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


def merge_group_centers(synchronizer: ReplicaSynchronizer[Any], trained: Collection[int]) -> None:
    """Give the ranks of a lockstep group one center: that of its first rank that has trained, else its first replica.

    Replicas do not change. A rank that has joined already has the counters of the others, and its replica is the
    center of all ranks.
    """
    membership = synchronizer.membership
    places = membership.communicator.select(range(membership.communicator.handshake_group.size))
    source = next((place for place, rank in enumerate(places) if rank in trained), 0)
    joined = places[membership.communicator.rank] not in trained
    if joined:
        synchronizer.startup.start_from_replica()
    synchronizer.startup.broadcast_center_from(source)
    if joined:
        synchronizer.load_state_dict(synchronizer.state_dict())


def full_center(synchronizer: ReplicaSynchronizer[Any], state: Mapping[str, Any]) -> FullCenter:
    """Return the full center in a synchronizer's state; local."""
    vectors = {
        group.name: {key: state["vectors"][group.name][key] for key in group.center_state}
        for group in synchronizer.tensor_groups
        if not group.placement.everywhere
    }
    return FullCenter(vectors, state["center_optimizer"])


def own_share(synchronizer: ReplicaSynchronizer[Any]) -> Share:
    """Return a copy of this rank's shard of the center; local."""
    vectors: dict[str, dict[str, Sequence[Stretch]]] = {}
    for group in synchronizer.tensor_groups:
        if group.placement.everywhere:
            continue
        names = [spec.name for spec in group.values.layout.specs]
        vectors[group.name] = {}
        for key, store in group.center_state.items():
            saved = synchronizer.replica.save(store)
            places = zip(group.shard.specs, group.shard.sources, strict=True)
            vectors[group.name][key] = [(names[t], start, stop, saved[spec.name]) for spec, (t, start, stop) in places]
    return Share(vectors, synchronizer.exchanged.center_optimizer.state())


def assemble(synchronizer: ReplicaSynchronizer[Any], shares: Mapping[int, Share]) -> FullCenter:
    """Assemble the full center from all shards that are not empty, by the rank that held them; local."""
    vectors: dict[str, Vectors] = {}
    for group in synchronizer.tensor_groups:
        if group.placement.everywhere:
            continue
        whole = vectors[group.name] = {
            key: synchronizer.replica.save(synchronizer.replica.new_temporary_store(group.values.layout))
            for key in group.center_state
        }
        for share in shares.values():
            for key, stretches in share.vectors[group.name].items():
                for name, start, stop, values in stretches:
                    whole[key][name].reshape(-1)[start:stop] = values.reshape(-1)
    if synchronizer.exchanged.outer is None:
        return FullCenter(vectors, None)
    states = {rank: share.optimizer_state for rank, share in shares.items()}
    return FullCenter(vectors, synchronizer.exchanger.placement.united(states))
