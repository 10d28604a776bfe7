"""Asks the schedule when to exchange next, so that all ranks get the same answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_periodic.comm.agreement import raise_on_all
from hvd_periodic.comm.handshake import Purpose, Record, leading
from hvd_periodic.schedules.base import Clock, Schedule, next_exchange
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.status import GlobalStatus, LocalStatus


@dataclass(frozen=True)
class Plan:
    """What a schedule answered.

    Attributes:
        next_exchange: local steps at which the next exchange is due.
        memory: what the schedule wants to be told at the next question.
    """

    next_exchange: int
    memory: Mapping[str, float]


def agreed_clock(records: Sequence[Record], clock: Clock) -> Clock:
    """Return the clock with what ranks tell each other: the leading rate, the slowest step, the mean loss.

    Args:
        records: of the ranks that train; where none does any more, of all.
        clock: with what all know: step, round, period and memory.

    Example:
        >>> from hvd_periodic import Clock
        >>> told = [Record(2, 1, updates=3, learning_rate=0.1, loss=2.0), Record(2, 1, updates=4, learning_rate=0.2)]
        >>> clock = agreed_clock(told, Clock(step=4))
        >>> clock.learning_rate, clock.step_seconds, clock.loss
        (0.2, None, 2.0)
    """
    seconds = [record.step_seconds for record in records if record.step_seconds is not None]
    losses = [record.loss for record in records if record.loss is not None]
    return replace(
        clock,
        learning_rate=leading(records).learning_rate,
        step_seconds=max(seconds, default=None),
        loss=sum(losses) / len(losses) if losses else None,
    )


def merge_clocks(clock: Clock, of_all: Sequence[Clock]) -> Clock:
    """Return one clock for several sets of ranks whose members average gradients with each other, so exchange together.

    Args:
        clock: of this set of ranks.
        of_all: the clocks of all ranks, in an order that all know.

    Example:
        >>> merge_clocks(Clock(loss=1.0), [Clock(loss=1.0, step_seconds=0.5), Clock(loss=3.0, step_seconds=0.25)])
        Clock(step=0, round=0, learning_rate=None, step_seconds=0.5, loss=2.0, period=0, memory={})
    """
    rates = [other.learning_rate for other in of_all if other.learning_rate is not None]
    seconds = [other.step_seconds for other in of_all if other.step_seconds is not None]
    losses = [other.loss for other in of_all if other.loss is not None]
    return replace(
        clock,
        learning_rate=rates[0] if rates else None,
        step_seconds=max(seconds, default=None),
        loss=sum(losses) / len(losses) if losses else None,
    )


def ask(schedule: Schedule, clock: Clock, predicted: int | None = None) -> Plan:
    """Return what a schedule answers; the next exchange may have been predicted.

    Raises:
        RuntimeError: it failed, or did not return an int of at least 1, or remembers what it has not announced.
    """
    try:
        return Plan(predicted or next_exchange(schedule, clock), _remembered(schedule, clock))
    except Exception as error:
        raise RuntimeError(f"The schedule failed: {type(error).__name__}: {error}") from error


def _remembered(schedule: Schedule, clock: Clock) -> dict[str, float]:
    memory = {name: float(value) for name, value in schedule.remember(clock).items()}
    if not memory.keys() <= set(schedule.remembers) or not all(map(math.isfinite, memory.values())):
        raise ValueError(
            f"remember() of {schedule!r} must return finite numbers by the names in `remembers`, "
            f"{schedule.remembers!r}. Received: {memory!r}"
        )
    return memory


class _UnforeseenError(Exception):
    """A schedule depends on what ranks find out at an exchange only."""


class _ForeseenClock(Clock):
    """A clock of what is known before ranks meet."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("learning_rate", "step_seconds", "loss"):
            raise _UnforeseenError(name)
        return super().__getattribute__(name)


def predict(schedule: Schedule, clock: Clock) -> int | None:
    """Return the step of the next exchange, where steps, rounds and memory say it; None where it depends on more.

    Raises:
        Exception: what the schedule raises, or as :func:`~hvd_periodic.schedules.next_exchange`.

    Example:
        >>> from hvd_periodic import QSR, Every
        >>> predict(Every(4), Clock(step=8)), predict(QSR(), Clock(step=8))
        (12, None)
    """
    try:
        return next_exchange(schedule, _foreseen(clock))
    except _UnforeseenError:
        return None


