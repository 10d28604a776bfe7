"""All ranks that train together: those that exchange, and those that average gradients with one of them."""

from __future__ import annotations

from typing import Any

from hvd_periodic.comm.base import Communicator


class Together:
    """What all of these ranks know of each other, in two hops: inside of a group, then between groups.

    Every group has one member in each set of ranks that exchange, so that two hops reach everybody.

    Args:
        exchanging: the ranks that exchange with this one.

    Attributes:
        group: the ranks whose gradients are averaged with those of this one, where others than ``exchanging`` are among
            them; None otherwise.
        group_name: prefix of the names of its collectives.
        group_root: the member of the group that exchanges with the root of all.
    """

    def __init__(self, exchanging: Communicator) -> None:
        self.exchanging = exchanging
        self.group: Communicator | None = None
        self.group_name = ""
        self.group_root = 0

    @property
    def size(self) -> int:
        """Number of all ranks that train together, as far as sets that overlap in one rank can tell."""
        return self.exchanging.size * (1 if self.group is None else self.group.size)

    @property
    def global_rank(self) -> int:
        """This rank, as the job numbers it."""
        return self.exchanging.global_rank

    def average_within(self, group: Communicator) -> None:
        """Take notice of a group; all of its ranks together."""
        self.group, self.group_name = group, group.unique_name()
        lowest = group.allgather_object(min(self.exchanging.global_ranks), f"{self.group_name}.lowest")
        self.group_root = lowest.index(min(lowest))

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank; ``name`` is the same in all sets of ranks."""
        known = {self.global_rank: value}
        if self.group is not None:
            known = _merged(self.group.allgather_object(known, f"{self.group_name}.{name}"))
        merged = _merged(self.exchanging.allgather_object(known, f"{self.exchanging.meeting_name}.{name}"))
        return dict(sorted(merged.items()))

    def any(self, value: bool) -> bool:
        """Return whether something is true on any of the ranks."""
        return any(self.gather(value, "any").values())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """Return the values of all ranks, in the order of their global ranks."""
        return list(self.gather(value, name).values())


def _merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
    return {rank: value for part in parts for rank, value in part.items()}
