"""A period in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_periodic.arguments import require_real
from hvd_periodic.schedules.base import Clock, Schedule

_SHORTEST = 1e-6
"""Seconds per step; below this, a clock measures only itself."""


@dataclass(frozen=True)
class Seconds(Schedule):
    """As many local steps as the slowest rank takes in a given time.

        τ = max(1, ⌊seconds / (seconds per step of the slowest rank in the round that ends)⌋)

    The first round is one step, for the measurement. Ranks agree on the number of steps, never on clocks. The time of
    exchanges does not count; everything else that happens between steps does.

    Args:
        seconds: time from one exchange to the next; above 0.

    Raises:
        TypeError: ``seconds`` is not a number.
        ValueError: ``seconds`` is not positive and finite.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = Seconds(2.0)
        >>> [schedule(Clock(step_seconds=measured)) for measured in (None, 0.25, 0.3, 5.0)]
        [1, 8, 6, 1]
    """

    seconds: float = 1.0

    def __post_init__(self) -> None:
        require_real(self.seconds, "`Seconds(seconds=...)`", positive=True)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        if clock.step_seconds is None:
            return max(1, clock.period)
        return max(1, int(self.seconds / max(clock.step_seconds, _SHORTEST)))
