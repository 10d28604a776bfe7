"""Which collectives ranks have reached: this one, which a tracker records; and the others, which a query asks.

The stall monitor reads both from its thread.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from hvd_periodic.arguments import require_real
from hvd_periodic.comm.handshake import Record
from hvd_periodic.comm.stall_protocol import Datagram, MessageType, Peer, from_integers, missing_ranks

T = TypeVar("T")

ASYNCHRONOUS_START = "the start of asynchronous exchange"
"""Task of ranks that set up access to an asynchronous center."""

_FIRST, _LONGEST, _GROWTH = 2e-5, 1e-3, 1.1
"""First and longest polling interval in seconds, and its growth factor: a wait is at most a tenth too long.

Horovod itself polls once per millisecond, which is as long as a small collective takes.
"""


_PATIENCE = 3.0
"""Seconds within which a live rank answers."""

_AGAIN = 0.5
"""Seconds after which a rank is asked again: datagrams get lost, and ranks arrive meanwhile."""

_AT_ONCE, TICK = 64, 0.05
"""Number of ranks asked at once, and seconds until the next are: a socket holds a few hundred datagrams."""

_NAMED = 8
"""Number of ranks that are described one by one."""


class StepCounter(Protocol):
    """Step counter of an optimizer."""

    @property
    def local_steps(self) -> int:
        """Iterations so far."""


class Wait:
    """A collective that this rank waits for.

    Attributes:
        number: position of the collective in the order of its ranks' collectives.
        since: start of the wait, in seconds of the monotonic clock.
        raises: whether the waiting code regularly checks ``error``.
        idle: whether this is an idle barrier of ranks that have finished, which may take very long; ranks that have
            announced their end take part.
        error: the error for the waiting code to raise.
    """

    __slots__ = ("error", "idle", "number", "raises", "since")

    def __init__(self, number: int, raises: bool = False, idle: bool = False) -> None:
        self.number, self.raises, self.idle = number, raises, idle
        self.since = time.monotonic()
        self.error: Exception | None = None


class CollectiveTracker:
    """Tracks the collectives of this rank, among ranks that all run their collectives in the same order.

    Their count therefore tells which collective a rank has reached; nothing else is compared. Recording a collective
    costs two assignments.

    Args:
        name: name of these ranks, the same on all of them.
        rank: global rank of this process.
        ranks: global ranks of all of them.

    Attributes:
        begun: number of collectives that this rank has started.
        wait: the collective that it is waiting for.
        last_record: this rank's record in its latest handshake.
        last_records: the records of all ranks in the latest completed handshake, in the order of ``ranks``.
        peers: addresses of the reachable ranks, by rank.
        exited: exit notices by rank: of ranks that have ended, or that only take part in idle barriers from now on.
        task: this rank's activity among them, if it is not a handshake.
        timeout: seconds after which waiting is an error; None: never.
        idle_callers: the transports of the asynchronous optimizers of these ranks, see :class:`Communicator`.
        elastic: membership may change: exits are not reported, and timeouts are off until the first handshake.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.name, self.rank, self.ranks = name, rank, list(ranks)
        self.begun = 0
        self.wait: Wait | None = None
        self.last_record: Record | None = None
        self.last_records: Sequence[Record] = ()
        self.peers: dict[int, Peer] = {}
        self.exited: dict[int, Datagram] = {}
        self.task, self._idle = "", True
        self.timeout: float | None = None
        self.elastic = False
        self.idle_callers: Sequence[Any] = ()
        self._counters: dict[int, weakref.ref[StepCounter]] = {}

    # Recording collectives, in the training thread

    def start_collective(self) -> int:
        """Record that this rank starts the next collective; return the collective's number."""
        self.begun += 1
        return self.begun

    def wait_for(self, number: int, done: Callable[[], bool], longest: float = _LONGEST) -> None:
        """Wait, sleeping between polls, until a collective is done.

        Polls are at most ``longest`` seconds apart; 0: no sleep, if polling is what moves data.

        Raises:
            Exception: :attr:`Wait.error`, if it was set meanwhile.
        """
        if done():
            return
        self.wait = wait = Wait(number, raises=True)
        pause = min(_FIRST, longest)
        try:
            while not done():
                if wait.error is not None:
                    raise wait.error
                if pause:
                    time.sleep(pause)
                pause = min(longest, pause * _GROWTH)
        finally:
            if self.wait is wait:
                self.wait = None

    def run_blocking(self, call: Callable[[], T], task: str | None = None) -> T:
        """Return the result of a collective that cannot be interrupted; inside, :attr:`task` is ``task``, if given."""
        around = self.wait
        with self.at(self.task if task is None else task):
            self.wait = Wait(self.start_collective())
            try:
                return call()
            finally:
                self.wait = around

    def begin_idle_barrier(self, poll: Callable[[], T | None]) -> Callable[[], T | None]:
        """Record that this rank enters an idle barrier; return a function that polls it, None until all have arrived.

        Raises:
            Exception: from the returned function, :attr:`Wait.error`, if it was set meanwhile.
        """
        self.wait = wait = Wait(self.start_collective(), raises=True, idle=self._idle)

        def tracked() -> T | None:
            if wait.error is not None:
                raise wait.error
            found = poll()
            if found is not None:
                self.wait = None
            return found

        return tracked

    @contextmanager
    def at(self, task: str, idle: bool = True) -> Iterator[None]:
        """Set this rank's :attr:`task` among these ranks inside a ``with`` block.

        Args:
            task: the call that this rank is in.
            idle: whether idle barriers inside may take longer than :attr:`timeout`.
        """
        before = self.task, self._idle
        self.task, self._idle = task, idle
        try:
            yield
        finally:
            self.task, self._idle = before

    def follow_steps(self, optimizer: int, counter: StepCounter) -> None:
        """Read the local steps of an optimizer from ``counter``, as long as that exists."""
        self._counters[optimizer] = weakref.ref(counter)

    def limit(self, seconds: float | None) -> None:
        """Make waiting for ``seconds`` an error, unless another optimizer allows a longer wait.

        Raises:
            TypeError, ValueError: ``seconds`` is neither None nor a number above 0.
        """
        if seconds is not None:
            seconds = require_real(seconds, "`timeout_seconds`, unless it is None,", positive=True)
            self.timeout = seconds if self.timeout is None else max(self.timeout, seconds)

    def set_peers(self, addresses: Sequence[np.ndarray | None]) -> None:
        """Store the addresses of all ranks, and the counts of collectives with which they start."""
        found = zip(self.ranks, map(from_integers, addresses), strict=True)
        self.peers = {rank: peer for rank, peer in found if peer is not None}
        self.exited = {}

    # Questions of the stall monitor

    def place(self) -> str:
        """Return a description of where this rank is among these ranks."""
        return self.task or ("construction of an optimizer" if self.last_record is None else self.last_record.place)

    def local_steps(self) -> int:
        """Return this rank's local steps of the optimizer in the latest handshake; -1 before any handshake."""
        if self.last_record is None:
            return -1
        reference = self._counters.get(self.last_record.optimizer)
        counter = None if reference is None else reference()
        try:
            return int(self.last_record.local_steps if counter is None else counter.local_steps)
        except Exception:  # Variables of a graph cannot be read from outside of it.
            return int(self.last_record.local_steps)

    def last_seen(self, rank: int) -> int | None:
        """Return the local step of a global rank in the latest completed handshake; None if there was none."""
        return self.last_records[self.ranks.index(rank)].local_steps if self.last_records else None

    def exceeds_timeout(self, wait: Wait, seconds: float) -> bool:
        """Return whether a wait of ``seconds`` is an error."""
        joining = self.elastic and not self.peers
        return self.timeout is not None and not wait.idle and not joining and seconds >= self.timeout

    def has_reached(self, rank: int, begun: int, number: int) -> bool:
        """Return whether a rank that has started ``begun`` collectives has reached the one that is ``number`` here."""
        return begun - self.peers[rank].begun >= number - self.peers[self.rank].begun

    def record_exit(self, notice: Datagram) -> None:
        """Record that a rank has ended, or only takes part in idle barriers from now on; the first reason counts."""
        known = self.exited.get(notice.rank)
        if known is None or known.type == MessageType.IDLE:
            self.exited[notice.rank] = notice

    def exited_before(self, wait: Wait) -> Datagram | None:
        """Return the exit notice of a rank that will never reach the collective this one waits for; None if none has.

        In elastic jobs, Horovod reports exits to the other ranks, which recover.
        """
        notices = [] if self.elastic else list(self.exited.values())
        ended = [notice for notice in notices if not (wait.idle and notice.type == MessageType.IDLE)]
        return next((each for each in ended if not self.has_reached(each.rank, each.begun, wait.number)), None)


