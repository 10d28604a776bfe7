"""Stall queries to missing ranks: which ranks are asked when, and the report of their answers."""

from __future__ import annotations

import math
import sys
import sysconfig
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hvd_periodic.comm.arrivals import missing_ranks
from hvd_periodic.comm.collective_tracker import CollectiveTracker, Wait
from hvd_periodic.comm.stall_protocol import Datagram

_PATIENCE = 3.0
"""Seconds within which a live rank answers."""

_AGAIN = 0.5
"""Seconds after which a rank is asked again: datagrams get lost, and ranks arrive meanwhile."""

_AT_ONCE, TICK = 64, 0.05
"""Number of ranks asked at once, and seconds until the next are: a socket holds a few hundred datagrams."""

_NAMED = 8
"""Number of ranks that are described one by one."""


@dataclass
class StallQuery:
    """A query about which ranks have reached a collective.

    Attributes:
        tracker: tracker of the ranks that are asked.
        wait: this rank's wait for the collective.
        number: distinguishes the answers from answers to earlier queries.
        final: whether the wait has exceeded the timeout.
        began: time of the first question.
        asked: time at which each rank was last asked.
        answers: answers by rank.
    """

    tracker: CollectiveTracker
    wait: Wait
    number: int
    final: bool
    began: float
    asked: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Datagram] = field(default_factory=dict)

    def others(self) -> list[int]:
        """Return all other ranks, starting with the next: if all ask at once, each is asked by one rank at a time."""
        ranks, own = self.tracker.ranks, self.tracker.ranks.index(self.tracker.rank)
        return [*ranks[own + 1 :], *ranks[:own]]

    def is_over(self, now: float) -> bool:
        """Return whether all reachable ranks have answered, or have had time to."""
        reachable = [rank for rank in self.others() if rank in self.tracker.peers]
        patience = _PATIENCE + TICK * len(reachable) / _AT_ONCE
        return all(rank in self.answers for rank in reachable) or now - self.began >= patience

    def due(self, now: float) -> list[int]:
        """Return some of the ranks that are missing, as far as is known, and were not asked just now."""
        due = [rank for rank in self.missing() if now - self.asked.get(rank, -math.inf) >= _AGAIN]
        return due[:_AT_ONCE]

    def missing(self) -> list[int]:
        """Return the ranks that have not reached the collective, as far as is known."""
        has_reached = self.tracker.has_reached
        come = {rank for rank, note in self.answers.items() if has_reached(rank, note.begun, self.wait.number)}
        return [rank for rank in self.others() if rank not in come]

    def not_waiting(self) -> list[int]:
        """Return the missing ranks whose answers say that they do not wait for others themselves."""
        return [rank for rank in self.missing() if rank in self.answers and not self.answers[rank].seconds > 0]


def report(query: StallQuery, now: float, one_host: bool) -> str:
    """Return a description of the missing ranks.

    Args:
        query: the query with its answers.
        now: current time, in seconds of the monotonic clock.
        one_host: whether all ranks are on this host.
    """
    tracker = query.tracker
    waited = f"Rank {tracker.rank} has waited {seconds_of(now - query.wait.since)} in {tracker.place()}"
    if not tracker.peers:
        missing = missing_ranks(tracker.name, tracker.ranks, tracker.rank, one_host)
        if missing is None:
            return f"{waited}. Who has not come is not known: these ranks have not met before. {_ELSEWHERE}"
    else:
        missing = sorted(query.missing())
    if not missing:
        return f"{waited}. All ranks have come: data are on their way, or the network has stopped"
    named = "; ".join(describe(query, rank) for rank in missing[:_NAMED])
    more = f"; and {len(missing) - _NAMED} others do not" if len(missing) > _NAMED else ""
    return f"{waited}: {named}{more}"


_ELSEWHERE = "In a job of Horovod, its own warning of a stall, on rank 0, names them"


def describe(query: StallQuery, rank: int) -> str:
    """Return a description of where a missing rank is."""
    tracker, answer = query.tracker, query.answers.get(rank)
    gone = tracker.exited.get(rank)
    if gone is not None:
        return f"rank {rank} has ended: {gone.text}"
    if answer is not None:
        what = f"waits for {seconds_of(answer.seconds)} in" if answer.seconds > 0 else "is in"
        return f"rank {rank}{at_step(answer.local_steps)} does not come: it {what} {answer.text}"
    seen = tracker.last_seen(rank)
    last = "it was not met before" if seen is None else f"it was met last at local step {seen}"
    if not tracker.peers:
        return f"rank {rank} does not come"
    if rank not in tracker.peers:
        return f"rank {rank} may not have come, and cannot be asked; {last}"
    return f"rank {rank} does not answer; {last}"


def at_step(local_steps: int) -> str:
    """Return a local step in words; an empty string if it is unknown."""
    return f" at local step {local_steps}" if local_steps >= 0 else ""


def seconds_of(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> seconds_of(0.25), seconds_of(90.4)
        ('0.2 s', '90 s')
    """
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def position() -> str:
    """Return the location of the main thread of this process, in the user's code if it runs any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _PACKAGE)
    first = frame
    while frame is not None and frame.f_code.co_filename.startswith((*libraries, "<frozen")):
        frame = frame.f_back
    found = frame or first
    if found is None:
        return "no code of Python"
    return f"{found.f_code.co_name}(), {found.f_code.co_filename}:{found.f_lineno}"


_PACKAGE = str(Path(__file__).parents[1])
