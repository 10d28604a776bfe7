"""Reports the start of training and every exchange to a rank's journal."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.arguments import described
from hvd_periodic.comm.membership import Membership
from hvd_periodic.journal import Journal, Listener
from hvd_periodic.journal.base import Counters, Facts
from hvd_periodic.journal.files import RunLog
from hvd_periodic.journal.lines import LogListener
from hvd_periodic.logs import logger, set_up
from hvd_periodic.sync.status import LocalStatus
from hvd_periodic.version import __version__

if TYPE_CHECKING:
    from hvd_periodic.sync.exchanger import Exchanger


def new_journal(membership: Membership, folder: Path | None) -> Journal:
    """Return the journal of a rank, which writes log lines on the root if they would be shown, and a run log if asked.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    listeners: list[Listener] = []
    set_up()
    if logger.isEnabledFor(logging.INFO):
        listeners.append(LogListener(lambda: membership.is_root, lambda: membership.number_among_several))
    if folder is not None:
        folder = folder / membership.communicator.training
        listeners.append(RunLog(folder, lambda: (membership.global_rank, membership.number, membership.name)))
    return Journal(listeners)


def report_start(exchanger: Exchanger[Any], counters: Counters) -> None:
    """Report that training starts or resumes with these counters."""
    journal = exchanger.context.journal
    if journal.listeners:
        journal.began(_facts(exchanger, counters), counters)


def _facts(exchanger: Exchanger[Any], counters: Counters) -> Facts:
    """Return a readable description of the training run."""
    context, membership = exchanger.context, exchanger.context.membership
    exchanged, schedule = context.exchanged, context.planner.schedule
    layout, communicator = exchanged.replica.parameters.layout, membership.communicator
    transport = communicator.description if exchanger.worker is None else exchanger.worker.transport.description
    compression, period = described(context.wire), counters.next_exchange - counters.last_exchange
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
        "closes": exchanged.algorithm.contraction(Exchange(communicator.size, period))
        if exchanger.steps_agree
        else None,
        "asynchronous": not exchanger.steps_agree and context.quorum is None,
        "quorum": None if context.quorum is None else context.quorum.size,
        "grace_seconds": (context.grace or None) if context.quorum is None else context.quorum.grace,
        "center": exchanger.placement.name,
        "transport": transport,
        "elements": sum(spec.size for spec in layout.specs),
        "tensors": len(layout.specs),
        "bytes": sum(bucket.nbytes for bucket in layout.buckets),
        "overlap": context.overlap or None,
        "fragments": len(context.fragments) if len(context.fragments) > 1 else None,
        "compression": compression if context.wire.lossy else None,
    }


def with_distance(exchanger: Exchanger[Any], own: LocalStatus) -> LocalStatus:
    """Return the status with the distance to the center, if a listener asks for it and it can be measured locally."""
    journal = exchanger.context.journal
    if not journal.listeners or exchanger.reads_together or exchanger.context.warmup.active:
        return own
    return replace(own, distance=journal.measure_distance(exchanger.tensor_groups.distance))


def report_exchange(
    exchanger: Exchanger[Any],
    own: LocalStatus,
    came: float,
    waited: float | None,
    completes: bool = True,
    number: int | None = None,
    members: Sequence[int] | None = None,
    norms: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Report a completed exchange, which the counters include.

    Args:
        exchanger: the exchanger that ran it.
        own: the status of this rank before it.
        came: time at which this rank was ready for it, in seconds since 1970.
        waited: duration of the handshake in seconds; None in asynchronous exchange.
        completes: whether it ends a period, in which every fragment is exchanged once.
        number: number of the round, with a quorum.
        members: global ranks that were in it.
        norms: its norms, besides those that this rank has measured.
    """
    context, closes, limiter = exchanger.context, None, exchanger.tensor_groups.parameters.limiter
    norms = {**norms, **({} if limiter is None else limiter.reported())}
    if own.excluded is not None:  # Its message was not sent: no norm, rather than that of nothing.
        norms = {name: norm for name, norm in norms.items() if name != "message_norm"}
    if not context.journal.listeners:
        return
    if exchanger.steps_agree:
        size = context.membership.communicator.size
        closes = context.exchanged.algorithm.contraction(Exchange(size, own.clock.period)) if completes else 0.0
        closes = 1.0 if context.warmup.active else closes
    known = own.step_seconds, own.notes.loss, own.learning_rate, own.distance
    context.journal.exchanged(context.progress.counters, came, waited, closes, *known, norms, number, members)
