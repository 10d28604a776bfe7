"""Exchanges of fragments, spread over the period of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

from hvd_periodic.schedules.base import Clock, Schedule, next_exchange

_PERIOD = "period of fragments"


def streamed(schedule: Schedule, fragments: int) -> Schedule:
    """Return the schedule of so many fragments; one that is of fragments already stays as it is."""
    if fragments == 1 or isinstance(schedule, Streamed):
        return schedule
    return Streamed(schedule, fragments)


@dataclass(frozen=True)
class Streamed(Schedule):
    """F exchanges within every period τ of a schedule: the f-th after ⌈f τ/F⌉ of its local steps.

    The schedule itself is asked once in F exchanges, of which its clock counts one round. A synchronous beginning, in
    which nothing is exchanged, belongs to no period.

    Args:
        whole: when all parameters have been exchanged.
        fragments: F; at least 1, and at most the local steps of every period.

    Raises:
        ValueError: when asked, if a period is shorter than F; or if what it remembers is of other fragments.

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
        exchanged, period = clock.round % self.fragments, self._period(clock)
        waiting = 0
        if exchanged == 0:
            waiting = max((self.synchronous_until or 0) - clock.step, 0)
        return waiting + self._after(exchanged + 1, period) - self._after(exchanged, period)

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the period that has begun, and what the schedule wants to know."""
        whole = self._clock(clock).memory
        if clock.round % self.fragments == 0:
            whole = self.whole.remember(self._clock(clock))
        return {**whole, _PERIOD: float(self._period(clock))}

    @property
    def remembers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The period, beside what the schedule remembers."""
        return (*self.whole.remembers, _PERIOD)

    @property
    def synchronous_until(self) -> int | None:
        """As the schedule has it."""
        return self.whole.synchronous_until

    def _period(self, clock: Clock) -> int:
        """Return the local steps of the period that begins at an exchange, or has begun before it."""
        if clock.round % self.fragments:
            if _PERIOD not in clock.memory:
                raise ValueError(
                    f"Training was saved with another number of fragments than fragments={self.fragments}, after "
                    f"{clock.round} exchanges: load it with that number"
                )
            return int(clock.memory[_PERIOD])
        begin = max(clock.step, self.synchronous_until or 0)
        period = next_exchange(self.whole, self._clock(clock)) - begin
        if period < self.fragments:
            raise ValueError(
                f"`fragments` must be at most the local steps of a period, one for each. Received: "
                f"fragments={self.fragments}, and a period of {period} at step {clock.step}"
            )
        return period

    def _after(self, fragment: int, period: int) -> int:
        return -(-fragment * period // self.fragments)

    def _clock(self, clock: Clock) -> Clock:
        """Return the clock for the schedule, which knows of no fragments."""
        own = copy(clock)  # Not replace(), which would read what may not be known yet.
        vars(own).update(
            round=clock.round // self.fragments,
            period=int(clock.memory.get(_PERIOD, clock.period)),
            memory={name: value for name, value in clock.memory.items() if name != _PERIOD},
        )
        return own
