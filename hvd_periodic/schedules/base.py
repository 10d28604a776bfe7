"""What a schedule is, and "an int or a schedule"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.every import Every

Schedule: TypeAlias = Callable[[int], int]
"""``schedule(step)`` is the number of local steps from ``step`` to the next exchange, 1 or more; equal on all ranks."""


def as_schedule(period: int | Schedule, argument: str) -> Schedule:
    """Return ``period`` as a schedule; an int becomes :class:`Every`.

    Args:
        period: local steps between exchanges, or a schedule.
        argument: what the caller calls it, for the error message.

    Raises:
        ValueError: an int below 1.
        TypeError: neither an int nor a callable.
    """
    if callable(period):
        return period
    return Every(require_int(period, f"`{argument}`, unless it is a schedule,", minimum=1))


def next_exchange(schedule: Schedule, step: int) -> int:
    """Return the step count at which the first exchange after ``step`` is due.

    Raises:
        TypeError, ValueError: the schedule did not return an int of at least 1.
    """
    return step + require_int(schedule(step), f"The steps that {schedule!r} returned at step {step}", minimum=1)
