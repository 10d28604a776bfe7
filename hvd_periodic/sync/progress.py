"""Tracks the progress of a rank: counts local steps and exchanges, and times steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvd_periodic.journal.base import Counters
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.sync.planner import predict
from hvd_periodic.sync.status import LocalStatus, ScheduleState


class ProgressTracker:
    """Counts local steps and exchanges, keeps the schedule's state, and times steps.

    Increments are added to the counters only when these are read, so that counting is cheap even for small models.

    Args:
        schedule: predicts the first exchange, if it can; the start of training decides about it.

    Attributes:
        counters: steps, rounds, bytes and seconds so far.
        notes: the state that this rank keeps for its schedule.
        learning_rate: returns the local optimizer's learning rate for schedules; front ends set it if they know the
            optimizer.
        changed: called whenever the counters change.
        landing: local step at which the exchange in flight is applied to the replica; None if nothing is in flight, or
            if it is applied at the next exchange.
    """

    learning_rate: Callable[[], Any] | None = None
    changed: Callable[[], None] | None = None
    landing: int | None = None
    notes: ScheduleState
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
    def is_new(self) -> bool:
        """Whether nothing has set the counters yet, so that the centers have to be set as well."""
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
        """Whether the exchange in flight is due to be applied after the local steps so far."""
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
        """Count a completed exchange.

        Args:
            step: local steps of this rank after it; more than it has taken if it ran out of data before other ranks.
            next_exchange: local steps at which the next exchange is due.
            notes: the state of the schedule.
            started: time at which the exchange began, by ``time.perf_counter()``.
            exchanged: whether tensors were exchanged; false if all weights are 0.
            excluded: whether this rank was excluded because its replica is not finite.
            sent: bytes handed to collectives.
            missed: in asynchronous exchange, pushes of other ranks since this rank's last one.
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

    def see(self, names: Sequence[str], fragments: int) -> None:
        """Note that an update has gradients of some parameters, for each of the ``fragments``."""
        seen = self.notes.seen or [[]] * fragments
        more = [[*part, *(name for name in names if name not in part)] for part in seen]
        if more != seen:
            self.notes = replace(self.notes, seen=more)

    def report(self, loss: Any) -> None:
        """Note a loss of this rank.

        Raises:
            TypeError: the loss is not a number.
            ValueError: the loss is NaN or infinite.
        """
        value = number(loss, "The loss that is reported")
        if not math.isfinite(value):
            raise ValueError(
                f"A loss of {value} was reported at step {self.local_steps}: the training has diverged, or report() "
                "was given something else"
            )
        self.notes = self.notes.reported(value)

    def report_examples(self, examples: Any) -> None:
        """Note the examples of a local update of this rank.

        Raises:
            TypeError: not a number.
            ValueError: a negative number, NaN or infinity.
        """
        value = number(examples, "`examples`")
        if not 0 <= value < math.inf:
            raise ValueError(f"`examples` must be a finite number of at least 0. Received: {examples!r}")
        self.notes = self.notes.worked(value)

    def current_rate(self) -> float | None:
        """Return the learning rate of the local optimizer; None if it is unknown or not a number."""
        if self.learning_rate is None:
            return None
        rate = self.learning_rate()
        try:
            return number(rate, "A learning rate")
        except TypeError:
            return None

    def snapshot(self) -> LocalStatus:
        """Return the status of this rank."""
        counters = self.counters
        return LocalStatus(counters, self.notes, self.current_rate(), self.step_seconds(counters.local_steps))

    def get_ready(self) -> None:
        """Restart the timer of the first step, before training starts."""
        self._ready_since = time.perf_counter()

    def begin(self) -> None:
        """Start timing steps, from the last :meth:`get_ready`: the first step began before its update."""
        self._timed_since = self._ready_since, self.local_steps

    def time(self, local_steps: int) -> None:
        """Restart the timer: time the steps after ``local_steps`` from now on."""
        self._timed_since = time.perf_counter(), local_steps

    def step_seconds(self, local_steps: int) -> float | None:
        """Return the seconds per local step since the last exchange, or since construction or loading."""
        if self._timed_since is None or local_steps <= self._timed_since[1]:
            return None
        return (time.perf_counter() - self._timed_since[0]) / (local_steps - self._timed_since[1])


def number(value: Any, what: str) -> float:
    """Return a number, which may be a zero-dimensional tensor or array, as a float.

    Raises:
        TypeError: the value is not a number.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        shape = f" of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else f" {value!r}"
        raise TypeError(f"{what} must be a number. Received: {type(value).__name__}{shape}")
    return float(value.item() if hasattr(value, "item") else value)
