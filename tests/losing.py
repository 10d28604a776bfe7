"""Ranks that are threads, of which one is lost: in any collective, of whose result only some of the others hear."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from hvd_periodic.comm.threads import ThreadCommunicator
from tests.helpers import outcomes

W = TypeVar("W")


class LostError(Exception):
    """What collectives raise when a rank is lost."""


class Losing:
    """A group of threads in which a rank is lost. What comes to others are copies, as between processes.

    Args:
        group: the threads.
        at: the last collective that takes place, counted from 0.
        ahead: those that hear of the loss in the next one; all others in this one.

    Attributes:
        calls: of this rank, so far.
    """

    def __init__(self, group: Any, at: float, ahead: Collection[int]) -> None:
        self._group, self.calls, self.size = group, 0, group.size
        self.lose(at, ahead)

    def lose(self, at: float, ahead: Collection[int]) -> None:
        """Lose a rank at a collective, counted from the first."""
        self._at, self._ahead = at, ahead

    def abort(self) -> None:
        """End the collectives that ranks wait in with an error."""
        self._group.abort()

    def exchange(self, rank: int, call: tuple[object, ...], value: Any) -> list[Any]:
        """Return what all ranks brought to the same call."""
        number, self.calls = self.calls, self.calls + 1
        if number > self._at:
            raise LostError
        found: list[Any] = self._group.exchange(rank, call, pickle.dumps(value))
        if number == self._at and rank not in self._ahead:
            raise LostError
        return [pickle.loads(each) for each in found]


def together(
    size: int,
    work: Callable[[ThreadCommunicator], Any],
    at: float = float("inf"),
    ahead: Collection[int] = (),
) -> list[Any]:
    """Return what so many ranks find, or that a rank was lost; raise what else they raise.

    Args:
        size: number of ranks.
        work: what they do together.
        at, ahead: which of their collectives is the last one that takes place, as in :class:`Losing`.
    """

    def rank(communicator: ThreadCommunicator) -> Any:
        communicator._group = Losing(communicator._group, at, ahead)  # type: ignore[assignment]
        return work(communicator)

    found = outcomes(size, rank)  # type: ignore[arg-type]
    for each in found:
        if isinstance(each, Exception) and not isinstance(each, LostError):
            raise each
    return found


class Work(Protocol[W]):
    """What ranks do together."""

    def __call__(self, workers: Sequence[W], *, at: float, ahead: Collection[int]) -> list[Any]:
        """Return what :func:`together` returns."""


EVERYWHERE = (0, 1)
"""The first collective in which a rank is lost, and the distance to the next one."""


def lost_anywhere(
    prepare: Callable[[], Sequence[W]], work: Work[W], ahead: int, places: tuple[int, int] = EVERYWHERE
) -> list[Sequence[W]]:
    """Let the last of some workers be lost in each collective of what they do; return those that are left, for each.

    One rank, ``ahead``, has heard what came of the collective, and the others have not. Which are collectives in which
    one is lost, ``places`` says: the first of them, and the distance to the next one.
    """
    found: list[Sequence[W]] = []
    for at in itertools.count(*places):
        workers = prepare()
        outcome = work(workers, at=at, ahead=[ahead])
        if not any(isinstance(each, LostError) for each in outcome):
            break
        found.append(workers[:-1])
    return found
