"""Some of the ranks of a communicator, which communicate through collectives of all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import chunk

T = TypeVar("T")


class Subset(Communicator):
    """One of the groups that all ranks are divided into; every group does the same at the same time.

    It replaces a process set if the job can have none: when a rank is lost in a job with process sets, Horovod ends the
    processes of all remaining ranks. Handshakes span all ranks, so that groups agree on when to exchange; data travels
    within groups only, with ``alltoall``: a sum costs each rank as much as a ring, 2 P (m − 1)/m among m ranks.

    Args:
        everyone: all ranks.
        choose: returns the current ranks of this rank's group.

    Raises:
        ValueError: this rank is not in its group, or the group has a rank that does not exist.
    """

    def __init__(self, everyone: Communicator, choose: Callable[[], Iterable[int]]) -> None:
        self._everyone, self._choose = everyone, choose
        self.places = sorted(set(choose()))
        if everyone.rank not in self.places or not set(self.places) <= set(range(everyone.size)):
            raise ValueError(
                f"A function that is passed as `process_set` must return the ranks of the group of this rank "
                f"({everyone.rank}), out of {everyone.size}. Received: {self.places}"
            )
        self.rank, self.size = self.places.index(everyone.rank), len(self.places)
        self.elastic, self.host, self.handshake_name = everyone.elastic, everyone.host, everyone.handshake_name
        self.tracker, self.busy_waits = everyone.tracker, everyone.busy_waits
        self.description = f"{everyone.description}, in groups"

    @property
    def handshake_group(self) -> Communicator:
        """All ranks."""
        return self._everyone

    def select(self, of_all: Sequence[T]) -> list[T]:
        """Return the items of this group's ranks, given the items of all ranks."""
        return [of_all[place] for place in self.places]

    def rebuild(self, everyone: Communicator) -> Communicator:
        """Return this rank's group among the current ranks."""
        return Subset(everyone, self._choose)

    def check(self) -> None:
        """Raise a ValueError on all ranks if some disagree about the members of their group."""
        told = self.handshake_group.allgather_object(self.places, "hvd_periodic.groups")
        for rank, places in enumerate(told):
            other = next((place for place in places if told[place] != places), None)
            if other is not None:
                ranks = self.handshake_group.global_ranks
                raise ValueError(
                    "A function that is passed as `process_set` must divide the ranks into groups. Received: "
                    f"{places} on rank {ranks[rank]}, and {told[other]} on rank {ranks[other]}"
                )

    def unique_name(self, timeout_seconds: object = None, provisional: bool = False) -> str:
        """Return a prefix on which all ranks agree."""
        return self.handshake_group.unique_name(timeout_seconds, provisional)

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the group."""
        return self.select(self.handshake_group.global_ranks)

    def changed(self) -> str | None:
        """Return how the job has changed since construction."""
        return self.handshake_group.changed()

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce one part on each rank; the returned function also gathers the parts."""
        part = self._reduced(buffer, name, {"sum": add, "max": self.handshake_group.maximum}[op])
        return lambda: self.allgather(part(), f"{name}.parts")

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to give each rank its part of the sum."""
        return self._reduced(buffer, name, add)

    def _reduced(self, buffer: Any, name: str, operation: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        """Start to reduce one part of the buffers on each rank, in rank order."""
        bounds = [chunk(len(buffer), place, self.size) for place in range(self.size)]
        finish = self._scatter(buffer, [stop - start for start, stop in bounds], name)
        start, stop = bounds[self.rank]

        def total() -> Any:
            received, count = finish(), stop - start
            return reduce(operation, (received[place * count : (place + 1) * count] for place in range(self.size)))

        return total

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Send the root's buffer to all ranks of the group."""
        if self.rank != root:
            return self._scatter(buffer[:0], [0] * self.size, name)()
        return self._scatter(self.handshake_group.tile(buffer, self.size), [len(buffer)] * self.size, name)()

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Send every rank's buffer to all ranks of the group."""
        return self.begin_allgather(buffer, name, out)()

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to send every rank's buffer to all ranks of the group."""
        return self._scatter(self.handshake_group.tile(buffer, self.size), [len(buffer)] * self.size, name)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to exchange parts."""
        return self._scatter(buffer, [len(buffer) // self.size] * self.size, name)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the values of the group; they are small, and all ranks gather them."""
        return self.select(self.handshake_group.allgather_object(value, name))

    def rank_of(self, global_rank: int | None) -> int:
        """Return the first rank: each group starts from its own.

        Raises:
            ValueError: a root was requested.
        """
        if global_rank is not None:
            raise ValueError(
                "`root_rank` names one rank, but with a function as `process_set` every group starts from its first "
                f"rank. Received: {global_rank!r}"
            )
        return 0

    def _scatter(self, buffer: Any, counts: Sequence[int], name: str) -> Callable[[], Any]:
        """Start to send as many elements as ``counts`` says to each rank of the group, and none to other ranks."""
        of_all = np.zeros(self.handshake_group.size, np.int32)
        of_all[self.places] = counts
        finish = self.handshake_group.scatter(buffer, of_all, name)
        return lambda: finish()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Subset, (self.handshake_group, self._choose)


def require_possible(
    communicator: Communicator, center: str, nonfinite: str, asynchronous: bool, overlap: object = 0
) -> None:
    """Raise a ValueError for options that groups without process sets do not support: they run in lockstep.

    With ``overlap``, all groups would have to wait for an exchange at the same step.
    """
    refused = {
        "asynchronous=True": bool(asynchronous),
        f"center={center!r}": center != "replicated",
        f"nonfinite={nonfinite!r}": nonfinite == "skip",
        f"overlap={overlap!r}": overlap != 0,
    }
    for what, found in refused.items():
        if found and communicator.handshake_group is not communicator:
            raise ValueError(
                f"With a function as `process_set`, groups exchange in lockstep, with a center on every rank. "
                f"Received: {what}"
            )
