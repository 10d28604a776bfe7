"""Whose turn it is: the parameters are exchanged in fragments, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.sync.streamed import Streamed
from hvd_periodic.vectors.fragments import Fragment


class Since(NamedTuple):
    """What has happened since a fragment of the parameters was exchanged.

    Attributes:
        planned: local steps, as the schedule planned them.
        pending: local steps, on the rank with most of them.
        gradients: that this rank accumulated.
    """

    planned: int = 0
    pending: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Turn:
    """A fragment that is exchanged now.

    Attributes:
        fragment: which.
        exchange: what the algorithm may know.
    """

    fragment: Fragment
    exchange: Exchange


@dataclass(frozen=True)
class Due:
    """What is exchanged now.

    Attributes:
        turns: of the parameters; none where nothing has happened since the last exchange.
        completes: a period ends, so that also statistics and the state of local optimizers are exchanged.
        periods: that had ended before.
        noted: what has happened since every fragment was exchanged, once these are; empty where that is nothing.
    """

    turns: list[Turn]
    completes: bool
    periods: int
    noted: list[list[int]]

    def weighing(self, weight: Any) -> Due:
        """Return the same, where this rank counts so much in means."""
        turns = [Turn(turn.fragment, replace(turn.exchange, weight=weight)) for turn in self.turns]
        return self if weight is None else replace(self, turns=turns)


class Turns:
    """Fragments and their turns; a single one has every turn.

    A planned exchange carries the next fragment; any other, and the last of a training, all that have gone on.

    Args:
        fragments: all there are.
        schedule: plans exchanges.

    Example:
        >>> from hvd_periodic import Every
        >>> turns = Turns([Fragment(0, ()), Fragment(1, ())], Streamed(Every(9), 2))
        >>> memory = turns.schedule.remember(Clock())
        >>> due = turns.due(3, Clock(step=5, round=1, memory=memory), [], Since(5, 5, 4), training=True)
        >>> [(turn.fragment.index, turn.exchange.gradients) for turn in due.turns], due.completes, due.noted
        ([(0, 4)], False, [[0, 0, 0], [5, 5, 4]])
        >>> due = turns.due(3, Clock(step=8, round=2, memory=memory), due.noted, Since(4, 3, 3), training=False)
        >>> [(turn.fragment.index, turn.exchange.gradients) for turn in due.turns], due.completes, due.noted
        ([(0, 3), (1, 7)], True, [])
    """

    def __init__(self, fragments: Sequence[Fragment], schedule: Schedule) -> None:
        self.fragments, self.schedule = fragments, schedule

    def due(self, size: int, clock: Clock, noted: Sequence[Sequence[int]], passed: Since, training: bool) -> Due:
        """Return what is exchanged.

        Args:
            size: number of workers.
            clock: that ranks have agreed on.
            noted: what had happened since every fragment was exchanged, at the last exchange of any.
            passed: since then.
            training: some rank goes on afterwards.
        """
        before = noted or [Since()] * len(self.fragments)
        since = [Since(*map(sum, zip(entry, passed, strict=True))) for entry in before]
        turn: int | None = 0
        periods = clock.round - 1
        if isinstance(self.schedule, Streamed):
            turn, periods = self.schedule.turn(clock), self.schedule.periods(clock)
        turn = turn if training else None
        chosen = [i for i, entry in enumerate(since) if entry.pending] if turn is None else [turn]
        left = [list(Since() if i in chosen else entry) for i, entry in enumerate(since)]
        return Due(
            [Turn(self.fragments[i], Exchange(size, since[i].planned, max(since[i].gradients, 1))) for i in chosen],
            turn in (None, len(self.fragments) - 1),
            periods,
            left if any(map(any, left)) else [],
        )
