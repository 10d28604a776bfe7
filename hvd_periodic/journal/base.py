"""Counters and reports of one rank on its exchanges, and the listeners that receive them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hvd_periodic.logs import logger
from hvd_periodic.spellings import RenamedAttribute

Facts = Mapping[str, object]
"""Description of the training, by readable name: numbers, strings, lists of these, None."""


@dataclass(frozen=True)
class Counters:
    """Counts of steps and exchanges so far, and the position in the schedule.

    A failed exchange is not counted: apart from local steps, counters describe the exchanges that took place.

    Attributes:
        local_steps: iterations, whether or not the update ran.
        rounds: exchanges.
        skipped_updates: iterations whose update did not run: overflows under mixed precision, and iterations of other
            ranks after this one had run out of data.
        bytes_sent: bytes that this rank handed to collectives in exchanges.
        last_exchange: local steps at the last exchange.
        next_exchange: local steps at which the next exchange is due.
        gradients: gradients accumulated on this rank since the last exchange, for algorithms that use them.
        left_out: exchanges from which this rank was excluded, as its replica was not finite.
        exchange_seconds: wall time spent in exchanges, including waits for other ranks.
        pushes_missed: in asynchronous exchange, pushes of other workers between two of this worker, summed over its
            exchanges: the staleness of the center to which its replica was pulled before.
        staleness_max: the maximum of these per exchange.
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
        """Mean number of other workers' pushes per exchange of this one."""
        return self.pushes_missed / max(self.rounds, 1)


@dataclass(frozen=True)
class Report:
    """One exchange, as seen by one rank.

    Attributes:
        time: end of the exchange, in seconds since 1970.
        step: local steps at the exchange.
        rounds: exchanges so far, including this one.
        steps: local steps since the previous exchange.
        seconds: time spent in exchanges since the end of the previous one, including waiting.
        waited: part of ``seconds`` until all ranks had arrived; None if ranks do not wait.
        bytes_sent: bytes that this rank sent.
        step_seconds: seconds per local step since the previous exchange; None if unknown.
        loss: mean of the losses reported on this rank; None if none was reported.
        learning_rate: learning rate of the local optimizer; None if unknown.
        missed: in asynchronous training, pushes of other ranks since the previous exchange; with a quorum, rounds
            without this rank since then.
        left_out: this rank was excluded because its replica was not finite.
        came: when this rank was ready for the handshake, in seconds since 1970; from then on it waited. If ranks do not
            wait, when the exchange began.
        distance: ‖x − c‖₂ of this rank at that time, before anything was exchanged; None if it was not measured.
        skipped_updates: iterations since the previous exchange whose update did not run.
        message_norm: norm of what this rank contributed, before ``max_message_norm`` cut it; None without that option.
        mean_norm: norm of the mean by which the center stepped, before ``max_mean_norm`` cut it; with ``overlap`` that
            of the exchange that has arrived since the previous one; None without that option.
        number: with a quorum, the number of the round among those of all ranks, from 1.
        members: with a quorum, the global ranks that were in the round.
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
    message_norm: float | None = None
    mean_norm: float | None = None
    number: int | None = None
    members: Sequence[int] | None = None


@dataclass(frozen=True)
class Total:
    """Totals over all exchanges of one rank, since training began or was resumed.

    Attributes:
        time: now, in seconds since 1970.
        step: local steps so far.
        rounds: exchanges so far.
        steps: local steps since training began or was resumed.
        exchanges: exchanges since then.
        wall_seconds: wall-clock time since then.
        seconds: part of ``wall_seconds`` spent in exchanges.
        waited: part of ``seconds`` until all ranks had arrived; None if ranks do not wait.
        bytes_sent: bytes that this rank has sent since then.
        left_out: exchanges since then from which this rank was excluded.
        missed: in asynchronous training, pushes of other ranks between this rank's own since then.
        closed: fraction of a distance to the replicas that the center has closed; None if the algorithm does not define
            it.
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
    """Receives reports on the exchanges of one rank; override only the methods that you need.

    Example:
        >>> class Printer(Listener):
        ...     def exchanged(self, report):
        ...         print(f"step {report.step}: {report.bytes_sent} bytes")
        >>> import numpy as np
        >>> from hvd_periodic.numpy import SGD, ModelAverageOptimizer
        >>> optimizer = ModelAverageOptimizer(SGD(0.1), {"x": np.zeros(2)}, interval_steps=2)
        >>> optimizer.synchronizer.journal.listeners.append(Printer())
        >>> for _ in range(4):
        ...     optimizer.step([np.ones(2)])
        step 2: ... bytes
        step 4: ... bytes

    Attributes:
        wants_distance: reports should include the distance, as long as measuring it takes little of the time.
    """

    wants_distance: bool = False

    def began(self, facts: Facts) -> None:
        """Training begins, or continues from a loaded state."""

    def exchanged(self, report: Report) -> None:
        """An exchange has ended."""

    def ended(self, total: Total) -> None:
        """Training has ended or pauses."""


