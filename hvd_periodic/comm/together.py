"""All ranks that train together: the ranks that exchange, and the ranks that average gradients with one of these."""

from __future__ import annotations

from typing import Any

from hvd_periodic.comm.base import Communicator


class Together:
    """Gathers values from all of these ranks in two hops: within a group, then between groups.

    Every group has one member in each set of ranks that exchange, so that two hops reach every rank.

    Args:
        exchanging: the ranks that exchange with this one.

    Attributes:
        group: the ranks that average their gradients with this one, if some of them are not in ``exchanging``; None
            otherwise.
        group_name: prefix of the names of the group's collectives.
        group_root: the member of the group that exchanges with the root of all ranks.
    """

    def __init__(self, exchanging: Communicator) -> None:
        self.exchanging = exchanging
        self.group: Communicator | None = None
        self.group_name = ""
        self.group_root = 0

    @property
    def size(self) -> int:
        """Number of all ranks that train together, assuming that the two sets overlap in one rank."""
        return self.exchanging.size * (1 if self.group is None else self.group.size)

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.exchanging.global_rank

    def average_within(self, group: Communicator) -> None:
        """Set the group that averages gradients; collective among its ranks."""
        self.group, self.group_name = group, group.unique_name()
        lowest = group.allgather_object(min(self.exchanging.global_ranks), f"{self.group_name}.lowest")
        self.group_root = lowest.index(min(lowest))

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank; ``name`` is the same in all sets of ranks."""
        known = {self.global_rank: value}
        if self.group is not None:
            known = _merged(self.group.allgather_object(known, f"{self.group_name}.{name}"))
        merged = _merged(self.exchanging.allgather_object(known, f"{self.exchanging.handshake_name}.{name}"))
        return dict(sorted(merged.items()))

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any of the ranks."""
        return any(self.gather(value, "any").values())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """Return the values of all ranks, in the order of their global ranks."""
        return list(self.gather(value, name).values())


def _merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
    return {rank: value for part in parts for rank, value in part.items()}
