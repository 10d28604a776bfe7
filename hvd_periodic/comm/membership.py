"""The ranks that train together with this one, the root among them, and their groups: the one place that knows them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.comm.base import Communicator
from hvd_periodic.logs import Log, log_of

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


class Membership:
    """The ranks with which this one exchanges, the root, and the names of collectives.

    Args:
        communicator: the ranks that exchange.
        root: the rank, within the communicator, whose values all start from; 0 is used if there is no such rank.
        name: prefix of the names of collectives.

    Attributes:
        requested_root: the ``root`` as given.
        number: number of this optimizer among those of its ranks, as in the name: 1 for the first.
        group: the ranks that average their gradients with this one, if some of them do not exchange with it; else None.
        group_name: prefix of the names of the group's collectives.
        group_root: the member of the group that exchanges with the root of all ranks.
        all_ranks: all ranks that train together, including ranks that average gradients with one that exchanges.
        in_groups: whether gradients are averaged at every step within groups, between which ranks exchange.
    """

    def __init__(self, communicator: Communicator, root: int, name: str) -> None:
        self.join(communicator, root, name)

    def join(self, communicator: Communicator, root: int, name: str) -> None:
        """Replace the ranks, the root and the name."""
        self.communicator, self.requested_root, self.name = communicator, root, name
        last = name.rpartition(".")[2]
        self.number = int(last) if last.isdigit() else 0
        self.root = root if root < communicator.size else 0
        everyone = communicator.handshake_group
        self.all_ranks = TrainingGroup([(everyone, everyone.handshake_name)])
        self.group: Communicator | None = None
        self.group_name, self.group_root = "", 0
        self.in_groups = False

    def require_same_ranks(self) -> None:
        """Raise a RuntimeError if elastic Horovod has changed the ranks; nothing else checks before a handshake."""
        changed = self.communicator.changed() if self.communicator.elastic else None
        if changed is not None:
            raise RuntimeError(changed)

    def average_within(self, group: Communicator, throughout: bool) -> None:
        """Register the ranks that average gradients with this one, ``throughout`` training or for a time."""
        self.in_groups = group.size > 1 and throughout
        if set(group.global_ranks) <= set(self.communicator.global_ranks):
            return
        self.group, self.group_name = group, group.unique_name()
        exchanging = self.communicator.handshake_group.global_ranks
        lowest = group.allgather_object(min(exchanging), f"{self.group_name}.lowest")
        self.group_root = lowest.index(min(lowest))
        self.all_ranks = TrainingGroup([(group, self.group_name), *self.all_ranks.hops])

    @property
    def log(self) -> Log:
        """The log; its lines name the optimizer if these ranks have constructed several."""
        return log_of(self.number_among_several)

    @property
    def number_among_several(self) -> int | None:
        """Number of this optimizer if these ranks have constructed several; else None."""
        return self.number if self.communicator.handshake_group.constructed > 1 else None

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root, from whose values all start."""
        return self.communicator.rank == self.root

    @property
    def is_lockstep_group(self) -> bool:
        """Whether this is one of several groups that exchange in lockstep, each with its own center."""
        return self.communicator.handshake_group is not self.communicator

    @property
    def center_replicas(self) -> Communicator | TrainingGroup:
        """The ranks that share one center."""
        return self.communicator if self.is_lockstep_group else self.all_ranks

    @property
    def root_among_all(self) -> int:
        """The root among all ranks of the handshake: :attr:`root`, or 0 for one of several lockstep groups."""
        return 0 if self.is_lockstep_group else self.root

    @property
    def global_rank(self) -> int:
        """Global rank of this process in the job."""
        return self.communicator.global_rank

    @property
    def global_root(self) -> int:
        """Global rank of the root in the job."""
        return self.communicator.global_ranks[self.root]

    def broadcaster(self, what: str) -> Callable[[Any], Any]:
        """Return a function that broadcasts the root's values to the ranks that exchange, one value per call."""
        return broadcaster(self.communicator, f"{self.name}.{what}", self.root)

    def broadcasters(self, what: str) -> list[Callable[[Any], Any]]:
        """Return functions that broadcast the root's values: among the ranks that exchange, then within groups."""
        return [broadcaster(ranks, f"{name}.{what}", root) for ranks, name, root in self.routes()]

    def routes(self) -> list[tuple[Communicator, str, int]]:
        """Return the ranks to which the root's values travel one after another, each with a prefix and its root."""
        own = [(self.communicator, self.name, self.root)]
        return own if self.group is None else [*own, (self.group, self.group_name, self.group_root)]


def ranks_of_levels(levels: Sequence[Membership]) -> TrainingGroup:
    """Return all ranks of a training with several optimizers, given the ranks of each, the outermost first."""
    hops: dict[tuple[int, ...], Hop] = {}
    for level in reversed(levels):
        for hop in level.all_ranks.hops:
            hops.setdefault(tuple(hop[0].global_ranks), hop)
    return TrainingGroup(list(hops.values()), levels[0].global_root, one_level=len(levels) == 1)


def broadcaster(communicator: Communicator, name: str, root: int) -> Callable[[Any], Any]:
    """Return a function that broadcasts one value per call, under names with a prefix."""
    calls = itertools.count()
    return lambda value: communicator.broadcast(value, f"{name}.{next(calls)}", root)