class NullTracker(CollectiveTracker):
    """Tracker of ranks without a monitor: threads, or a single rank. All of them share one, so it stores nothing."""

    def __init__(self) -> None:
        super().__init__("", 0, [0])

    def set_peers(self, addresses: Sequence[np.ndarray | None]) -> None:
        """Store nothing."""

    def follow_steps(self, optimizer: int, counter: StepCounter) -> None:
        """Store nothing."""

    def limit(self, seconds: float | None) -> None:
        """Check the argument, and store nothing."""
        CollectiveTracker("", 0, [0]).limit(seconds)


_known: dict[str, CollectiveTracker] = {}


def tracker_of(name: str, rank: int, ranks: Sequence[int]) -> CollectiveTracker:
    """Return the tracker of this process among some ranks, which all communicators of these ranks share."""
    known = _known.get(name)
    if known is None or (known.rank, known.ranks) != (rank, list(ranks)):
        known = _known[name] = CollectiveTracker(name, rank, ranks)
    return known


def forget_trackers() -> None:
    """Forget all trackers: the ranks have changed, and their communicators are rebuilt."""
    _known.clear()


def trackers() -> list[CollectiveTracker]:
    """Return all trackers of this process."""
    return list(_known.values())


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
        reached = self.tracker.has_reached
        arrived = {rank for rank, answer in self.answers.items() if reached(rank, answer.begun, self.wait.number)}
        return [rank for rank in self.others() if rank not in arrived]

    def not_waiting(self) -> list[int]:
        """Return the missing ranks whose answers say that they do not wait for others themselves."""
        return [rank for rank in self.missing() if rank in self.answers and not self.answers[rank].seconds > 0]

    def report(self, now: float, one_host: bool) -> str:
        """Return a description of the missing ranks at a time of the monotonic clock."""
        tracker = self.tracker
        waited = f"Rank {tracker.rank} has waited {_seconds(now - self.wait.since)} in {tracker.place()}"
        if not tracker.peers:
            missing = missing_ranks(tracker.name, tracker.ranks, tracker.rank, one_host)
            if missing is None:
                return (
                    f"{waited}. The missing ranks are not known before the first handshake. In a Horovod job, "
                    "Horovod's own stall warning on rank 0 names them"
                )
        else:
            missing = sorted(self.missing())
        if not missing:
            return f"{waited}. All ranks have arrived: data is in transit, or the network has stopped"
        described = "; ".join(map(self._describe, missing[:_NAMED]))
        more = f"; and {len(missing) - _NAMED} other ranks are missing" if len(missing) > _NAMED else ""
        return f"{waited}: {described}{more}"

    def _describe(self, rank: int) -> str:
        """Return a description of where a missing rank is."""
        exited, answer = self.tracker.exited.get(rank), self.answers.get(rank)
        if exited is not None:
            return f"rank {rank} has ended: {exited.text}"
        if answer is not None:
            what = f"waits for {_seconds(answer.seconds)} in" if answer.seconds > 0 else "is in"
            return f"rank {rank}{at_step(answer.local_steps)} has not arrived: it {what} {answer.text}"
        seen = self.tracker.last_seen(rank)
        last = "there was no handshake with it" if seen is None else f"its last handshake was at local step {seen}"
        if not self.tracker.peers:
            return f"rank {rank} has not arrived"
        if rank not in self.tracker.peers:
            return f"rank {rank} may not have arrived, and cannot be asked; {last}"
        return f"rank {rank} does not answer; {last}"


def at_step(local_steps: int) -> str:
    """Return a local step in words; an empty string if it is unknown."""
    return f" at local step {local_steps}" if local_steps >= 0 else ""


def _seconds(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> _seconds(0.25), _seconds(90.4)
        ('0.2 s', '90 s')
    """
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
