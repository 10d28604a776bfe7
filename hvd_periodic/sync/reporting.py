"""Reports of training and of every exchange to a rank's journal."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.arguments import described
from hvd_periodic.journal import Journal, Listener
from hvd_periodic.journal.base import Counts, Facts
from hvd_periodic.journal.files import RunLog
from hvd_periodic.journal.lines import LogListener
from hvd_periodic.logs import logger, set_up
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.status import Counters, Standpoint
from hvd_periodic.version import __version__

if TYPE_CHECKING:
    from hvd_periodic.sync.exchanger import Course


def new_journal(membership: Callable[[], Membership], folder: Path | None) -> Journal:
    """Return the journal of a rank: with lines in the log on the root, if they would be seen, and a file if asked.

    Args:
        membership: returns which rank this is.
        folder: of the run log, if there is one.

    Raises:
        OSError: the folder cannot be made, or written to.
    """
    listeners: list[Listener] = []
    set_up()
    if logger.isEnabledFor(logging.INFO):
        listeners.append(LogListener(lambda: membership().is_root, lambda: membership().number_among_several))
    if folder is not None:
        listeners.append(RunLog(folder, lambda: (membership().global_rank, membership().number, membership().name)))
    return Journal(listeners)


def tell_beginning(course: Course[Any], counters: Counters) -> None:
    """Tell that training begins, or goes on, with these counters."""
    journal = course.setting.journal
    if journal.listeners:
        journal.began(_facts(course, counters), count_of(counters))


def _facts(course: Course[Any], counters: Counters) -> Facts:
    """Return what training is, for people."""
    setting, membership = course.setting, course.setting.membership
    exchanged, schedule = setting.exchanged, setting.planner.schedule
    layout, communicator = exchanged.replica.parameters.layout, membership.communicator
    transport = communicator.description if course.worker is None else course.worker.transport.description
    compression, period = described(setting.wire), counters.next_exchange - counters.last_exchange
    return {
        "time": time.time(),
        "package": __version__,
        "framework": exchanged.replica.framework or None,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "rank": membership.global_rank,
        "size": communicator.size,
        "ranks": list(communicator.global_ranks),
        "root": membership.global_root,
        "algorithm": exchanged.algorithm.in_force(Exchange(communicator.size, period)),
        "outer_optimizer": None if exchanged.outer is None else exchanged.outer.name,
        "schedule": described(schedule),
        "period": period,
        "step": counters.local_steps,
        "closes": exchanged.algorithm.contraction(Exchange(communicator.size, period)) if course.steps_agree else None,
        "asynchronous": not course.steps_agree,
        "center": course.placement.name,
        "transport": transport,
        "elements": sum(spec.size for spec in layout.specs),
        "tensors": len(layout.specs),
        "bytes": sum(bucket.nbytes for bucket in layout.buckets),
        "overlap": setting.overlap or None,
        "fragments": len(setting.fragments) if len(setting.fragments) > 1 else None,
        "compression": compression if setting.wire.lossy else None,
    }


def count_of(counters: Counters) -> Counts:
    """Return what a journal tells of counters."""
    return Counts(
        counters.local_steps,
        counters.rounds,
        counters.exchange_seconds,
        counters.bytes_sent,
        counters.left_out,
        counters.pushes_missed,
        counters.skipped_updates,
    )


def measured(course: Course[Any], own: Standpoint) -> Standpoint:
    """Return where this rank stands with its distance to the center, if that is wanted, and can be known here."""
    if course.reads_together or course.setting.phase.equal:
        return own
    return replace(own, distance=course.setting.journal.measure_distance(course.tensor_groups.distance))


def tell(
    course: Course[Any],
    own: Standpoint,
    counters: Callable[[], Counters],
    came: float,
    waited: float | None,
    completes: bool = True,
) -> None:
    """Tell of an exchange that is over.

    Args:
        course: that ran it.
        own: where this rank stood before it.
        counters: returns them as they are after it.
        came: when this rank was ready to meet the others, in seconds since 1970.
        waited: seconds until all ranks had come; None where none waits.
        completes: it ends a period, in which all fragments have had their turn.
    """
    setting, closes = course.setting, None
    if not setting.journal.listeners:
        return
    if course.steps_agree:
        size = setting.membership.communicator.size
        closes = setting.exchanged.algorithm.contraction(Exchange(size, own.clock.period)) if completes else 0.0
        closes = 1.0 if setting.phase.equal else closes
    count = count_of(counters())
    known = own.step_seconds, own.notes.loss, own.learning_rate, own.distance
    setting.journal.exchanged(count, came, waited, closes, *known)
