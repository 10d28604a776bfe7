"""Periods that change at given steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Another period from each of some steps on.

        τ = the period that is given for the largest step ≤ the present one

    A round that has begun ends as it was planned.

    Args:
        periods: local steps between exchanges (τ ≥ 1), by the local step from which on they hold; one of them is 0.
            Steps may be texts, as JSON has them.

    Raises:
        TypeError: no mapping, or a step or period that is not an int.
        ValueError: a period below 1, a negative step, or none for step 0.

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
