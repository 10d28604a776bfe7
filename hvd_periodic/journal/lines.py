"""Writes lines to the log: a description of the training, each exchange at level debug, and the totals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hvd_periodic.journal.base import Facts, Listener, Report, Total
from hvd_periodic.logs import Log, log_of, logger
from hvd_periodic.ranks import named

ENOUGH = 0.95
"""Fraction of its distance to the replicas after which a center counts as close to them."""


class LogListener(Listener):
    """Writes to the log of the package, on one rank.

    Args:
        is_writer: returns whether this is the rank that writes.
        number: returns the number of this optimizer; None if there is only one.
    """

    def __init__(self, is_writer: Callable[[], bool], number: Callable[[], int | None]) -> None:
        self._is_writer, self._number = is_writer, number

    @property
    def _log(self) -> Log:
        return log_of(self._number())

    def began(self, facts: Facts) -> None:
        """Write a description of the training."""
        if self._is_writer():
            self._log.info("%s", described(facts))

    def exchanged(self, report: Report) -> None:
        """Write the cost of an exchange."""
        if not (logger.isEnabledFor(logging.DEBUG) and self._is_writer()):
            return
        waited = "" if report.waited is None else f" ({seconds_of(report.waited)} waiting)"
        more = "" if report.step_seconds is None else f", {seconds_of(report.step_seconds)} per step"
        more += "" if report.loss is None else f", loss {report.loss:.6g}"
        if report.members is not None:
            more += f", round {report.number} of {named(report.members)}"
        elif report.missed:
            more += f", {report.missed} pushes of others since the last"
        self._log.debug(
            "Exchange %d at step %d: %s%s, %s%s",
            report.rounds,
            report.step,
            seconds_of(report.seconds),
            waited,
            bytes_of(report.bytes_sent),
            more,
        )

    def ended(self, total: Total) -> None:
        """Write the totals of all exchanges."""
        if not (total.exchanges and self._is_writer()):
            return
        waited = "" if total.waited is None else f", including {seconds_of(total.waited)} waiting for other ranks"
        self._log.info(
            "%s steps and %s exchanges in %s: %.1f %% of the time in exchanges (%s%s), %s sent by this rank",
            f"{total.steps:,}",
            f"{total.exchanges:,}",
            seconds_of(total.wall_seconds),
            100 * total.seconds / max(total.wall_seconds, 1e-9),
            seconds_of(total.seconds),
            waited,
            bytes_of(total.bytes_sent),
        )
        if total.left_out:
            self._log.info(
                "This rank was excluded from %d exchanges because its replica was not finite", total.left_out
            )
        if total.closed is not None and total.closed < ENOUGH:
            self._log.info(
                "In %d exchanges the center has closed %.0f %% of its distance to the replicas, and may be worse than "
                "they are: exchange more often (a shorter period), or move it further (a larger moving rate)",
                total.exchanges,
                100 * total.closed,
            )


def described(facts: Facts) -> str:
    """Return a description of the training in one line."""
    known: dict[str, Any] = dict(facts)
    period = known.get("period")
    options = [f"{name}={known[name]}" for name in ("overlap", "fragments", "compression") if known.get(name)]
    resumed = f", from step {known['step']:,}" if known.get("step") else ""
    return (
        f"{known['algorithm']} on {known['size']} ranks"
        + (f" every {period:,} steps ({known['schedule']})" if period else f", scheduled by {known['schedule']}")
        + (f" with {', '.join(options)}" if options else "")
        + f": {known['elements']:,} parameters in {known['tensors']:,} tensors, {bytes_of(known['bytes'])} per "
        f"exchange; center {known['center']}, through {known['transport']}{resumed}"
    )


def seconds_of(seconds: float) -> str:
    """Return a time with its unit.

    Example:
        >>> [seconds_of(x) for x in (0.00012, 0.25, 75.2)]
        ['0.12 ms', '250 ms', '75.2 s']
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.1f} s"


def bytes_of(number: float) -> str:
    """Return bytes with their unit.

    Example:
        >>> [bytes_of(x) for x in (20, 40_000, 102_228_128, 3.1e9)]
        ['20 B', '40.0 kB', '102.2 MB', '3.1 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"
