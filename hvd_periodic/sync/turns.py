"""Whose turn it is: the parameters are exchanged in fragments, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.sync.counters import Since
from hvd_periodic.vectors.fragments import Fragment


@dataclass(frozen=True)
class Turn:
    """A fragment that is exchanged now.

    Attributes:
        fragment: which.
        exchange: what the algorithm may know.
    """

    fragment: Fragment
    exchange: Exchange


class Turns:
    """Fragments and their turns; a single one has every turn.

    Args:
        fragments: all there are.
        size: number of workers.

    Example:
        >>> turns = Turns([Fragment(0, ()), Fragment(1, ())], size=3)
        >>> since = turns.passed((), Since(5, 5, 5))
        >>> now = turns.take(since, rounds=0, training=True)
        >>> now[0].fragment.index, now[0].exchange
        (0, Exchange(size=3, period=5, gradients=5, learning_rate=None))
        >>> since = turns.passed(turns.left(since, now), Since(4, 4, 3))
        >>> [turn.exchange.gradients for turn in turns.take(since, rounds=1, training=True)]
        [8]
    """

    def __init__(self, fragments: Sequence[Fragment], size: int) -> None:
        self.fragments, self._size = fragments, size

    def passed(self, noted: Sequence[Sequence[int]], more: Since) -> list[Since]:
        """Return what has passed since every fragment was exchanged: what was noted, and since then."""
        return [Since(*before).and_then(more) for before in noted or [Since()] * len(self.fragments)]

    def take(self, since: Sequence[Since], rounds: int, training: bool) -> list[Turn]:
        """Return what is exchanged after so many exchanges: the next fragment; at the end, all that have gone on.

        Args:
            since: of every fragment.
            rounds: exchanges so far.
            training: some rank goes on afterwards.
        """
        count = len(self.fragments)
        due = [rounds % count] if training else [i for i in range(count) if since[i].pending]
        return [
            Turn(self.fragments[i], Exchange(self._size, since[i].planned, max(since[i].gradients, 1))) for i in due
        ]

    def left(self, since: Sequence[Since], turns: Sequence[Turn]) -> list[list[int]]:
        """Return what is to be noted once these are exchanged; nothing where nothing has to be known."""
        exchanged = [turn.fragment.index for turn in turns]
        left = [list(Since() if i in exchanged else since[i]) for i in range(len(since))]
        return left if any(map(any, left)) else []

    def completes(self, rounds: int, training: bool) -> bool:
        """Return whether the exchange after so many is the last of a period."""
        return not training or (rounds + 1) % len(self.fragments) == 0

    def check(self, noted: Sequence[Sequence[int]]) -> None:
        """Raise a ValueError if this was noted of other fragments."""
        if noted and len(noted) != len(self.fragments):
            raise ValueError(
                f"The state was saved in the middle of a period of {len(noted)} fragments: load it with that number. "
                f"Received: fragments={len(self.fragments)}"
            )
