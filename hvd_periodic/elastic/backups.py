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
    """What a rank keeps of a center that no rank has whole.

    Attributes:
        rank: that this one had.
        holders: the ranks that had a share.
        keepers: who has the copy of the share of each rank.
        shares: of this rank, and copies of those of others, by rank.
    """

    rank: int
    holders: list[int]
    backup_ranks: list[int]
    shares: Mapping[int, Share]


def backup_ranks(hosts: Sequence[int]) -> list[int]:
    """Return the rank that keeps the copy of each rank's share: on the host half of the hosts further.

    So a host and its neighbour may both be lost, if there are more than three. On a single host, each rank counts as a
    host of its own.

    Args:
        hosts: of the ranks, each by a number.

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


def mirrored(synchronizer: ReplicaSynchronizer[Any], share: Share) -> ShardBackup:
    """Give a copy of this rank's share to another rank; all ranks together."""
    synchronizer.handshake.meet(Purpose.COMMIT)
    membership = synchronizer.membership
    communicator, name = membership.communicator, f"{membership.name}.share"
    chosen = backup_ranks(communicator.gather_integers(np.array([communicator.host]), f"{name}.hosts").tolist())
    shares = communicator.send_object(share, chosen[communicator.rank], name) | {communicator.rank: share}
    return ShardBackup(communicator.rank, synchronizer.exchanger.placement.holders, chosen, shares)


def recovered(
    communicator: Communicator,
    synchronizer: ReplicaSynchronizer[Any],
    mirror: ShardBackup | None,
    whole: FullCenter | None,
) -> FullCenter:
    """Return the center of what the ranks that are left have kept; all ranks together, those that join included.

    Args:
        communicator: the ranks that there are now.
        synchronizer: of this rank, which is one of them.
        mirror: what this rank has kept of it, if it has.
        whole: all of it, if this rank has that: of a time when there were no shares.

    Raises:
        RuntimeError: a share was lost with its copy; on all ranks.
    """
    kept = mirror and (mirror.rank, mirror.holders, mirror.backup_ranks)
    told = communicator.allgather_object((kept, whole is not None), "hvd_periodic.mirrors")
    complete = [rank for rank, (_, has_whole) in enumerate(told) if has_whole]
    if complete:
        found: FullCenter = communicator.broadcast_object(whole, "hvd_periodic.whole", complete[0])
        return found
    now = {found[0]: rank for rank, (found, _) in enumerate(told) if found is not None}
    _, holders, chosen = next(found for found, _ in told if found is not None)
    givers = {holder: now.get(holder, now.get(chosen[holder])) for holder in holders}
    lost = [holder for holder, giver in givers.items() if giver is None]
    if lost:
        raise RuntimeError(
            f"Shares of the center were lost together with their copies: those of {named(lost)}, with copies on "
            f"{named(chosen[holder] for holder in lost)}. Start the job again from a checkpoint"
        )
    mine = {} if mirror is None else {h: mirror.shares[h] for h, giver in givers.items() if giver == communicator.rank}
    for holder in mine:
        if mirror is not None and holder != mirror.rank:
            synchronizer.membership.log.warning(
                "Rank %d has gone: its share of the center comes from the copy that rank %d has kept, now rank %d",
                *(holder, mirror.rank, communicator.rank),
            )
    shares: dict[int, Share] = {}
    for given in communicator.allgather_object(mine, "hvd_periodic.shares"):
        shares.update(given)
    return assemble(synchronizer, shares)
