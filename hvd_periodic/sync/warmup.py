"""Synchronous warmup, in which an ``hvd.DistributedOptimizer`` averages gradients at every step."""

from __future__ import annotations

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.ranks import named
from hvd_periodic.schedules import Schedule
from hvd_periodic.sync.planner import Planner
from hvd_periodic.sync.progress import ProgressTracker


class SynchronousWarmup:
    """Tells whether other code still averages the gradients of the ranks that exchange.

    While it does, all replicas are identical and the center equals them.

    Args:
        planner: holds the schedule.
        progress: counts the local steps.
    """

    def __init__(self, planner: Planner, progress: ProgressTracker) -> None:
        self._progress = progress
        self.until = planner.schedule.synchronous_until
        """Local steps at which the warmup ends; None if there is none."""

    @property
    def active(self) -> bool:
        """Whether the warmup is active: gradients are averaged over the ranks that exchange."""
        return self.until is not None and self._progress.local_steps < self.until

    @property
    def finished(self) -> bool:
        """Whether there was a warmup that has ended."""
        return self.until is not None and self._progress.local_steps >= self.until


def schedule_around(
    averaged: JobCommunicator | None, communicator: Communicator, schedule: Schedule, asynchronous: bool
) -> Schedule:
    """Return the schedule of exchanges; if the same ranks average their gradients, they begin after that warmup.

    Raises:
        ValueError: the exchanging ranks average their gradients at every step, so that no exchange changes anything; or
            gradients are averaged and the exchange is asynchronous.
    """
    if averaged is None or averaged.size == 1:
        return schedule
    if asynchronous:
        raise ValueError(
            "asynchronous=True with an hvd.DistributedOptimizer inside: ranks that average their gradients "
            "would exchange at different moments, and differ from then on"
        )
    exchanging = set(communicator.global_ranks)
    if communicator.size == 1 or not exchanging <= set(averaged.ranks):
        return schedule
    around = schedule.around_averaging()
    if around is not None and exchanging == set(averaged.ranks):
        return around
    raise ValueError(
        f"The hvd.DistributedOptimizer inside averages the gradients of {named(averaged.ranks)} at every step, and "
        f"these exchange among themselves ({sorted(exchanging)}), so that nothing would be left to exchange. Remove "
        "it; or average inside of groups and exchange between them, with groups = hvdp.node_groups(), "
        "hvd.DistributedOptimizer(..., process_set=groups.local) and process_set=groups.cross here; or stop averaging "
        "at a step, with PostLocal(start=..., period=...) as the period"
    )
