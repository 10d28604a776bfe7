"""A period that doubles after a fixed number of exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule


@dataclass(frozen=True)
class Doubling(Schedule):
    """Start with a short period and double it after every ``every_rounds`` exchanges.

        τ = min(limit, start · 2^⌊round / every_rounds⌋)

    Args:
        start: local steps of the first rounds; at least 1.
        every_rounds: exchanges after which the period doubles; at least 1.
        limit: the longest period, in local steps; at least ``start``.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1, or ``limit`` is below ``start``.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = Doubling(start=2, every_rounds=3, limit=10)
        >>> [schedule(Clock(round=rounds)) for rounds in range(10)]
        [2, 2, 2, 4, 4, 4, 8, 8, 8, 10]
    """

    start: int = 1
    every_rounds: int = 10
    limit: int = 100

    def __post_init__(self) -> None:
        start = require_int(self.start, "`Doubling(start=...)`", minimum=1)
        every = require_int(self.every_rounds, "`Doubling(every_rounds=...)`", minimum=1)
        limit = require_int(self.limit, "`Doubling(limit=...)`, which is not below `start`,", minimum=start)
        for name, value in (("start", start), ("every_rounds", every), ("limit", limit)):
            object.__setattr__(self, name, value)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        doublings = min(clock.round // self.every_rounds, self.limit.bit_length())
        return min(self.limit, self.start << doublings)
