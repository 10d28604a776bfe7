"""What a rank begins again with that was left out of an exchange."""

from __future__ import annotations

from typing import TypeVar

from hvd_periodic.sync.course import Setting
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.tensor_groups import TensorGroups

V = TypeVar("V")


def start_again(groups: TensorGroups[V], setting: Setting[V], problem: str | None) -> None:
    """Let this rank start from the centers, with a new state of its local optimizer, where its replica is not finite.

    All ranks together, unless every rank can read the centers by itself.

    Args:
        groups: what is exchanged.
        setting: of the exchange.
        problem: what is not finite here; None on ranks that only help to read the centers.
    """
    membership = setting.membership
    for group in groups:
        for bucket in group.values.layout.buckets:
            center = group.fetch(membership.communicator, bucket, membership.name)
            if problem is not None:
                group.start_from(bucket, center)
    if problem is None:
        return
    if setting.local_optimizer is not None:
        setting.local_optimizer.reset()
    tell(membership, problem)


def tell(membership: Membership, problem: str) -> None:
    """Say in the log that this rank is left out."""
    rank = membership.communicator.global_rank
    membership.log.warning("Rank %d is left out of an exchange, and starts again from the center: %s", rank, problem)
