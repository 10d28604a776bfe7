"""Adaptive communication: periods that shrink as the loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_periodic.arguments import require_int
from hvd_periodic.schedules.base import ROUNDING, Clock, Schedule


@dataclass(frozen=True)
class AdaComm(Schedule):
    """AdaComm: infrequent exchanges first, frequent ones when the loss is low.

        τ ← ⌈√(γ_0/γ · F/F_0) τ_0⌉, where that is below the present τ; otherwise τ ← max(1, ⌊τ/2⌋)

    after every ``every_rounds`` exchanges. F is the mean loss that ranks reported in the round that ends, F_0 that of
    the first round; γ is the learning rate, γ_0 the first one above 0. An unknown learning rate counts as constant.

    Losses come from ``synchronizer.report(loss)``, which is best called at every step.

    Args:
        initial: local steps of the first rounds (τ_0); at least 1.
        every_rounds: exchanges from one decision to the next; at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1; when called, a required loss was not reported, or a loss or learning rate is
            not positive.

    Example:
        >>> from hvd_periodic import Clock
        >>> schedule = AdaComm(initial=10, every_rounds=1)
        >>> known = {"period": 10, "loss": 4.0, "learning_rate": 0.1}
        >>> [schedule(Clock(50, 5, learning_rate=0.1, loss=loss, memory=known)) for loss in (3.0, 1.0, 4.0)]
        [9, 5, 5]

    References:
        Wang, Joshi: Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD.
        arXiv 1810.08313 (2018).
    """

    initial: int = 10
    every_rounds: int = 10
    remembers: ClassVar[tuple[str, ...]] = ("period", "loss", "learning_rate")

    def __post_init__(self) -> None:
        require_int(self.initial, "`AdaComm(initial=...)`", minimum=1)
        require_int(self.every_rounds, "`AdaComm(every_rounds=...)`", minimum=1)

    def __call__(self, clock: Clock) -> int:
        """Return the number of local steps until the next exchange."""
        period = int(clock.memory.get("period", self.initial))
        if "loss" not in clock.memory or clock.loss is None or clock.round % self.every_rounds:
            return period
        ratio = self._loss(clock) / clock.memory["loss"]
        if clock.learning_rate is not None and "learning_rate" in clock.memory:
            if not clock.learning_rate > 0:
                raise ValueError(
                    f"{self!r} needs a learning rate above 0. Received: {clock.learning_rate!r} at step {clock.step}"
                )
            ratio *= clock.memory["learning_rate"] / clock.learning_rate
        steps = max(1, math.ceil(ratio**0.5 * self.initial * (1 - ROUNDING)))
        return steps if steps < period else max(1, period // 2)

    def remember(self, clock: Clock) -> Mapping[str, float]:
        """Return the period, and the first loss and learning rate."""
        known = {**clock.memory, "period": float(self(clock))}
        if "loss" not in known and clock.round > 0:
            known["loss"] = self._loss(clock)
        if "learning_rate" not in known and clock.learning_rate:
            known["learning_rate"] = clock.learning_rate
        return known

    def _loss(self, clock: Clock) -> float:
        if clock.loss is None:
            raise ValueError(
                f"{self!r} needs the loss, and no rank has reported one in the round that ends at step {clock.step}: "
                "call synchronizer.report(loss) at every step"
            )
        if not clock.loss > 0:
            raise ValueError(f"{self!r} needs a loss above 0. Received: {clock.loss!r} at step {clock.step}")
        return clock.loss
