"""Exchanges of fragments, spread over the period of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from hvd_periodic.schedules.base import Clock, Schedule, next_exchange

_OWN = "fragments."
"""Begins the names of what is remembered for fragments."""


class Place(NamedTuple):
    """Where training stands in its periods.

    Attributes:
        fragment: whose turn it is at the planned exchange.
        due: local steps at that exchange.
        period: local steps of the period.
        periods: that have ended before.
    """

    fragment: int
    due: int
    period: int
    periods: int


def streamed(schedule: Schedule, fragments: int) -> Schedule:
    """Return the schedule of so many fragments; one that is of fragments already stays as it is."""
    return schedule if fragments == 1 or isinstance(schedule, Streamed) else Streamed(schedule, fragments)


@dataclass(frozen=True)
class Streamed(Schedule):
    """F exchanges within every period τ of a schedule: the f-th after ⌈f τ/F⌉ of its local steps.

    The schedule itself is asked once in a period, of which its clock counts one round. An exchange at another step than
    was planned carries all fragments, and a new period begins. A synchronous beginning, in which nothing is exchanged,
    belongs to no period.

    Args:
        whole: when all parameters have been exchanged.
        fragments: F; at least 1, and at most the local steps of every period.

    Raises:
        ValueError: when asked, if a period is shorter than F.

    Example:
        >>> from hvd_periodic import Clock, Every
        >>> schedule, clock, exchanges = Streamed(Every(10), 4), Clock(), []
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
        """Return the fragment whose turn it is at an exchange; None if all are exchanged, as nothing was planned."""
        place = self._place(clock)
        return place.fragment if place is not None and clock.step == place.due else None

    def periods(self, clock: Clock) -> int:
        """Return how many periods had ended before an exchange."""
        place = self._place(clock)
        return 0 if place is None else place.periods

    @property
    def remembers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The place in the period, beside what the schedule remembers."""
        return (*self.whole.remembers, *(_OWN + name for name in Place._fields))

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the place in the period, and what the schedule wants to know."""
        whole = self._of_whole(clock)
        memory = self.whole.remember(whole) if self._begins(clock) else whole.memory
        return {**memory, **{_OWN + name: float(value) for name, value in self._next(clock)._asdict().items()}}

    @property
    def synchronous_until(self) -> int | None:
        """As the schedule has it."""
        return self.whole.synchronous_until

    def _place(self, clock: Clock) -> Place | None:
        """Return where training stands; None before it begins."""
        if _OWN + "due" not in clock.memory:
            return None
        return Place(*(int(clock.memory[_OWN + name]) for name in Place._fields))

    def _begins(self, clock: Clock) -> bool:
        """Return whether a period begins now."""
        turn = self.turn(clock)
        return turn is None or turn + 1 == self.fragments

    def _next(self, clock: Clock) -> Place:
        """Return what comes after an exchange, or before the first."""
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
        return Place(0, begin + self._after(1, period), period, 0 if place is None else place.periods + 1)

    def _after(self, fragments: int, period: int) -> int:
        return -(-fragments * period // self.fragments)

    def _of_whole(self, clock: Clock) -> Clock:
        """Return the clock for the schedule, which knows of no fragments."""
        place, own = self._place(clock), copy(clock)  # Not replace(), which would read what may not be known yet.
        vars(own).update(
            round=0 if place is None else place.periods + 1,
            period=0 if place is None else place.period,
            memory={name: value for name, value in clock.memory.items() if not name.startswith(_OWN)},
        )
        return own
