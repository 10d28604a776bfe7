"""What a schedule is, and the clock that it is asked with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvd_periodic.arguments import require_int


@dataclass(frozen=True)
class Clock:
    """What all ranks agree on at an exchange; in asynchronous training, what one rank knows by itself.

    Args:
        step: local steps so far.
        round: exchanges so far, the one that is taking place included; 0 before the first.
        learning_rate: of the local optimizer, on the rank with most updates, the first of several; None if unknown.
        step_seconds: seconds per local step since the last exchange, on the slowest rank; None before the first.
        loss: mean over the ranks that train of what they reported since the last exchange; None if nobody did.
        period: local steps that were planned for the round that ends; 0 before the first.
        memory: what the schedule asked to be remembered when it was asked last, see :meth:`Schedule.remember`.
    """

    step: int = 0
    round: int = 0
    learning_rate: float | None = None
    step_seconds: float | None = None
    loss: float | None = None
    period: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)


class Schedule(ABC):
    """When to exchange: a pure function of the clock, the same on all ranks.

    Subclasses are values: frozen dataclasses, whose arguments have defaults.

    Attributes:
        remembers: names of the numbers that :meth:`remember` may return.

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

    @abstractmethod
    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange, 1 or more.

        It is asked before the first step, and at every exchange.
        """

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the numbers to be known as ``clock.memory`` at the next question; names are among ``remembers``.

        They are saved and restored with the counters. Default: none.
        """
        return {}

    @property
    def synchronous_until(self) -> int | None:
        """The local step at which a synchronous beginning ends, in which something else averages the gradients.

        The replicas are equal so long, and nothing is exchanged. None: there is no such beginning.
        """
        return None

    def around_averaging(self) -> Schedule | None:
        """Return this schedule as it is around an optimizer that averages gradients in the synchronous beginning.

        None: the schedule has no such beginning, so that gradients would be averaged for ever.
        """
        return None

    @property
    def argument(self) -> Any:
        """What a user may pass in place of this object: an int, a function, or the object itself."""
        return self


def next_exchange(schedule: Schedule, clock: Clock) -> int:
    """Return the step count at which the first exchange after ``clock.step`` is due.

    Raises:
        TypeError, ValueError: the schedule did not return an int of at least 1.
    """
    what = f"The steps that {schedule!r} returned at step {clock.step}"
    return clock.step + require_int(schedule(clock), what, minimum=1)
