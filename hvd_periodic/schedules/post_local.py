"""Post-local SGD's schedule: synchronous first, periodic later."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import Clock, Schedule


@dataclass(frozen=True)
class PostLocal(Schedule):
    """Exchange after every step until step ``start``, then every ``period`` local steps.

        exchanges at 1, 2, ..., start, start + period, start + 2 period, ...

    Around an ``hvd.DistributedOptimizer`` over the same ranks, that optimizer averages the gradients until step
    ``start`` instead, and then stops.

    Args:
        start: local steps of the synchronous phase; 0 or more.
        period: local steps between exchanges afterwards (τ); at least 1.
        quiet: no exchanges in the synchronous phase, because something else averages the gradients and the replicas are
            equal: the first is at start + period. Around an ``hvd.DistributedOptimizer`` this is always so.

    Raises:
        TypeError: ``start`` or ``period`` is not an int.
        ValueError: ``start`` is negative or ``period`` is below 1.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = PostLocal(start=2, period=8)
        >>> [schedule(Clock(step=step)) for step in range(4)]
        [1, 1, 8, 8]

    References:
        Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD. arXiv 1808.07217 (2018).
    """

    start: int = 100
    period: int = 10
    quiet: bool = False

    def __post_init__(self) -> None:
        require_int(self.start, "`PostLocal(start=...)`", minimum=0)
        require_int(self.period, "`PostLocal(period=...)`", minimum=1)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        if clock.step >= self.start:
            return self.period
        return self.start - clock.step + self.period if self.quiet else 1

    @property
    def synchronous_until(self) -> int | None:
        """``start``, if something else averages the gradients until then."""
        return self.start if self.quiet else None

    def around_averaging(self) -> PostLocal:
        """Return the same schedule, without exchanges in the synchronous phase."""
        return replace(self, quiet=True)
