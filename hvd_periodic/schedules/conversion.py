"""Converts the values that users may pass as a period: an int, a schedule, or a function of the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.schedules.every import Every


@dataclass(frozen=True, repr=False)
class _Function(Schedule):
    """A function of the clock as a schedule."""

    function: Callable[[Clock], int]

    def __call__(self, clock: Clock) -> int:
        """Return the result of the function.

        Raises:
            TypeError: the function treats the clock as a number.
        """
        try:
            return self.function(clock)
        except TypeError as error:
            if Clock.__name__ not in str(error):
                raise
            raise TypeError(
                f"A schedule is called with a clock, not with a number of steps (clock.step): {self!r} at step "
                f"{clock.step} raised {error}"
            ) from error

    def __repr__(self) -> str:
        return repr(self.function)

    @property
    def argument(self) -> Any:
        """The function."""
        return self.function


def as_schedule(period: int | Callable[[Clock], int], argument: str) -> Schedule:
    """Return ``period`` as a schedule; an int becomes :class:`Every`.

    Args:
        period: local steps between exchanges, a schedule, or a function of the clock.
        argument: the caller's name for it, for the error message.

    Raises:
        ValueError: an int below 1.
        TypeError: neither an int nor a callable.

    Example:
        >>> as_schedule(10, "period")
        Every(period=10)
        >>> as_schedule(lambda clock: 1 + clock.round, "period")(Clock(step=30, round=4))
        5
    """
    if isinstance(period, Schedule):
        return period
    if callable(period):
        return _Function(period)
    return Every(require_int(period, f"`{argument}`, unless it is a schedule,", minimum=1))
