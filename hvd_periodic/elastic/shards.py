"""Shards of the center across a change of ranks: the full center, and shards for the ranks that remain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.sync.synchronizer import ReplicaSynchronizer

Stretch = tuple[str, int, int, Any]
"""A tensor by name, the first and the past-the-last of some of its elements, and their values."""

Vectors = dict[str, dict[str, Any]]
"""Of the center: tensors by name, by what they are."""


@dataclass(frozen=True)
class Share:
    """What one rank holds of the center, in copies.

    Attributes:
        vectors: of the center, by group of tensors and by name.
        optimizer_state: of its optimizer.
    """

    vectors: Mapping[str, Mapping[str, Sequence[Stretch]]]
    optimizer_state: Any


@dataclass(frozen=True)
class FullCenter:
    """The center of all shares, as a checkpoint holds it.

    Attributes:
        vectors: by group of tensors.
        optimizer_state: of the center's optimizer, cut as the shares were.
    """

    vectors: Mapping[str, Vectors]
    optimizer_state: Any

    def within(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a synchronizer's state that lacks the center, with it."""
        vectors = {group: saved | self.vectors.get(group, {}) for group, saved in state["vectors"].items()}
        return {**state, "vectors": vectors, "center_optimizer": self.optimizer_state}


def start_from_center(synchronizer: ReplicaSynchronizer[Any], whole: FullCenter | None) -> None:
    """Let the replica of a rank that joins others, whose center and counters it has, start from the center; local.

    Args:
        synchronizer: of this rank.
        whole: the center, where no rank has the whole of it.
    """
    own = synchronizer.checkpoint.save_own
    synchronizer.startup.start_from_center(None if whole is None else whole.within(own()))
    synchronizer.load_state_dict(synchronizer.state_dict() if whole is None else whole.within(own()))


def merge_group_centers(synchronizer: ReplicaSynchronizer[Any], trained: Collection[int]) -> None:
    """Let the ranks of a group have one center: that of the first of them that has trained; of none, their replica.

    Replicas stay what they are: of ranks that have joined, the center of all.

    Args:
        synchronizer: of this rank, that groups exchange by in step; it has the counters of the others.
        trained: the ranks that have.
    """
    membership = synchronizer.membership
    places = membership.communicator.select(range(membership.communicator.handshake_group.size))
    giver = next((place for place, rank in enumerate(places) if rank in trained), 0)
    joined = places[membership.communicator.rank] not in trained
    if joined:
        synchronizer.startup.start_anew()
    synchronizer.startup.take_center_from(giver)
    if joined:
        synchronizer.load_state_dict(synchronizer.state_dict())


def full_center(synchronizer: ReplicaSynchronizer[Any], state: Mapping[str, Any]) -> FullCenter:
    """Return the center that a synchronizer's state has whole; local."""
    vectors = {
        group.name: {key: state["vectors"][group.name][key] for key in group.center_state}
        for group in synchronizer.tensor_groups
        if not group.placement.everywhere
    }
    return FullCenter(vectors, state["center_optimizer"])


def own_share(synchronizer: ReplicaSynchronizer[Any]) -> Share:
    """Return copies of what this rank holds; local."""
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
    """Return what shares are together; local.

    Args:
        synchronizer: whose tensors they are of, now on any number of ranks.
        shares: all that hold something, by the rank of then.
    """
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
