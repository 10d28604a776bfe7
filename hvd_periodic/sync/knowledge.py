"""What a rank knows by itself when it comes to meet the others, and what they all know after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.schedules.base import Clock
from hvd_periodic.sync.counters import Counters, Notes


@dataclass(frozen=True)
class Standpoint:
    """What one rank knows by itself when it comes to meet the others.

    Attributes:
        counters: its own.
        notes: what it keeps for its schedule.
        learning_rate: of its local optimizer; None where it is unknown.
        step_seconds: seconds per local step since its last exchange; None where there was none.
        distance: of its replica to the center; None where it was not measured.
    """

    counters: Counters
    notes: Notes
    learning_rate: float | None = None
    step_seconds: float | None = None
    distance: float | None = None

    @property
    def clock(self) -> Clock:
        """The clock of this rank alone, at an exchange."""
        counters = self.counters
        return Clock(
            step=counters.local_steps,
            round=counters.rounds + 1,
            learning_rate=self.learning_rate,
            step_seconds=self.step_seconds,
            loss=self.notes.loss,
            period=counters.next_exchange - counters.last_exchange,
            memory=self.notes.memory,
        )


@dataclass(frozen=True)
class Agreement:
    """What ranks have learned of each other before an exchange.

    Attributes:
        training: some rank is still training, and not here to finalize.
        step: local steps at which this rank goes on.
        pending: local steps since the last exchange, on the rank with most of them.
        period: local steps that the schedule planned between the last exchange and the next; where some rank is still
            training, for those that are.
        clock: what all have agreed on, for the schedule.
        unforeseen: the schedule could not be asked before, so that ranks have to compare what it says now.
        settings: hyper-parameters for the step of the center optimizer, where those of ranks differ.
        states_are_there: all local optimizers have stepped, or none has: what they keep can be exchanged.
        weights: how much every rank counts in means, 1 on average; None where all count alike.
        left_out: the ranks whose replicas are not finite.
    """

    training: bool
    step: int
    pending: int
    period: int
    clock: Clock
    unforeseen: bool = False
    settings: Any = None
    states_are_there: bool = True
    weights: Sequence[float] | None = None
    left_out: Sequence[int] = ()

    @property
    def nobody(self) -> bool:
        """Whether no rank counts, so that nothing is exchanged."""
        return self.weights is not None and not any(self.weights)
