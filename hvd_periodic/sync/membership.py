"""The ranks that train together with this one, and its place among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.training_group import TrainingGroup
from hvd_periodic.journal.lines import Log, log_of


class Membership:
    """With whom a rank exchanges, from whom all start, and under which names.

    Args:
        communicator: the ranks that exchange.
        root: the rank, within the communicator, whose values all start from; where there is none, the first.
        name: prefix of the names of its collectives.

    Attributes:
        asked_root: as given.
        number: of the optimizer among those of its ranks, from its name: 1 for the first.
        together: all ranks that train together, those that average gradients with one that exchanges included.
        in_groups: gradients are averaged at every step inside of groups, between which ranks exchange.
    """

    def __init__(self, communicator: Communicator, root: int, name: str) -> None:
        self.join(communicator, root, name)

    def join(self, communicator: Communicator, root: int, name: str) -> None:
        """Be a member of these ranks, and no longer of those before."""
        self.communicator, self.asked_root, self.name = communicator, root, name
        last = name.rpartition(".")[2]
        self.number = int(last) if last.isdigit() else 0
        self.root = root if root < communicator.size else 0
        self.all_ranks = TrainingGroup(communicator.handshake_group)
        self.in_groups = False

    def require_same_ranks(self) -> None:
        """Raise a RuntimeError where elastic Horovod has changed the ranks; until they meet, nobody else asks."""
        changed = self.communicator.changed() if self.communicator.elastic else None
        if changed is not None:
            raise RuntimeError(changed)

    def average_within(self, group: Communicator, throughout: bool) -> None:
        """Take notice of the ranks that average their gradients with this one; ``throughout`` all of training."""
        self.in_groups = group.size > 1 and throughout
        if not set(group.global_ranks) <= set(self.communicator.global_ranks):
            self.all_ranks.average_within(group)

    @property
    def log(self) -> Log:
        """The log, whose lines say of which optimizer they are, where this process has constructed several."""
        return log_of(self.number_among_several)

    @property
    def number_among_several(self) -> int | None:
        """Which optimizer this is, where these ranks have constructed several."""
        return self.number if self.communicator.handshake_group.constructed > 1 else None

    @property
    def is_root(self) -> bool:
        """Whether all start from the values of this rank."""
        return self.communicator.rank == self.root

    @property
    def is_lockstep_group(self) -> bool:
        """Whether this is one of groups that exchange in step, each by a center of its own."""
        return self.communicator.handshake_group is not self.communicator

    @property
    def center_replicas(self) -> Communicator | TrainingGroup:
        """The ranks that have one center."""
        return self.communicator if self.is_lockstep_group else self.all_ranks

    @property
    def first(self) -> int:
        """That which all start from, among all that meet: :attr:`root`, unless these are one of several groups."""
        return 0 if self.is_lockstep_group else self.root

    @property
    def global_rank(self) -> int:
        """This rank, counted over the job."""
        return self.communicator.global_rank

    @property
    def global_root(self) -> int:
        """The root, counted over the job."""
        return self.communicator.global_ranks[self.root]

    def sender(self, what: str) -> Callable[[Any], Any]:
        """Return a function that gives the ranks that exchange the root's values, one after another."""
        return sender(self.communicator, f"{self.name}.{what}", self.root)

    def senders(self, what: str) -> list[Callable[[Any], Any]]:
        """Return what gives all ranks the root's values: first those that exchange with it, then those of groups."""
        found, together = [self.sender(what)], self.all_ranks
        if together.group is not None:
            found.append(sender(together.group, f"{together.group_name}.{what}", together.group_root))
        return found


def sender(communicator: Communicator, name: str, root: int) -> Callable[[Any], Any]:
    """Return a function that broadcasts one value after the other, under names with a prefix."""
    calls = itertools.count()
    return lambda value: communicator.broadcast(value, f"{name}.{next(calls)}", root)