MEASURING_SHARE = 0.01
"""Fraction of the time since the beginning that may be spent on measuring distances."""


class Journal:
    """Reports exchanges to listeners; costs next to nothing without listeners.

    Attributes:
        listeners: receive the reports; you may add one at any time, in TensorFlow before the first step is compiled.
        begun: the start of training has been reported.
        over: the end of training has been reported, and no exchange after it.
    """

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self.listeners: list[Listener] = list(listeners)
        self.begun = self.over = False
        self._first = self._last = Counters()
        self._begun = time.perf_counter()
        self._waited: float | None = None
        self._open = 1.0
        self._measuring = 0.0

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        """Copy without listeners, which could not tell the copy's exchanges from the original's."""
        return Journal, ()

    def began(self, facts: Facts, count: Counters) -> None:
        """Report that training begins with these counters."""
        self._first = self._last = count
        self.begun, self.over = True, False
        self._begun, self._waited, self._open, self._measuring = time.perf_counter(), None, 1.0, 0.0
        self._notify(lambda listener: listener.began(facts))

    measured = RenamedAttribute("measure_distance")

    def measure_distance(self, distance: Callable[[], float]) -> float | None:
        """Return a distance, or None if no listener wants it or measuring has taken too much of the time so far."""
        now, wanted = time.perf_counter(), any(listener.wants_distance for listener in self.listeners)
        if not wanted or self._measuring > MEASURING_SHARE * (now - self._begun):
            return None
        found = float(distance())
        self._measuring += time.perf_counter() - now
        return found

    def exchanged(
        self,
        count: Counters,
        came: float,
        waited: float | None,
        closes: float | None = None,
        step_seconds: float | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
        distance: float | None = None,
        norms: Mapping[str, float] = MappingProxyType({}),
        number: int | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Report an exchange that has led to these counters, unless nothing was exchanged.

        Args:
            count: counters at the end of the exchange.
            came: as in :class:`Report`.
            waited: seconds until all ranks had arrived.
            closes: fraction of its distance to the replicas that the center has closed in this exchange; None if the
                algorithm does not define it.
            step_seconds: as in :class:`Report`.
            loss: likewise.
            learning_rate: likewise.
            distance: likewise.
            norms: ``message_norm`` and ``mean_norm``, likewise.
            number: likewise.
            members: likewise.
        """
        if waited is not None:
            self._waited = (self._waited or 0.0) + waited
        before = self._last
        if (count.rounds, count.left_out) == (before.rounds, before.left_out):
            return  # A handshake at which no rank had anything to send.
        self._last, self.over = count, False
        self._open *= math.nan if closes is None else abs(1.0 - closes)
        report = Report(
            time.time(),
            count.local_steps,
            count.rounds,
            count.local_steps - before.local_steps,
            count.exchange_seconds - before.exchange_seconds,
            waited,
            count.bytes_sent - before.bytes_sent,
            step_seconds,
            loss,
            learning_rate,
            count.pushes_missed - before.pushes_missed,
            count.left_out > before.left_out,
            came,
            distance,
            count.skipped_updates - before.skipped_updates,
            number=number,
            members=members,
            **norms,
        )
        self._notify(lambda listener: listener.exchanged(report))

    def ended(self, count: Counters | None = None) -> None:
        """Report that training has ended.

        Args:
            count: counters at the end; None: their values at the last exchange, because they can no longer be read.
        """
        first, count, self.over = self._first, count or self._last, True
        total = Total(
            time.time(),
            count.local_steps,
            count.rounds,
            count.local_steps - first.local_steps,
            count.rounds - first.rounds,
            time.perf_counter() - self._begun,
            count.exchange_seconds - first.exchange_seconds,
            self._waited,
            count.bytes_sent - first.bytes_sent,
            count.left_out - first.left_out,
            count.pushes_missed - first.pushes_missed,
            None if math.isnan(self._open) or count.rounds == first.rounds else 1.0 - self._open,
            count.skipped_updates - first.skipped_updates,
        )
        self._notify(lambda listener: listener.ended(total))

    def _notify(self, notify: Callable[[Listener], None]) -> None:
        """Call all listeners; one that raises is removed, so that training continues as on the other ranks."""
        for listener in list(self.listeners):
            try:
                notify(listener)
            except Exception as error:
                self.listeners.remove(listener)
                name = type(listener).__name__
                logger.warning("Listener %s raised and was removed: %s", name, error, exc_info=True)
