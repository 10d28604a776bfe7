"""Copies of shares of a center on other ranks, from which it comes back when ranks are lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_periodic.comm.agreement import join
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.meeting import Purpose
from hvd_periodic.sync.shares import Share, Whole, own_share, put_together
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer

logger = logging.getLogger("hvd_periodic")


@dataclass(frozen=True)
class Mirror:
    """What a rank keeps of a center that no rank has whole.

    Attributes:
        rank: that this one had.
        size: how many ranks there were.
        holders: those that had a share.
        shares: of this rank, and of the one before.
    """

    rank: int
    size: int
    holders: list[int]
    shares: Mapping[int, Share]


def mirrored(synchronizer: ReplicaSynchronizer[Any]) -> Mirror:
    """Give a copy of this rank's share to the next rank; all ranks together. Training begins, if it has not."""
    synchronizer.meeting.meet(Purpose.COMMIT)
    if synchronizer.begin():
        synchronizer.replica.discard_gradients()
    membership, own = synchronizer.membership, own_share(synchronizer)
    communicator = membership.communicator
    before = communicator.pass_object(own, f"{membership.name}.share")
    shares = {(communicator.rank - 1) % communicator.size: before, communicator.rank: own}
    return Mirror(communicator.rank, communicator.size, synchronizer.course.placement.holders, shares)


def recovered(communicator: Communicator, synchronizer: ReplicaSynchronizer[Any], mirror: Mirror | None) -> Whole:
    """Return the center of what the ranks that are left have kept; all ranks together, those that join included.

    Args:
        communicator: the ranks that there are now.
        synchronizer: of this rank, which is one of them.
        mirror: what this rank has kept; None where it joins.

    Raises:
        RuntimeError: a share was lost with its copy; on all ranks.
    """
    kept = mirror and (mirror.rank, mirror.size, mirror.holders)
    told = communicator.allgather_object(kept, "hvd_periodic.mirrors")
    now = {found[0]: rank for rank, found in enumerate(told) if found is not None}
    _, size, holders = next(found for found in told if found is not None)
    givers = {holder: now.get(holder, now.get((holder + 1) % size)) for holder in holders}
    lost = [holder for holder, giver in givers.items() if giver is None]
    if lost:
        raise RuntimeError(
            f"Rank {join(lost)} was lost, and so was the next one, which had the copy of its share of the center: "
            "start the job anew from a checkpoint"
        )
    mine = {} if mirror is None else {h: mirror.shares[h] for h, giver in givers.items() if giver == communicator.rank}
    for holder in mine:
        if mirror is not None and holder != mirror.rank:
            logger.warning(
                "Rank %d was lost: its share of the center comes from the copy that rank %d has kept, now rank %d",
                *(holder, mirror.rank, communicator.rank),
            )
    shares: dict[int, Share] = {}
    for given in communicator.allgather_object(mine, "hvd_periodic.shares"):
        shares.update(given)
    return put_together(synchronizer, shares)
