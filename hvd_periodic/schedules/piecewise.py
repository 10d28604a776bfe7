"""Periods that change at given steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule


@dataclass(frozen=True)
class Piecewise(Schedule):
    """A different period from each of the given steps on.

        τ = the period that is given for the largest step ≤ the present one

    A round that has begun ends as planned.

    Args:
        periods: local steps between exchanges (τ ≥ 1), by the local step from which they apply; one step is 0.
            Steps may be strings, as in JSON.

    Raises:
        TypeError: ``periods`` is not a mapping, or a step or period is not an int.
        ValueError: a period is below 1, a step is negative, or there is no period for step 0.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = Piecewise({0: 1, 1000: 10})
        >>> [schedule(Clock(step=step)) for step in (0, 999, 1000, 5000)]
        [1, 1, 10, 10]
    """

    periods: Mapping[int, int] = field(default_factory=lambda: {0: 1, 100: 10})

    def __post_init__(self) -> None:
        if not isinstance(self.periods, Mapping):
            raise TypeError(
                f"`Piecewise(periods=...)` must be a dict from steps to periods. Received: {self.periods!r}"
            )
        periods = {
            require_int(
                int(step) if isinstance(step, str) and step.isdecimal() else step,
                "Every step in `Piecewise(periods=...)`",
                minimum=0,
            ): require_int(period, f"The period from step {step} on in `Piecewise(periods=...)`", minimum=1)
            for step, period in self.periods.items()
        }
        if 0 not in periods:
            raise ValueError(f"`Piecewise(periods=...)` must hold a period from step 0 on. Received: {self.periods!r}")
        object.__setattr__(self, "periods", dict(sorted(periods.items())))

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        return self.periods[max(step for step in self.periods if step <= clock.step)]

    def __hash__(self) -> int:
        return hash(tuple(self.periods.items()))
