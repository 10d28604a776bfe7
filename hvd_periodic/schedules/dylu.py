"""Dynamic local updates: each worker's number of local steps follows its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import ROUNDING, Clock, Schedule


@dataclass(frozen=True)
class DyLU(Schedule):
    """Dynamic local updates, for asynchronous training: fewer local steps on slower workers.

        τ_i = max(1, ⌊period · v_i / max_j v_j⌋)

    where v_i are the local steps per second of worker i in its last period, which it tells at each push; ``period``
    until all workers have told. So workers push about equally often. A worker that has finished or died keeps the speed
    that it told last.

    Args:
        period: local steps of the fastest worker between exchanges (H); at least 1.

    Raises:
        TypeError: ``period`` is not an int.
        ValueError: ``period`` is below 1. Optimizers raise it, too, without ``asynchronous=True``.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule, speeds = DyLU(50), [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
        >>> [schedule(Clock(relative_speed=speed / max(speeds))) for speed in speeds]
        [50, 38, 19, 8]
        >>> schedule(Clock())
        50

    References:
        Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato: Asynchronous Local-SGD Training for Language
        Modeling. arXiv 2401.09135 (2024), equation 6; at least one step is ours.
    """

    period: int = 50
    asynchronous_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_int(self.period, "`DyLU(period=...)`", minimum=1)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        speed = 1.0 if clock.relative_speed is None else clock.relative_speed
        return max(1, math.floor(self.period * speed * (1 + ROUNDING)))
