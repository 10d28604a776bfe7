"""The interface of all schedules, and the clock that is passed to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvd_periodic.arguments import require_int

ROUNDING = 1e-6
"""Relative error up to which a real number of steps counts as whole: a learning rate may be a float32."""


@dataclass(frozen=True)
class Clock:
    """The facts on which all ranks agree at an exchange; in asynchronous training, those that one rank knows.

    Args:
        step: local steps so far.
        round: exchanges so far, including the present one; 0 before the first.
        learning_rate: of the local optimizer, on the first of the ranks with the most updates; None if unknown.
        step_seconds: seconds per local step since the last exchange, on the slowest rank; None before the first.
        loss: mean of the losses that training ranks reported since the last exchange; None if there were none.
        period: local steps planned for the round that ends; 0 before the first.
        memory: the numbers that :meth:`Schedule.remember` returned last.
        relative_speed: in asynchronous training, local steps per second of this worker in its last period, relative to
            the fastest worker; None until all workers have told theirs.
    """

    step: int = 0
    round: int = 0
    learning_rate: float | None = None
    step_seconds: float | None = None
    loss: float | None = None
    period: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)
    relative_speed: float | None = None


class Schedule(ABC):
    """Decides when to exchange: a pure function of the clock, the same on all ranks.

    Subclasses are values: frozen dataclasses, whose arguments have defaults.

    Attributes:
        remembers: names of the numbers that :meth:`remember` may return.
        asynchronous_only: the schedule gives workers different numbers of steps, as only asynchronous training allows.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Slower(Schedule):
        ...     first: int = 2
        ...     def __call__(self, clock: Clock) -> int:
        ...         return self.first + clock.round
        >>> Slower()(Clock(step=9, round=3))
        5
    """

    remembers: ClassVar[tuple[str, ...]] = ()
    asynchronous_only: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange, 1 or more.

        It is called before the first step, and at every exchange.
        """

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the numbers that are ``clock.memory`` at the next call; their names are among ``remembers``.

        They are saved and restored with the counters. Default: none.
        """
        return {}

    @property
    def synchronous_until(self) -> int | None:
        """The local step that ends a synchronous phase, in which something else averages the gradients.

        Until then, the replicas are equal and nothing is exchanged. None: there is no such phase.
        """
        return None

    def around_averaging(self) -> Schedule | None:
        """Return this schedule for use around an optimizer that averages gradients in the synchronous phase.

        None: the schedule has no such phase, so that gradients would be averaged forever.
        """
        return None

    @property
    def argument(self) -> Any:
        """The value that a user may pass in place of this object: an int, a function, or the object itself."""
        return self


def next_exchange(schedule: Schedule, clock: Clock) -> int:
    """Return the step count at which the first exchange after ``clock.step`` is due.

    Raises:
        TypeError, ValueError: the schedule did not return an int of at least 1.
    """
    what = f"The steps that {schedule!r} returned at step {clock.step}"
    return clock.step + require_int(schedule(clock), what, minimum=1)
