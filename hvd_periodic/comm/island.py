"""An island of an elastic job: ranks that train together at every step, and leave and join as one worker.

Each rank exchanges with the ranks that have the same position in the other islands. If an island is lost, some of these
sets notice during an exchange, and others after it. Therefore the ranks of an island agree after all communication
between islands, before any of them computes on: if it has failed on one of them, it has failed on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.ranks import by_value

T = TypeVar("T")


class Island:
    """The ranks of this island, of which the first takes part in the rendezvous for all.

    Args:
        ranks: the ranks of the island.

    Attributes:
        ranks: as given.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self._apart = True

    @property
    def is_first(self) -> bool:
        """Whether this rank takes part in the rendezvous."""
        return self.ranks.rank == 0

    def of_first(self, call: Callable[[], T]) -> T:
        """Return the result of a call on the first rank, or raise its error, on all ranks; the ranks then go together.

        Raises:
            Exception: as the call on the first rank.
        """
        told: tuple[T | None, Exception | None] = None, None
        if self.is_first:
            try:
                told = call(), None
            except Exception as error:
                told = None, error
        with self.ranks.tracker.at("the rendezvous of its island"):
            told = self.ranks.broadcast_object(told, "hvd_periodic.island", 0)
        result, failure = told
        self._apart = failure is not None
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def settle(self, alike: str = "", asks: bool = False) -> bool:
        """Return whether any rank of the island asks for something; collective.

        Args:
            alike: what has to be equal on all ranks of the island, in words.
            asks: whether this rank asks.

        Raises:
            RanksLostError: a rank of the island has given up. All of them have to, before the next :meth:`of_first`.
            RuntimeError: the ranks of the island differ; on all of them.
        """
        told = self._told(None, alike, asks)
        lost = {rank: why for rank, (why, _, _) in enumerate(told) if why is not None}
        if lost:
            self._apart = True
            rank, why = next(iter(lost.items()))
            raise RanksLostError(f"Rank {rank} of this island has lost a rank of another island: {why}")
        texts = {rank: text for rank, (_, text, _) in enumerate(told)}
        if len(set(texts.values())) > 1:
            raise RuntimeError(
                f"The ranks of an island differ: {by_value(texts)}. All of them have to load a state, or none, to call "
                "commit() equally often, and to report the same loss to a schedule that reads it"
            )
        return any(asked for _, _, asked in told)

    def give_up(self, error: Exception) -> None:
        """Tell the other ranks of the island that communication has failed here, unless they know; collective."""
        if not self._apart:
            self._apart = True
            self._told(str(error))

    def _told(self, why: str | None, alike: str = "", asks: bool = False) -> list[tuple[str | None, str, bool]]:
        with self.ranks.tracker.at("the agreement of its island"):
            return self.ranks.allgather_object((why, alike, asks), "hvd_periodic.island")
