"""Status of one rank before the handshake and of all ranks after it; state kept for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hvd_periodic.journal.base import Counters
from hvd_periodic.schedules.base import Clock


@dataclass(frozen=True)
class ScheduleState:
    """State that a rank keeps from one exchange to the next, in addition to the counters.

    Attributes:
        loss_sum: sum of the losses reported since the last exchange.
        losses: their number.
        memory: values that the schedule has asked to keep.
        since: for every fragment, steps and gradients since its last exchange; empty if all are zero.
        updates: local updates that had run when this rank last took part in an exchange, since training began.
        examples: examples reported since then.
        reports: number of these reports.
        seen: for every fragment, the ``"present"`` parameters that had a gradient since its last exchange, by name;
            empty if none had.
    """

    loss_sum: float = 0.0
    losses: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)
    since: Sequence[Sequence[int]] = ()
    updates: int = 0
    examples: float = 0.0
    reports: int = 0
    seen: Sequence[Sequence[str]] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """Mean of the reported losses; None if there are none."""
        return self.loss_sum / self.losses if self.losses else None

    def reported(self, loss: float) -> ScheduleState:
        """Return a copy with one more loss."""
        return replace(self, loss_sum=self.loss_sum + loss, losses=self.losses + 1)

    def worked(self, examples: float) -> ScheduleState:
        """Return a copy with more examples."""
        return replace(self, examples=self.examples + examples, reports=self.reports + 1)


@dataclass(frozen=True)
class LocalStatus:
    """What one rank knows before the handshake.

    Attributes:
        counters: its counters.
        notes: the state that it keeps for its schedule.
        learning_rate: learning rate of its local optimizer; None if unknown.
        step_seconds: seconds per local step since its last exchange; None if there was no step.
        distance: distance of its replica to the center; None if not measured.
        problem: why this rank cannot continue; None if it can.
        excluded: which tensor is not finite, if this rank is excluded from the exchange for that; else None.
    """

    counters: Counters
    notes: ScheduleState
    learning_rate: float | None = None
    step_seconds: float | None = None
    distance: float | None = None
    problem: str | None = None
    excluded: str | None = None

    @property
    def updates(self) -> int:
        """Local updates that ran since this rank last took part in an exchange."""
        return self.counters.local_steps - self.counters.skipped_updates - self.notes.updates

    @cached_property
    def clock(self) -> Clock:
        """The clock of an exchange, as far as this rank knows it."""
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
class GlobalStatus:
    """The status of all ranks after the handshake.

    Attributes:
        training: whether some rank is still training, instead of finalizing.
        step: local steps of this rank after the exchange.
        pending: local steps since the last exchange, on the rank with the most.
        period: local steps that the schedule planned between the last exchange and the next, on ranks that still train
            if there are any.
        clock: the clock on which all ranks agree, for the schedule.
        predicted: the step of the next exchange, if all ranks have predicted the same; None if they must query the
            schedule and compare its answers.
        settings: hyper-parameters for the step of the center optimizer if they differ between ranks; else None.
        states_are_there: whether the states of all local optimizers have the same kind, so that they can be exchanged.
        weights: weight of every rank in means, 1 on average; None if all are equal.
        left_out: the excluded ranks, whose replicas are not finite.
    """

    training: bool
    step: int
    pending: int
    period: int
    clock: Clock
    predicted: int | None = None
    settings: Any = None
    states_are_there: bool = True
    weights: Sequence[float] | None = None
    left_out: Sequence[int] = ()