def forecast(schedule: Schedule, rounds: int) -> list[int]:
    """Return the steps of the first exchanges, as far as they can be foreseen.

    Raises:
        Exception: as :func:`predict`.

    Example:
        >>> from hvd_periodic import Doubling
        >>> forecast(Doubling(1, 2, 8), 5)
        [1, 2, 4, 6, 10]
    """
    exchanges: list[int] = []
    clock = _foreseen(Clock())
    try:
        while len(exchanges) < rounds:
            exchanges.append(next_exchange(schedule, clock))
            memory, period = schedule.remember(clock), exchanges[-1] - clock.step
            clock = _ForeseenClock(exchanges[-1], clock.round + 1, period=period, memory=memory)
    except _UnforeseenError:
        pass
    except LookupError:  # A table of the user's may be no longer than training.
        if not exchanges:
            raise
    return exchanges


def _foreseen(clock: Clock) -> Clock:
    return _ForeseenClock(clock.step, clock.round, period=clock.period, memory=clock.memory)


class Planner:
    """Asks a schedule for the next exchange.

    Args:
        schedule: when to exchange.
        membership: the ranks that have to hear the same.
    """

    def __init__(self, schedule: Schedule, membership: Membership) -> None:
        self.schedule = schedule
        self._membership = membership

    def foreseen(self, own: LocalStatus, purpose: Purpose) -> int | None:
        """Return the exchange after this one, if the schedule can say so before ranks have met.

        Raises:
            Exception: what the schedule raises, unless training ends.
        """
        try:
            return predict(self.schedule, own.clock if purpose != Purpose.START else replace(own.clock, round=0))
        except Exception:
            # Where training ends, a schedule may have nothing to say.
            if purpose in (Purpose.LEAVE, Purpose.SAVE, Purpose.COMMIT):
                return None
            raise

    def first(self, records: Sequence[Record]) -> Plan:
        """Return the first exchange of ranks that have met: by the learning rate of now, not that of construction."""
        clock = Clock(learning_rate=leading(records).learning_rate)
        if all(record.foreseen for record in records):
            return ask(self.schedule, clock)
        return self._same_on_all(clock)

    def first_async(self, learning_rate: float | None) -> Plan:
        """Return the first exchange of a rank that exchanges on its own clock."""
        return ask(self.schedule, Clock(learning_rate=learning_rate))

    def following(self, handshake: GlobalStatus) -> Plan:
        """Return what the schedule says at an exchange, the same on all ranks.

        Where nobody trains any more, it may have nothing to say; where nothing is exchanged, it is not asked. The
        period is then the one before.

        Raises:
            RuntimeError: the schedule failed, or says different things on different ranks.
        """
        clock = handshake.clock
        try:
            if handshake.training and handshake.predicted is None:
                return self._same_on_all(clock)
            if handshake.training or handshake.pending:
                return ask(self.schedule, clock, handshake.predicted)
        except RuntimeError as error:
            if handshake.training:
                raise
            self._membership.log.debug("Where training has ended, the period stays as it was: %s", error)
        return Plan(handshake.step + max(handshake.period, 1), clock.memory)

    def next_async(self, own: LocalStatus) -> Plan:
        """Return what the schedule says to a rank that exchanges on its own clock."""
        return ask(self.schedule, own.clock)

    def _same_on_all(self, clock: Clock) -> Plan:
        """Return what the schedule says, which ranks compare, those of all groups that train together.

        Raises:
            RuntimeError: it failed, or says different things on different ranks; on all of them.
        """
        together = self._membership.all_ranks
        if together.group is not None:
            clock = merge_clocks(clock, together.allgather_object(clock, "clock"))
        plan, failure = Plan(0, {}), None
        try:
            plan = ask(self.schedule, clock)
        except RuntimeError as error:
            failure = error
        answers = together.allgather_object(plan.next_exchange, "plan")
        if 0 in answers:
            raise_on_all(together, "plan", failure)
        if len(set(answers)) > 1:
            raise RuntimeError(
                f"The schedule says different things on different ranks: the next exchange at step {answers[0]} on "
                f"rank 0, and at {next(a for a in answers if a != answers[0])} elsewhere. It has to be a function of "
                "the clock alone"
            )
        return plan
