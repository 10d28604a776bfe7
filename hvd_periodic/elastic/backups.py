"""Backups of center shards on other ranks, from which a lost shard is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.elastic.shards import FullCenter, Share, assemble
from hvd_periodic.ranks import named
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


@dataclass(frozen=True)
class ShardBackup:
    """A rank's shard of the center, with the backups of other ranks' shards that it holds.

    Attributes:
        rank: the number of this rank at the time.
        holders: the ranks that had a shard.
        backup_ranks: for each rank, the rank that holds the backup of its shard.
        shares: this rank's shard and the backups that it holds, by rank.
    """

    rank: int
    holders: list[int]
    backup_ranks: list[int]
    shares: Mapping[int, Share]


def backup_ranks(hosts: Sequence[int]) -> list[int]:
    """Return, for each rank, the rank that holds the backup of its shard, given the numbers of their hosts.

    With h hosts, the backup is h/2 hosts further, so that a host and its neighbour may both be lost if there are more
    than three hosts. On a single host, each rank counts as one host.

    Example:
        >>> backup_ranks([0, 0, 0]), backup_ranks([0, 0, 2, 2]), backup_ranks([0, 1, 2, 3])
        ([1, 2, 0], [2, 3, 0, 1], [2, 3, 0, 1])
    """
    if len(set(hosts)) == 1:
        hosts = range(len(hosts))
    members = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    chosen: dict[int, int] = {}
    for number, ranks in enumerate(members):
        others = members[(number + max(1, len(members) // 2)) % len(members)]
        chosen |= {rank: others[place % len(others)] for place, rank in enumerate(ranks)}
    return [chosen[rank] for rank in range(len(hosts))]


def back_up(synchronizer: ReplicaSynchronizer[Any], share: Share) -> ShardBackup:
    """Send a copy of this rank's shard to its backup rank; collective."""
    synchronizer.handshake.meet(Purpose.COMMIT)
    membership = synchronizer.membership
    communicator, name = membership.communicator, f"{membership.name}.share"
    chosen = backup_ranks(communicator.gather_integers(np.array([communicator.host]), f"{name}.hosts").tolist())
    shares = communicator.send_object(share, chosen[communicator.rank], name) | {communicator.rank: share}
    communicator.settle()
    return ShardBackup(communicator.rank, synchronizer.exchanger.placement.holders, chosen, shares)


def restore_center(
    communicator: Communicator,
    synchronizer: ReplicaSynchronizer[Any],
    mirror: ShardBackup | None,
    whole: FullCenter | None,
) -> FullCenter:
    """Restore the center from the shards and backups of the surviving ranks; collective, joining ranks included.

    Args:
        communicator: the current ranks.
        synchronizer: the synchronizer of this rank.
        mirror: this rank's shard and backups, if it has any.
        whole: the full center, if this rank has it from a time when it was not sharded.

    Raises:
        RuntimeError: a shard was lost together with its backup; raised on all ranks.
    """
    kept = mirror and (mirror.rank, mirror.holders, mirror.backup_ranks)
    told = communicator.allgather_object((kept, whole is not None), "hvd_periodic.mirrors")
    complete = [rank for rank, (_, has_whole) in enumerate(told) if has_whole]
    if complete:
        found: FullCenter = communicator.broadcast_object(whole, "hvd_periodic.whole", complete[0])
        return found
    now = {found[0]: rank for rank, (found, _) in enumerate(told) if found is not None}
    _, holders, chosen = next(found for found, _ in told if found is not None)
    sources = {holder: now.get(holder, now.get(chosen[holder])) for holder in holders}
    lost = [holder for holder, source in sources.items() if source is None]
    if lost:
        raise RuntimeError(
            f"Shards of the center were lost together with their backups: the shards of {named(lost)}, with backups on "
            f"{named(chosen[holder] for holder in lost)}. Start the job again from a checkpoint"
        )
    mine = {}
    if mirror is not None:
        mine = {holder: mirror.shares[holder] for holder, source in sources.items() if source == communicator.rank}
    for holder in mine:
        if mirror is not None and holder != mirror.rank:
            synchronizer.membership.log.warning(
                "Rank %d was lost: its shard of the center is restored from the backup on rank %d, now rank %d",
                *(holder, mirror.rank, communicator.rank),
            )
    shares: dict[int, Share] = {}
    for given in communicator.allgather_object(mine, "hvd_periodic.shares"):
        shares.update(given)
    return assemble(synchronizer, shares)
