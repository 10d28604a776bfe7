"""All ranks that train together: the ranks that exchange, and the ranks that average gradients with one of these."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.comm.base import Communicator

Hop = tuple[Communicator, str]
"""A set of ranks that gathers, with a prefix for the names of its collectives."""


@dataclass(frozen=True)
class TrainingGroup:
    """Gathers values from all ranks that train together, in hops: each gathers within one set of ranks.

    The ranks that exchange are one hop. If they average gradients with ranks outside their set, there are two: within
    the group that averages, then between groups. Every group has one member in each set of ranks that exchange, so
    that two hops reach every rank. A training with several optimizers has the hops of all of them.

    Attributes:
        hops: the sets of ranks, all different, innermost first; this rank is in each of them.
        root: the global rank from which all ranks start.
        one_level: all ranks take part in an exchange of the outermost optimizer.
    """

    hops: Sequence[Hop]
    root: int = 0
    one_level: bool = True

    @property
    def size(self) -> int:
        """Number of all ranks, as two sets overlap in one rank."""
        return math.prod(communicator.size for communicator, _ in self.hops)

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.hops[-1][0].global_rank

    @property
    def is_root(self) -> bool:
        """Whether all ranks start from this one."""
        return self.global_rank == self.root

    @property
    def fingerprint(self) -> str:
        """A text that is equal whenever this rank trains among the same ranks."""
        sets = [communicator.global_ranks for communicator, _ in self.hops]
        return hashlib.sha256(json.dumps([self.global_rank, sets]).encode()).hexdigest()[:16]

    def gather(self, value: Any, name: str) -> dict[int, Any]:
        """Return the values of all ranks, by global rank; ``name`` is the same in all sets of ranks. Collective."""
        known = {self.global_rank: value}
        for communicator, prefix in self.hops:
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
        return all(communicator.alive() for communicator, _ in self.hops)
