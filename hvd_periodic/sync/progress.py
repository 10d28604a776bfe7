"""Tracks the progress of a rank: counts local steps and exchanges, and times steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.sync.planner import predict
from hvd_periodic.sync.status import Counters, LocalStatus, ScheduleState


class ProgressTracker:
    """Counts local steps and exchanges, keeps what the schedule will want to know, and times steps.

    What is added joins the counters when these are looked at, so that counting takes little of a small model's step.

    Args:
        schedule: says when the first exchange is due, as far as it is known now; that is decided when training begins.

    Attributes:
        counters: steps, rounds, bytes and seconds so far.
        notes: what this rank keeps for its schedule.
        learning_rate: returns the learning rate of the local optimizer, for schedules; front ends set it where they
            know that optimizer.
        changed: called whenever the counters change.
        landing: the local step at which the replica takes an exchange that is in flight, if it does before the next
            exchange; else None.
    """

    learning_rate: Callable[[], Any] | None = None
    changed: Callable[[], None] | None = None
    landing: int | None = None
    _counters: Counters
    _added: dict[str, Any]

    def __init__(self, schedule: Schedule) -> None:
        self._ready_since = time.perf_counter()
        self._timed_since: tuple[float, int] | None = None
        self.counters = Counters(next_exchange=self._first_exchange(schedule))
        self.notes = ScheduleState()

    def _first_exchange(self, schedule: Schedule) -> int:
        return predict(schedule, Clock()) or 0

    @property
    def counters(self) -> Counters:
        """Steps, rounds, bytes and seconds so far."""
        if self._added:
            now, added, self._added = self._counters, self._added, {}
            self._counters = replace(now, **{name: getattr(now, name) + more for name, more in added.items()})
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = counters
        self._added = {}
        if self.changed is not None:
            self.changed()

    @property
    def notes(self) -> ScheduleState:
        """What this rank keeps for its schedule."""
        return self._notes

    @notes.setter
    def notes(self, notes: ScheduleState) -> None:
        self._notes = notes

    @property
    def is_new(self) -> bool:
        """Whether nothing has given it values yet, so that the centers are not known either."""
        return True

    @property
    def local_steps(self) -> int:
        """Iterations so far."""
        return self._counters.local_steps + int(self._added.get("local_steps", 0))

    @property
    def rounds(self) -> int:
        """Exchanges so far."""
        return self.counters.rounds

    def add(self, **increments: Any) -> None:
        """Add to counters, by name."""
        for name, more in increments.items():
            self._added[name] = self._added.get(name, 0) + more
        if self.changed is not None:
            self.changed()

    def count(self, updated: Any) -> Any:
        """Count one iteration, with or without update; return whether an exchange is due then."""
        self.add(local_steps=1, skipped_updates=not updated)
        return self.is_due

    @property
    def is_due(self) -> Any:
        """Whether an exchange is due after the local steps so far."""
        return self.local_steps >= self._counters.next_exchange

    @property
    def is_landing_due(self) -> Any:
        """Whether the replica has to take the exchange in flight after the local steps so far."""
        return self.landing is not None and self.local_steps >= self.landing

    def advance(
        self,
        step: int,
        next_exchange: int,
        notes: ScheduleState,
        started: float,
        exchanged: bool,
        excluded: bool = False,
        sent: int = 0,
        missed: int = 0,
    ) -> None:
        """Count an exchange that has ended.

        Args:
            step: local steps at which this rank goes on; more than its own where it has run out of data before others.
            next_exchange: local steps at which the next exchange is due.
            notes: what the schedule keeps.
            started: when the exchange began, by ``time.perf_counter()``.
            exchanged: false where no rank counted, or this one was excluded from an asynchronous exchange.
            excluded: this rank was excluded, as its replica is not finite.
            sent: bytes that it handed to collectives.
            missed: pushes of other ranks since its own last one, where no rank waits.
        """
        counters = self.counters
        self.counters = replace(
            counters,
            local_steps=step,
            rounds=counters.rounds + exchanged,
            left_out=counters.left_out + excluded,
            bytes_sent=counters.bytes_sent + sent,
            skipped_updates=counters.skipped_updates + step - counters.local_steps,
            last_exchange=step,
            next_exchange=next_exchange,
            gradients=0,
            pushes_missed=counters.pushes_missed + missed,
            staleness_max=max(counters.staleness_max, missed),
            exchange_seconds=counters.exchange_seconds + time.perf_counter() - started,
        )
        self.notes = notes

    def report(self, loss: Any) -> None:
        """Note a loss of this rank.

        Raises:
            TypeError: no number.
            ValueError: NaN or infinity.
        """
        value = number(loss, "The loss that is reported")
        if not math.isfinite(value):
            raise ValueError(
                f"A loss of {value} was reported at step {self.local_steps}: the training has diverged, or report() "
                "was given something else"
            )
        self.notes = self.notes.reported(value)

    def current_rate(self) -> float | None:
        """Return the learning rate of the local optimizer; None where it is unknown, or no number."""
        return None if self.learning_rate is None else rate_of(self.learning_rate())

    def snapshot(self) -> LocalStatus:
        """Return what this rank knows by itself."""
        counters = self.counters
        return LocalStatus(counters, self.notes, self.current_rate(), self.step_seconds(counters.local_steps))

    def get_ready(self) -> None:
        """Measure the first step from now on, until training begins."""
        self._ready_since = time.perf_counter()

    def begin(self) -> None:
        """Measure steps since this rank was ready: the first has begun before its update."""
        self._timed_since = self._ready_since, self.local_steps

    def time(self, local_steps: int) -> None:
        """Measure steps after ``local_steps`` from now on."""
        self._timed_since = time.perf_counter(), local_steps

    def step_seconds(self, local_steps: int) -> float | None:
        """Return the seconds per local step since the last exchange, or since construction or loading."""
        if self._timed_since is None or local_steps <= self._timed_since[1]:
            return None
        return (time.perf_counter() - self._timed_since[0]) / (local_steps - self._timed_since[1])


def rate_of(value: Any) -> float | None:
    """Return a learning rate as a float; None where it is no number."""
    try:
        return number(value, "A learning rate")
    except TypeError:
        return None


def number(value: Any, what: str) -> float:
    """Return a number, which may be a tensor or array without dimensions, as a float.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        shape = f" of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else f" {value!r}"
        raise TypeError(f"{what} must be a number. Received: {type(value).__name__}{shape}")
    return float(value.item() if hasattr(value, "item") else value)
