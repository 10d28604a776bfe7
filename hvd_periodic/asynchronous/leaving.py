"""The end of a process with asynchronous workers that are open: it waits for the other ranks, which may need them."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from hvd_periodic.asynchronous.transport import Transport
from hvd_periodic.comm.base import Communicator, DifferentCallsError, barrier_id
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.horovod import depart
from hvd_periodic.comm.process_end import end_now
from hvd_periodic.comm.stall_monitor import announce_leaving
from hvd_periodic.logs import logger

_LEFT = object()


class OpenWorker(Protocol):
    """A worker, see :class:`.Worker`."""

    interrupted: bool

    @property
    def communicator(self) -> Communicator:
        """All workers."""

    @property
    def transport(self) -> Transport:
        """The transport to the center."""

    @property
    def finished(self) -> bool:
        """Whether training has ended."""

    def close(self) -> None:
        """Wait for all ranks, then release everything."""


_open: list[OpenWorker] = []
"""Workers of this process that are open: other ranks may still need them."""


def add(worker: OpenWorker) -> None:
    """Close a worker at the end of this process, together with all others."""
    if not _open:
        atexit.register(_leave_all)
    _open.append(worker)


def remove(worker: OpenWorker) -> None:
    """Note that a worker is being closed; those that are threads, or alone, have not been added."""
    if worker in _open:
        _open.remove(worker)


def leave(communicator: Communicator, workers: Sequence[OpenWorker]) -> Iterator[None]:
    """Join every barrier at which other ranks wait, until all leave; yield while there is none."""
    if not communicator.alive():
        return
    if getattr(sys, "last_type", None) is not None or any(worker.interrupted for worker in workers):
        logger.error("Rank %d failed in asynchronous training; ending the job", communicator.rank)
        communicator.abort()
    if not all(worker.finished for worker in workers):
        logger.warning("Rank %d exits without finalize(), and waits for the others", communicator.rank)
        for worker in workers:
            if not worker.finished:
                worker.transport.stay_out(True)
    while (yield from _joined(communicator)) > 0:
        pass


def _joined(communicator: Communicator) -> Generator[None, None, int]:
    """Join a barrier, yielding while ranks are missing; return the id that others wait for."""
    look = communicator.begin_idle_barrier(0)
    try:
        while (number := look()) is None:
            yield
        return number
    except DifferentCallsError:  # Those whose calls differ meet once more, see Communicator.wait_for_all().
        yield from _joined(communicator)
        return barrier_id(Purpose.LEAVE, 1)


def _leave_all() -> None:
    """Close all workers at the end of the process, all channels at once: ranks may finish them in different orders."""
    announce_leaving()  # Before the first barrier, so that ranks that wait for this one elsewhere learn that it leaves.
    channels: dict[int, list[OpenWorker]] = {}
    for worker in _open:
        channels.setdefault(id(worker.communicator.channel), []).append(worker)
    leaving = [leave(workers[0].communicator, workers) for workers in channels.values()]
    while leaving:
        leaving = [steps for steps in leaving if next(steps, _LEFT) is not _LEFT]
        time.sleep(1e-3)
    everyone = [worker.communicator for worker in _open]
    for worker in list(_open):
        worker.close()
    for communicator in everyone:
        communicator.leave()
    if any(communicator.dead_ranks() for communicator in everyone):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        end_now(0)  # The shutdown of MPI and Horovod would wait for dead ranks.
    depart()
