"""A fixed communication period."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule


@dataclass(frozen=True)
class Every(Schedule):
    """Exchange every ``period`` local steps: at ``period``, ``2 period``, ...

    Args:
        period: local steps between exchanges (τ); at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``period`` is below 1.

    Example:
        >>> from hvd_periodic import Clock
        >>> Every(10)(Clock(step=30))
        10
    """

    period: int = 10

    def __post_init__(self) -> None:
        require_int(self.period, "`Every(period=...)`", minimum=1)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        return self.period

    @property
    def argument(self) -> int:
        """The period."""
        return int(self.period)
