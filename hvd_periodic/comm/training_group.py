"""All ranks that train together: the ranks that exchange, and the ranks that average gradients with one of these."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_periodic.comm.base import Communicator


class TrainingGroup:
    """Gathers values from all ranks that train together, in hops: each gathers within one set of ranks.

    The ranks that exchange are one hop. If they average gradients with ranks outside their set, there are two: within
    the group that averages, then between groups. Every group has one member in each set of ranks that exchange, so
    that two hops reach every rank. A training with several optimizers has the hops of all of them.

    Args:
        exchanging: the ranks that exchange with this one.

    Attributes:
        exchanging: as given.
        group: the ranks that average their gradients with this one, if some of them are not in ``exchanging``; None
            otherwise.
        group_name: prefix of the names of the group's collectives.
        group_root: the member of the group that exchanges with the root of all ranks.
        root: the global rank from which all ranks start.
        one_level: all ranks take part in an exchange of the outermost optimizer.
    """

    def __init__(self, exchanging: Communicator) -> None:
        self.exchanging = exchanging
        self.group: Communicator | None = None
        self.group_name = ""
        self.group_root = 0
        self.root = 0
        self.one_level = True
        self._parts: Sequence[TrainingGroup] = ()

    @classmethod
    def of_levels(cls, levels: Sequence[TrainingGroup], root: int) -> TrainingGroup:
        """Return all ranks of a training with several optimizers.

        Args:
            levels: the ranks that train together with this one, for each optimizer, innermost first.
            root: the global rank from which all ranks start.
        """
        known: list[list[int]] = []
        parts: list[TrainingGroup] = []
        for level in levels:
            new = [members for members in level.levels if members not in known]
            if new:
                known += new
                parts.append(level)
        whole = cls(levels[-1].exchanging)
        whole.root, whole.one_level, whole._parts = root, len(levels) == 1, parts
        return whole

    @property
    def levels(self) -> list[list[int]]:
        """The sets of global ranks of all hops, innermost first."""
        found: list[list[int]] = []
        for communicator, _ in self._hops():
            if communicator.global_ranks not in found:
                found.append(communicator.global_ranks)
        return found

    def _hops(self) -> Iterator[tuple[Communicator, str]]:
        """Yield the sets of ranks that gather, each with a prefix for the names of its collectives."""
        for level in self._parts or (self,):
            if level.group is not None:
                yield level.group, level.group_name
            yield level.exchanging, level.exchanging.handshake_name

    def average_within(self, group: Communicator) -> None:
        """Set the group that averages gradients; collective among its ranks."""
        self.group, self.group_name = group, group.unique_name()
        lowest = group.allgather_object(min(self.exchanging.global_ranks), f"{self.group_name}.lowest")
        self.group_root = lowest.index(min(lowest))

    @property
    def size(self) -> int:
        """Number of all ranks, as the sets of two hops overlap in one rank."""
        return math.prod(communicator.size for communicator, _ in self._hops())

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.exchanging.global_rank

    @property
    def is_root(self) -> bool:
        """Whether all ranks start from this one."""
        return self.global_rank == self.root

    @property
    def fingerprint(self) -> str:
        """A text that is equal whenever this rank trains among the same ranks."""
        return hashlib.sha256(json.dumps([self.global_rank, self.levels]).encode()).hexdigest()[:16]

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank; ``name`` is the same in all sets of ranks. Collective."""
        known = {self.global_rank: value}
        for communicator, prefix in self._hops():
            parts = communicator.allgather_object(known, f"{prefix}.{name}")
            known = {rank: found for part in parts for rank, found in part.items()}
        return dict(sorted(known.items()))

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any of the ranks. Collective."""
        return any(self.gather(value, "any").values())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """Return the values of all ranks, in the order of their global ranks."""
        return list(self.gather(value, name).values())

    def alive(self) -> bool:
        """Return whether the ranks can still reach each other."""
        return all(communicator.alive() for communicator, _ in self._hops())
