"""What one rank tells of its exchanges, and to whom."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

logger = logging.getLogger("hvd_periodic")

Facts = Mapping[str, object]
"""What training is, by readable name: numbers, strings, lists of them, None."""


@dataclass(frozen=True)
class Report:
    """One exchange, as one rank saw it.

    Attributes:
        time: at its end, in seconds since 1970.
        step: local steps at the exchange.
        rounds: exchanges so far, this one included.
        steps: local steps since the one before.
        seconds: in exchanges since the end of the one before, waiting included.
        waited: of these, until all ranks had come; None where ranks do not wait.
        bytes_sent: by this rank.
        step_seconds: per local step since the exchange before; None where that is not known.
        loss: mean of what was reported on this rank; None where nothing was.
        learning_rate: of the local optimizer; None where it is unknown.
        missed: asynchronously, pushes of other ranks since the one before.
        left_out: this rank's replica was not finite, and it was left out.
        came: when this rank was ready to meet the others, in seconds since 1970; from then on it waited. Where ranks do
            not wait, when it began.
        distance: ‖x − c‖₂ of this rank then, before anything was exchanged; None where it was not measured.
        skipped_updates: iterations since the exchange before whose update did not run.
    """

    time: float
    step: int
    rounds: int
    steps: int
    seconds: float
    waited: float | None
    bytes_sent: int
    step_seconds: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    missed: int = 0
    left_out: bool = False
    came: float = 0.0
    distance: float | None = None
    skipped_updates: int = 0


@dataclass(frozen=True)
class Total:
    """What all exchanges of one rank came to, since training began or went on.

    Attributes:
        time: now, in seconds since 1970.
        step: local steps so far.
        rounds: exchanges so far.
        steps: local steps since then.
        exchanges: since then.
        wall_seconds: since then.
        seconds: of these, in exchanges.
        waited: of those, until all ranks had come; None where ranks do not wait.
        bytes_sent: by this rank since then.
        left_out: exchanges from which this rank was left out since then.
        missed: asynchronously, pushes of other ranks between its own since then.
        closed: part of a distance to the replicas that the center has closed; None where the algorithm has no such
            thing.
        skipped_updates: iterations since then whose update did not run.
    """

    time: float
    step: int
    rounds: int
    steps: int
    exchanges: int
    wall_seconds: float
    seconds: float
    waited: float | None
    bytes_sent: int
    left_out: int = 0
    missed: int = 0
    closed: float | None = None
    skipped_updates: int = 0


class Listener:
    """Hears of the exchanges of one rank; what it does not care for, it leaves out.

    Example:
        >>> class Printer(Listener):
        ...     def exchanged(self, report):
        ...         print(f"step {report.step}: {report.bytes_sent} bytes")
        >>> import numpy as np
        >>> from hvd_periodic import SGD, ModelAverageOptimizer
        >>> optimizer = ModelAverageOptimizer(SGD(0.1), {"x": np.zeros(2)}, interval_steps=2)
        >>> optimizer.synchronizer.journal.listeners.append(Printer())
        >>> for _ in range(4):
        ...     optimizer.step([np.ones(2)])
        step 2: ... bytes
        step 4: ... bytes

    Attributes:
        wants_distance: reports are to have one, where that takes little of the time.
    """

    wants_distance: bool = False

    def began(self, facts: Facts) -> None:
        """Training begins, or goes on from what was loaded."""

    def exchanged(self, report: Report) -> None:
        """An exchange is over."""

    def ended(self, total: Total) -> None:
        """Training is over, or pauses."""


@dataclass
class Count:
    """What a rank has counted, as far as a journal tells of it."""

    step: int = 0
    rounds: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    left_out: int = 0
    missed: int = 0
    skipped_updates: int = 0


LITTLE = 0.01
"""Part of the time since the beginning that may be spent on measuring distances."""


class Journal:
    """Tells listeners of exchanges; costs next to nothing where there are none.

    Attributes:
        listeners: who hears; any may be added at any time, in TensorFlow before the first step is compiled.
        begun: they have been told that training has begun.
        over: they have been told that it has ended, and of no exchange since.
    """

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self.listeners: list[Listener] = list(listeners)
        self.begun = self.over = False
        self._first = self._last = Count()
        self._begun = time.perf_counter()
        self._waited: float | None = None
        self._open = 1.0
        self._measuring = 0.0

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        """Let nobody listen to a copy: whose exchanges it tells of, listeners could not know."""
        return Journal, ()

    def began(self, facts: Facts, count: Count) -> None:
        """Tell that training begins with these counters."""
        self._first = self._last = count
        self.begun, self.over = True, False
        self._begun, self._waited, self._open, self._measuring = time.perf_counter(), None, 1.0, 0.0
        self._tell(lambda listener: listener.began(facts))

    @property
    def wants_distance(self) -> bool:
        """Whether a listener does."""
        return any(listener.wants_distance for listener in self.listeners)

    def measured(self, distance: Callable[[], float]) -> float | None:
        """Return a distance, unless nobody wants it, or measuring has taken more than a little of the time so far."""
        now = time.perf_counter()
        if not self.wants_distance or self._measuring > LITTLE * (now - self._begun):
            return None
        found = float(distance())
        self._measuring += time.perf_counter() - now
        return found

    def exchanged(
        self,
        count: Count,
        came: float,
        waited: float | None,
        closes: float | None = None,
        step_seconds: float | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
        distance: float | None = None,
    ) -> None:
        """Tell of an exchange that has led to these counters, unless nothing was exchanged.

        Args:
            count: counters at its end.
            came: as in :class:`Report`.
            waited: seconds until all ranks had come.
            closes: part of its distance to the replicas that the center has closed in it; None where there is no such
                thing.
            step_seconds: as in :class:`Report`.
            loss: likewise.
            learning_rate: likewise.
            distance: likewise.
        """
        if waited is not None:
            self._waited = (self._waited or 0.0) + waited
        before = self._last
        if (count.rounds, count.left_out) == (before.rounds, before.left_out):
            return  # Ranks have met, and none had anything to send.
        self._last, self.over = count, False
        self._open *= math.nan if closes is None else abs(1.0 - closes)
        report = Report(
            time.time(),
            count.step,
            count.rounds,
            count.step - before.step,
            count.seconds - before.seconds,
            waited,
            count.bytes_sent - before.bytes_sent,
            step_seconds,
            loss,
            learning_rate,
            count.missed - before.missed,
            count.left_out > before.left_out,
            came,
            distance,
            count.skipped_updates - before.skipped_updates,
        )
        self._tell(lambda listener: listener.exchanged(report))

    def ended(self, count: Count | None = None) -> None:
        """Tell that training is over.

        Args:
            count: counters at its end; None: where they were at the last exchange, as nobody can ask them any more.
        """
        first, count, self.over = self._first, count or self._last, True
        total = Total(
            time.time(),
            count.step,
            count.rounds,
            count.step - first.step,
            count.rounds - first.rounds,
            time.perf_counter() - self._begun,
            count.seconds - first.seconds,
            self._waited,
            count.bytes_sent - first.bytes_sent,
            count.left_out - first.left_out,
            count.missed - first.missed,
            None if math.isnan(self._open) or count.rounds == first.rounds else 1.0 - self._open,
            count.skipped_updates - first.skipped_updates,
        )
        self._tell(lambda listener: listener.ended(total))

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        """Tell all listeners; one that fails hears no more, and training goes on as on ranks where nobody failed."""
        for listener in list(self.listeners):
            try:
                tell(listener)
            except Exception as error:
                self.listeners.remove(listener)
                name = type(listener).__name__
                logger.warning("%s hears of no more exchanges, as it has failed: %s", name, error, exc_info=True)
