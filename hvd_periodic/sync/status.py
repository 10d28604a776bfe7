"""The status of a rank before the handshake, and of all ranks after it; counters, and the state that schedules keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hvd_periodic.schedules.base import Clock


@dataclass(frozen=True)
class Counters:
    """What a synchronizer has done so far, and where it stands in its schedule.

    An exchange that fails is not counted: local steps aside, the counters are those of the last one that took place.

    Attributes:
        local_steps: iterations, whether or not the update ran.
        rounds: exchanges.
        skipped_updates: iterations whose update did not run: overflow under mixed precision, or another rank's while
            this one had run out of data.
        bytes_sent: bytes that this rank handed to collectives in exchanges.
        last_exchange: local steps at the last exchange.
        next_exchange: local steps at which the next exchange is due.
        gradients: gradients accumulated on this rank since the last exchange, for algorithms that use them.
        left_out: exchanges from which this rank was left out, as its replica was not finite.
        exchange_seconds: wall time spent in exchanges, waiting for other ranks included.
        pushes_missed: in asynchronous exchange, pushes of other workers between this worker's own, summed over its
            exchanges: the staleness of the center that its replica was pulled to before.
        staleness_max: the most of them at one exchange.
    """

    local_steps: int = 0
    rounds: int = 0
    skipped_updates: int = 0
    bytes_sent: int = 0
    last_exchange: int = 0
    next_exchange: int = 0
    gradients: int = 0
    exchange_seconds: float = 0.0
    pushes_missed: int = 0
    staleness_max: int = 0
    left_out: int = 0

    @property
    def staleness_mean(self) -> float:
        """Pushes of other workers per exchange of this one."""
        return self.pushes_missed / max(self.rounds, 1)


@dataclass(frozen=True)
class ScheduleState:
    """What a rank keeps from one exchange to the next, besides the counters.

    Attributes:
        loss_sum: of the losses that were reported since the last exchange.
        losses: how many.
        memory: what the schedule asked to be remembered.
        since: what has happened since every fragment of the parameters was exchanged; empty where that is nothing.
    """

    loss_sum: float = 0.0
    losses: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)
    since: Sequence[Sequence[int]] = ()

    @property
    def loss(self) -> float | None:
        """The mean of what was reported; None if nothing was."""
        return self.loss_sum / self.losses if self.losses else None

    def reported(self, loss: float) -> ScheduleState:
        """Return the notes with one more loss."""
        return replace(self, loss_sum=self.loss_sum + loss, losses=self.losses + 1)


@dataclass(frozen=True)
class LocalStatus:
    """What one rank knows by itself when it comes to meet the others.

    Attributes:
        counters: its own.
        notes: what it keeps for its schedule.
        learning_rate: of its local optimizer; None where it is unknown.
        step_seconds: seconds per local step since its last exchange; None where there was none.
        distance: of its replica to the center; None where it was not measured.
        problem: the reason why this rank cannot go on; None if it can.
        excluded: the description of a tensor that is not finite, because of which this rank takes no part in an
            exchange; None if it takes part.
    """

    counters: Counters
    notes: ScheduleState
    learning_rate: float | None = None
    step_seconds: float | None = None
    distance: float | None = None
    problem: str | None = None
    excluded: str | None = None

    @cached_property
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
class GlobalStatus:
    """What ranks have learned of each other before an exchange.

    Attributes:
        training: some rank is still training, and not here to finalize.
        step: local steps at which this rank goes on.
        pending: local steps since the last exchange, on the rank with most of them.
        period: local steps that the schedule planned between the last exchange and the next; where some rank is still
            training, for those that are.
        clock: what all have agreed on, for the schedule.
        predicted: the next exchange, which all have predicted before the handshake; None where ranks have to ask the
            schedule, and compare.
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
    predicted: int | None = None
    settings: Any = None
    states_are_there: bool = True
    weights: Sequence[float] | None = None
    left_out: Sequence[int] = ()
