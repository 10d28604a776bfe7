"""Queries the schedule for the next exchange, so that all ranks get the same answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_periodic.comm.agreement import raise_on_all
from hvd_periodic.comm.handshake import Purpose, Record, leading
from hvd_periodic.comm.membership import Membership
from hvd_periodic.schedules.base import Clock, Schedule, next_exchange
from hvd_periodic.sync.status import GlobalStatus, LocalStatus


@dataclass(frozen=True)
class Plan:
    """The answer of a schedule.

    Attributes:
        next_exchange: local steps at which the next exchange is due.
        memory: values that the schedule gets back at the next query.
    """

    next_exchange: int
    memory: Mapping[str, float]


def agreed_clock(records: Sequence[Record], clock: Clock) -> Clock:
    """Return the clock completed from records: the leading rank's learning rate, the slowest step time, the mean loss.

    The records are those of the ranks that train, or of all ranks if none does any more.

    Example:
        >>> from hvd_periodic import Clock
        >>> told = [Record(2, 1, updates=3, learning_rate=0.1, loss=2.0), Record(2, 1, updates=4, learning_rate=0.2)]
        >>> clock = agreed_clock(told, Clock(step=4))
        >>> clock.learning_rate, clock.step_seconds, clock.loss
        (0.2, None, 2.0)
    """
    return _completed(clock, leading(records).learning_rate, records)


def merge_clocks(clock: Clock, of_all: Sequence[Clock]) -> Clock:
    """Return one clock for several sets of ranks that must exchange together, as their members average gradients.

    It has this set's step, round, period and memory, and the rest from ``of_all``, in the same order on all ranks.

    Example:
        >>> merge_clocks(Clock(loss=1.0), [Clock(loss=1.0, step_seconds=0.5), Clock(loss=3.0, step_seconds=0.25)])
        Clock(step=0, round=0, learning_rate=None, step_seconds=0.5, loss=2.0, period=0, memory={}, relative_speed=None)
    """
    rates = (other.learning_rate for other in of_all if other.learning_rate is not None)
    return _completed(clock, next(rates, None), of_all)


def _completed(clock: Clock, learning_rate: float | None, told: Sequence[Record] | Sequence[Clock]) -> Clock:
    """Return the clock with this learning rate, the slowest step time and the mean loss."""
    seconds = [each.step_seconds for each in told if each.step_seconds is not None]
    losses = [each.loss for each in told if each.loss is not None]
    return replace(
        clock,
        learning_rate=learning_rate,
        step_seconds=max(seconds, default=None),
        loss=sum(losses) / len(losses) if losses else None,
    )


def query(schedule: Schedule, clock: Clock, predicted: int | None = None) -> Plan:
    """Query a schedule, unless its answer was predicted.

    Raises:
        RuntimeError: the schedule failed, did not return an int of at least 1, or remembers a name that is not in
            ``remembers``.
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


class _UnforeseenError(BaseException):
    """The schedule depends on values that ranks know only at an exchange; an ``except Exception`` lets it pass."""


@dataclass(frozen=True)
class _ForeseenClock(Clock):
    """A clock with the fields that are known before a handshake.

    Attributes:
        unknown: the other fields that a schedule has asked for, which may have caught the error; copies share it.
    """

    unknown: list[str] = field(default_factory=list, repr=False, compare=False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("learning_rate", "step_seconds", "loss", "relative_speed"):
            self.unknown.append(name)
            raise _UnforeseenError(name)
        return super().__getattribute__(name)


def predict(schedule: Schedule, clock: Clock) -> int | None:
    """Return the step of the next exchange if it depends on steps, rounds and memory only; else None.

    Raises:
        Exception: any error of the schedule, or as :func:`~hvd_periodic.schedules.next_exchange`.

    Example:
        >>> from hvd_periodic import QSR, Every
        >>> predict(Every(4), Clock(step=8)), predict(QSR(), Clock(step=8))
        (12, None)
    """
    known = _ForeseenClock(clock.step, clock.round, period=clock.period, memory=clock.memory)
    try:
        step = next_exchange(schedule, known)
    except (_UnforeseenError, Exception):
        if known.unknown:
            return None
        raise
    return None if known.unknown else step


def forecast(schedule: Schedule, rounds: int) -> list[int]:
    """Return the steps of the first exchanges, as far as they can be predicted.

    Raises:
        Exception: as :func:`predict`.

    Example:
        >>> from hvd_periodic import Doubling
        >>> forecast(Doubling(1, 2, 8), 5)
        [1, 2, 4, 6, 10]
    """
    exchanges: list[int] = []
    clock: Clock = _ForeseenClock()
    try:
        while len(exchanges) < rounds and (step := predict(schedule, clock)) is not None:
            exchanges.append(step)
            clock = _ForeseenClock(step, clock.round + 1, period=step - clock.step, memory=schedule.remember(clock))
    except _UnforeseenError:
        pass
    except LookupError:  # A user's table may end with training.
        if not exchanges:
            raise
    return exchanges


class Planner:
    """Queries a schedule for the next exchange.

    Args:
        schedule: decides when to exchange.
        membership: the ranks that must get the same answer.
    """

    def __init__(self, schedule: Schedule, membership: Membership) -> None:
        self.schedule = schedule
        self._membership = membership

    def predict(self, own: LocalStatus, purpose: Purpose) -> int | None:
        """Return the step of the exchange after this one, if the schedule knows it before the handshake; else None.

        Raises:
            Exception: any error of the schedule; but not in calls after which training may end.
        """
        try:
            return predict(self.schedule, own.clock if purpose != Purpose.START else replace(own.clock, round=0))
        except Exception:
            # A schedule need not have an answer for the end of training.
            if purpose in (Purpose.LEAVE, Purpose.SAVE, Purpose.COMMIT):
                return None
            raise

    def first_plan(self, records: Sequence[Record]) -> Plan:
        """Return the plan of the first exchange, from the learning rate at the start of training."""
        clock = Clock(learning_rate=leading(records).learning_rate)
        if all(record.foreseen for record in records):
            return query(self.schedule, clock)
        return self._same_on_all(clock)

    def next_plan(self, handshake: GlobalStatus) -> Plan:
        """Return the plan of the exchange after this one, the same on all ranks.

        If no rank trains any more, the schedule need not have an answer; if no steps are pending either, it is not
        queried. The period then stays as it was.

        Raises:
            RuntimeError: the schedule failed, or its answers differ between ranks.
        """
        clock = handshake.clock
        try:
            if handshake.training and handshake.predicted is None:
                return self._same_on_all(clock)
            if handshake.training or handshake.pending:
                return query(self.schedule, clock, handshake.predicted)
        except RuntimeError as error:
            if handshake.training:
                raise
            self._membership.log.debug("Training has ended, so the period stays as it was: %s", error)
        return Plan(handshake.step + max(handshake.period, 1), clock.memory)

    def _same_on_all(self, clock: Clock) -> Plan:
        """Query the schedule; check that all ranks that train together get the same answer.

        Raises:
            RuntimeError: the schedule failed, or its answers differ; raised on all ranks.
        """
        together = self._membership.all_ranks
        if self._membership.group is not None:
            clock = merge_clocks(clock, together.allgather_object(clock, "clock"))
        plan, failure = Plan(0, {}), None
        try:
            plan = query(self.schedule, clock)
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
        self._membership.communicator.settle(f"the next exchange at step {plan.next_exchange}")
        return plan
