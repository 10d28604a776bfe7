"""The quadratic synchronization rule: a period that grows as the learning rate falls."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.schedules.base import ROUNDING, Clock, Schedule

_NEVER = 2.0**60
"""More local steps than any training takes."""


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronization rule.

        τ = max(base, ⌊(coefficient / γ)^power⌋)

    with the learning rate γ at the beginning of the round. In a warm-up, where a small γ would mean endless
    periods, γ is the peak rate.

    Args:
        base: the shortest period (H_base), in local steps; at least 1.
        coefficient: α > 0, in units of the learning rate: the rate below which periods grow is α / base^(1/power).
        power: exponent of the rule, above 0; 2 in the paper.
        warmup_steps: local steps of the warm-up; 0 or more.
        peak: the learning rate at the end of the warm-up, above 0; required if there is one.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range; when called, the learning rate is 0, unknown, or so small that there
            would never be another exchange.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = QSR(base=4, coefficient=0.2)
        >>> [schedule(Clock(learning_rate=rate)) for rate in (0.4, 0.1, 0.05, 0.02)]
        [4, 4, 16, 100]

    References:
        Gu, Lyu, Arora, Zhang, Huang: A Quadratic Synchronization Rule for Distributed Deep Learning.
        arXiv 2310.14423 (2023).
    """

    base: int = 4
    coefficient: float = 0.0175
    power: float = 2
    warmup_steps: int = 0
    peak: float | None = None

    def __post_init__(self) -> None:
        require_int(self.base, "`QSR(base=...)`", minimum=1)
        require_real(self.coefficient, "`QSR(coefficient=...)`", positive=True)
        require_real(self.power, "`QSR(power=...)`", positive=True)
        require_int(self.warmup_steps, "`QSR(warmup_steps=...)`", minimum=0)
        if self.peak is not None:
            require_real(self.peak, "`QSR(peak=...)`", positive=True)
        elif self.warmup_steps > 0:
            raise ValueError(
                "`QSR(peak=...)` must be the learning rate at the end of the warm-up. Received: "
                f"peak=None, warmup_steps={self.warmup_steps!r}"
            )

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        rate = self.peak if clock.step < self.warmup_steps else clock.learning_rate
        if rate is None:
            raise ValueError(
                f"{self!r} needs the learning rate, which is unknown at step {clock.step}: use an optimizer of "
                "hvd_periodic, or set synchronizer.learning_rate to a function that returns it"
            )
        if not 0 < rate < float("inf"):
            raise ValueError(
                f"{self!r} needs a positive and finite learning rate; otherwise it would never exchange again. "
                f"Received: {rate!r} at step {clock.step}. For a warm-up, pass `warmup_steps` and `peak`"
            )
        try:
            steps: float = (self.coefficient / rate) ** self.power
        except OverflowError:
            steps = float("inf")
        if steps >= _NEVER:
            raise ValueError(
                f"{self!r} would never exchange again at a learning rate of {rate!r}, at step {clock.step}: keep the "
                "rate above 0"
            )
        return max(self.base, math.floor(steps * (1 + ROUNDING)))
