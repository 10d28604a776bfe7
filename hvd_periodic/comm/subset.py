"""Some of the ranks of a communicator, which reach each other through collectives of all."""

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

    It stands in for a process set where there can be none: Horovod ends the process of every rank that is left, when
    one is lost in a job with process sets. All ranks meet, so that groups agree when to exchange, and data travels
    inside of groups only, by ``alltoall``: a sum costs each rank what a ring costs, 2 P (m − 1)/m among m ranks.

    Args:
        everyone: all ranks.
        choose: returns the ranks of this one's group, as there are now.

    Raises:
        ValueError: this rank is not in its group, or another is not there.
    """

    def __init__(self, everyone: Communicator, choose: Callable[[], Iterable[int]]) -> None:
        self._everyone, self._choose = everyone, choose
        self.places = sorted(set(choose()))
        if everyone.rank not in self.places or not set(self.places) <= set(range(everyone.size)):
            raise ValueError(
                f"A function that is passed as `process_set` must return the ranks of the group of this one "
                f"({everyone.rank}), out of {everyone.size}. Received: {self.places}"
            )
        self.rank, self.size = self.places.index(everyone.rank), len(self.places)
        self.elastic, self.host, self.meeting_name = everyone.elastic, everyone.host, everyone.meeting_name
        self.attendance, self.waits_busily = everyone.attendance, everyone.waits_busily
        self.description = f"{everyone.description}, in groups"

    @property
    def meets_with(self) -> Communicator:
        """All ranks."""
        return self._everyone

    def among(self, of_all: Sequence[T]) -> list[T]:
        """Return what there is of the ranks of this group."""
        return [of_all[place] for place in self.places]

    def anew(self, everyone: Communicator) -> Communicator:
        """Return this rank's group among the ranks that there are now."""
        return Subset(everyone, self._choose)

    def check(self) -> None:
        """Raise a ValueError on all ranks where some do not agree on who is in their group."""
        told = self.meets_with.allgather_object(self.places, "hvd_periodic.groups")
        for rank, places in enumerate(told):
            other = next((place for place in places if told[place] != places), None)
            if other is not None:
                ranks = self.meets_with.global_ranks
                raise ValueError(
                    "A function that is passed as `process_set` must divide the ranks into groups. Received: "
                    f"{places} on rank {ranks[rank]}, and {told[other]} on rank {ranks[other]}"
                )

    def unique_name(self, timeout_seconds: object = None, provisional: bool = False) -> str:
        """Return a prefix on which all ranks agree."""
        return self.meets_with.unique_name(timeout_seconds, provisional)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the group as the job numbers them."""
        return self.among(self.meets_with.global_ranks)

    def changed(self) -> str | None:
        """Return how the job has changed since construction."""
        return self.meets_with.changed()

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce parts, a part on each rank; these are gathered where the result is waited for."""
        part = self._reduced(buffer, name, {"sum": add, "max": self.meets_with.larger}[op])
        return lambda: self.allgather(part(), f"{name}.parts")

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to give every rank its part of all."""
        return self._reduced(buffer, name, add)

    def _reduced(self, buffer: Any, name: str, operation: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        """Start to reduce a part of all on every rank, in the order of ranks."""
        bounds = [chunk(len(buffer), place, self.size) for place in range(self.size)]
        finish = self._scatter(buffer, [stop - start for start, stop in bounds], name)
        start, stop = bounds[self.rank]

        def total() -> Any:
            received, count = finish(), stop - start
            return reduce(operation, (received[place * count : (place + 1) * count] for place in range(self.size)))

        return total

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Give what one rank has to all."""
        if self.rank != root:
            return self._scatter(buffer[:0], [0] * self.size, name)()
        return self._scatter(self.meets_with.repeated(buffer, self.size), [len(buffer)] * self.size, name)()

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Give what every rank has to all."""
        return self.begin_allgather(buffer, name, out)()

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to give what every rank has to all."""
        return self._scatter(self.meets_with.repeated(buffer, self.size), [len(buffer)] * self.size, name)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to exchange parts."""
        return self._scatter(buffer, [len(buffer) // self.size] * self.size, name)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the values of the group; they are small, and all ranks gather them."""
        return self.among(self.meets_with.allgather_object(value, name))

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the integers of the group."""
        return np.concatenate(self.allgather_object(values, name))

    def rank_of(self, global_rank: int | None) -> int:
        """Return the first rank: each group starts from its own.

        Raises:
            ValueError: another one was asked for.
        """
        if global_rank is not None:
            raise ValueError(
                "`root_rank` is one rank, and with a function as `process_set` every group starts from its first. "
                f"Received: {global_rank!r}"
            )
        return 0

    def _scatter(self, buffer: Any, counts: Sequence[int], name: str) -> Callable[[], Any]:
        """Start to give the ranks of the group so many elements each, and no others any."""
        of_all = np.zeros(self.meets_with.size, np.int32)
        of_all[self.places] = counts
        finish = self.meets_with.scatter(buffer, of_all, name)
        return lambda: finish()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Subset, (self.meets_with, self._choose)


def require_possible(
    communicator: Communicator, center: str, nonfinite: str, overlap: object, asynchronous: bool
) -> None:
    """Raise a ValueError for what groups do not do that are none of Horovod's: they stay in step with each other.

    Args:
        communicator: the ranks that exchange.
        center: where the center is to live.
        nonfinite: what is to become of a rank that is not finite.
        overlap: local steps that an exchange is under way: where it is waited for, all groups have to be.
        asynchronous: whether ranks exchange without waiting for each other.
    """
    refused = {
        "asynchronous=True": bool(asynchronous),
        f"center={center!r}": center != "replicated",
        f"nonfinite={nonfinite!r}": nonfinite == "skip",
        f"overlap={overlap!r}": overlap != 0,
    }
    for what, found in refused.items():
        if found and communicator.meets_with is not communicator:
            raise ValueError(
                f"With a function as `process_set`, groups exchange in step, by a center on every rank. "
                f"Received: {what}"
            )
