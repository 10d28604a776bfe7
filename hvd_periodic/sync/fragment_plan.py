"""Chooses the fragments of the parameters that are exchanged next, spread over the period of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.schedules.base import Clock, Schedule, next_exchange
from hvd_periodic.vectors.fragments import Fragment

_OWN = "fragments."
"""Prefix of the keys that fragments add to a schedule's memory."""


class Position(NamedTuple):
    """The position of training within a period.

    Attributes:
        fragment: index of the fragment of the planned exchange.
        due: local steps at that exchange.
        period: length of the period in local steps.
        periods: number of periods that have ended.
    """

    fragment: int
    due: int
    period: int
    periods: int


def by_fragments(schedule: Schedule, fragments: int) -> Schedule:
    """Return the schedule, split into ``fragments`` exchanges per period unless it already is."""
    if fragments == 1 or isinstance(schedule, FragmentSchedule):
        return schedule
    return FragmentSchedule(schedule, fragments)


@dataclass(frozen=True)
class FragmentSchedule(Schedule):
    """F exchanges within every period τ of a schedule: the f-th after ⌈f τ/F⌉ of its local steps.

    The schedule itself is queried once per period, which its clock counts as one round. An exchange at an unplanned
    step carries all fragments and starts a new period. A synchronous warmup, in which nothing is exchanged, belongs to
    no period.

    Args:
        whole: the schedule by which all parameters are exchanged.
        fragments: F; at least 1, and at most the local steps of every period.

    Raises:
        ValueError: when queried, if a period is shorter than F.

    Example:
        >>> from hvd_periodic import Clock, Every
        >>> schedule, clock, exchanges = FragmentSchedule(Every(10), 4), Clock(), []
        >>> for _ in range(5):
        ...     step, memory = clock.step + schedule(clock), schedule.remember(clock)
        ...     clock = Clock(step=step, round=clock.round + 1, memory=memory)
        ...     exchanges.append(clock.step)
        >>> exchanges
        [3, 5, 8, 10, 13]

    References:
        Douillard et al.: Streaming DiLoCo with overlapping communication. arXiv 2501.18512 (2025).
    """

    whole: Schedule
    fragments: int

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next fragment is exchanged."""
        return self._next(clock).due - clock.step

    def turn(self, clock: Clock) -> int | None:
        """Return the index of the fragment to exchange; None if the exchange was not planned and carries all."""
        place = self._place(clock)
        return place.fragment if place is not None and clock.step == place.due else None

    def periods(self, clock: Clock) -> int:
        """Return the number of periods that had ended before an exchange."""
        place = self._place(clock)
        return 0 if place is None else place.periods

    @property
    def remembers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys of the schedule's memory and of the position in the period."""
        return (*self.whole.remembers, *(_OWN + name for name in Position._fields))

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the schedule's memory and the position in the period."""
        whole = self._of_whole(clock)
        memory = self.whole.remember(whole) if self._begins(clock) else whole.memory
        return {**memory, **{_OWN + name: float(value) for name, value in self._next(clock)._asdict().items()}}

    @property
    def synchronous_until(self) -> int | None:
        """As in the schedule."""
        return self.whole.synchronous_until

    def _place(self, clock: Clock) -> Position | None:
        """Return the position of training; None before it starts."""
        if _OWN + "due" not in clock.memory:
            return None
        return Position(*(int(clock.memory[_OWN + name]) for name in Position._fields))

    def _begins(self, clock: Clock) -> bool:
        """Return whether a new period begins now."""
        turn = self.turn(clock)
        return turn is None or turn + 1 == self.fragments

    def _next(self, clock: Clock) -> Position:
        """Return the position of the next planned exchange."""
        place = self._place(clock)
        if place is not None and not self._begins(clock):
            f, period = place.fragment + 1, place.period
            return place._replace(fragment=f, due=place.due + self._after(f + 1, period) - self._after(f, period))
        whole, begin = self._of_whole(clock), max(clock.step, self.synchronous_until or 0)
        period = next_exchange(self.whole, whole) - begin
        if period < self.fragments:
            raise ValueError(
                f"`fragments` must be at most the local steps of a period, one for each. Received: "
                f"fragments={self.fragments}, and a period of {period} at step {clock.step}"
            )
        return Position(0, begin + self._after(1, period), period, 0 if place is None else place.periods + 1)

    def _after(self, fragments: int, period: int) -> int:
        return -(-fragments * period // self.fragments)

    def _of_whole(self, clock: Clock) -> Clock:
        """Return the clock for the schedule, which does not know about fragments."""
        place, own = self._place(clock), copy(clock)  # Not replace(), which would read fields that may be unknown yet.
        vars(own).update(
            round=0 if place is None else place.periods + 1,
            period=0 if place is None else place.period,
            memory={name: value for name, value in clock.memory.items() if not name.startswith(_OWN)},
        )
        return own


class SinceLastSync(NamedTuple):
    """Steps and gradients since a fragment of the parameters was last exchanged.

    Attributes:
        planned: local steps that the schedule planned.
        pending: local steps taken, on the rank with the most.
        gradients: gradients that this rank accumulated.
    """

    planned: int = 0
    pending: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class FragmentExchange:
    """The exchange of one fragment.

    Attributes:
        fragment: the fragment.
        exchange: the description of the exchange for the algorithm.
    """

    fragment: Fragment
    exchange: Exchange


@dataclass(frozen=True)
class DueFragments:
    """The fragments that are exchanged now.

    Attributes:
        turns: the parameters' fragments; none if no rank has stepped since the last exchange.
        completes: whether a period ends, so that statistics and the state of local optimizers are exchanged too.
        periods: number of periods that had ended before.
        since: for every fragment, the :class:`SinceLastSync` after this exchange; empty if all are zero.
    """

    turns: list[FragmentExchange]
    completes: bool
    periods: int
    since: list[list[int]]

    @property
    def indices(self) -> set[int]:
        """The indices of these fragments."""
        return {turn.fragment.index for turn in self.turns}

    def with_weight(self, weight: float) -> DueFragments:
        """Return a copy in which this rank has the given weight in means."""
        turns = [FragmentExchange(turn.fragment, replace(turn.exchange, weight=weight)) for turn in self.turns]
        return replace(self, turns=turns)

    def with_presence(self, presence: Sequence[Mapping[str, float | None]]) -> DueFragments:
        """Return a copy with the weights of this rank among those present, of each fragment, by parameter."""
        turns = [
            FragmentExchange(turn.fragment, replace(turn.exchange, presence=presence[turn.fragment.index]))
            for turn in self.turns
        ]
        return replace(self, turns=turns)


class FragmentPlan:
    """Chooses the fragments of each exchange: the next one if it is planned, else (and at the end) all changed ones.

    Args:
        fragments: all fragments.
        schedule: the schedule that plans exchanges.

    Example:
        >>> from hvd_periodic import Every
        >>> turns = FragmentPlan([Fragment(0, ()), Fragment(1, ())], FragmentSchedule(Every(9), 2))
        >>> memory = turns.schedule.remember(Clock())
        >>> due = turns.due(3, Clock(step=5, round=1, memory=memory), [], SinceLastSync(5, 5, 4), training=True)
        >>> [(turn.fragment.index, turn.exchange.gradients) for turn in due.turns], due.completes, due.since
        ([(0, 4)], False, [[0, 0, 0], [5, 5, 4]])
        >>> due = turns.due(3, Clock(step=8, round=2, memory=memory), due.since, SinceLastSync(4, 3, 3), training=False)
        >>> [(turn.fragment.index, turn.exchange.gradients) for turn in due.turns], due.completes, due.since
        ([(0, 3), (1, 7)], True, [])
    """

    def __init__(self, fragments: Sequence[Fragment], schedule: Schedule) -> None:
        self.fragments, self.schedule = fragments, schedule

    def due(
        self, size: int, clock: Clock, since: Sequence[Sequence[int]], passed: SinceLastSync, training: bool
    ) -> DueFragments:
        """Return the fragments to exchange.

        Args:
            size: number of workers.
            clock: the clock on which ranks have agreed.
            since: for every fragment, the :class:`SinceLastSync` after the last exchange, as in ``DueFragments.since``.
            passed: steps and gradients since that exchange.
            training: whether some rank continues training afterwards.
        """
        before = since or [SinceLastSync()] * len(self.fragments)
        now = [SinceLastSync(*map(sum, zip(entry, passed, strict=True))) for entry in before]
        turn: int | None = 0
        periods = clock.round - 1
        if isinstance(self.schedule, FragmentSchedule):
            turn, periods = self.schedule.turn(clock), self.schedule.periods(clock)
        turn = turn if training else None
        chosen = [i for i, entry in enumerate(now) if entry.pending] if turn is None else [turn]
        left = [list(SinceLastSync() if i in chosen else entry) for i, entry in enumerate(now)]
        return DueFragments(
            [
                FragmentExchange(self.fragments[i], Exchange(size, now[i].planned, max(now[i].gradients, 1)))
                for i in chosen
            ],
            turn in (None, len(self.fragments) - 1),
            periods,
            left if any(map(any, left)) else [],
        )
