"""Trackers of the collectives that a process has started and waits for, read when other ranks ask where it is."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np

from hvd_periodic.arguments import require_real
from hvd_periodic.comm.stall_protocol import Datagram, MessageType, Peer, from_integers

T = TypeVar("T")

_FIRST, _LONGEST, _GROWTH = 2e-5, 1e-3, 1.1
"""First and longest polling interval in seconds, and its growth factor: a wait is at most a tenth too long.

Horovod itself polls once per millisecond, which is as long as a small collective takes.
"""


class HandshakeRecord(Protocol):
    """A rank's message in a handshake; see :class:`~hvd_periodic.comm.handshake.Record`."""

    @property
    def optimizer(self) -> int:
        """Number of the optimizer."""

    @property
    def local_steps(self) -> int:
        """Iterations so far."""

    @property
    def place(self) -> str:
        """Description of the call in which the rank is."""


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
        over: returns whether the wait is over; for callers that cannot report its end.
        raises: whether the waiting code regularly checks ``error``.
        idle: whether this is an idle barrier of ranks that are done, which may take very long; ranks that have left
            take part.
        error: the error for the waiting code to raise.
    """

    __slots__ = ("error", "idle", "number", "over", "raises", "since")

    def __init__(
        self, number: int, raises: bool = False, over: Callable[[], bool] | None = None, idle: bool = False
    ) -> None:
        self.number, self.raises, self.over, self.idle = number, raises, over, idle
        self.since = time.monotonic()
        self.error: Exception | None = None


class CollectiveTracker:
    """Tracks the collectives of this rank, among ranks that all run their collectives in the same order.

    Their count therefore tells which collective a rank has reached, and nothing else is compared. Recording a
    collective costs two assignments.

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
        exited: notes of the ranks that have ended, or that only take part in idle barriers from now on, by rank.
        task: this rank's activity among them, if it is not a handshake.
        timeout: seconds after which waiting is an error; None: never.
        elastic: membership may change: departures are not reported, and timeouts are off until the first handshake.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.name, self.rank, self.ranks = name, rank, list(ranks)
        self.begun = 0
        self.wait: Wait | None = None
        self.last_record: HandshakeRecord | None = None
        self.last_records: Sequence[HandshakeRecord] = ()
        self.peers: dict[int, Peer] = {}
        self.exited: dict[int, Datagram] = {}
        self.task = ""
        self.timeout: float | None = None
        self.elastic = False
        self._counts: dict[int, weakref.ref[StepCounter]] = {}

    def start_collective(self) -> int:
        """Record that this rank starts the next collective; return the collective's number."""
        self.begun += 1
        return self.begun

    def set_peers(self, addresses: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Store the addresses of all ranks, and the counts of collectives with which they start."""
        found = zip(self.ranks, map(from_integers, addresses), strict=True)
        self.peers = {rank: peer for rank, peer in found if peer is not None}
        self.exited = {}

    def record_exit(self, note: Datagram) -> None:
        """Record that a rank has ended, or only takes part in idle barriers from now on; the first reason counts."""
        known = self.exited.get(note.rank)
        if known is None or known.kind == MessageType.IDLE:
            self.exited[note.rank] = note

    def exited_before(self, wait: Wait) -> Datagram | None:
        """Return the note of a rank that will never reach the collective this one waits for; None if there is none.

        In elastic jobs, Horovod reports departures to the other ranks, which recover.
        """
        gone = [] if self.elastic else list(self.exited.items())
        ended = [(rank, note) for rank, note in gone if not (wait.idle and note.kind == MessageType.IDLE)]
        return next((note for rank, note in ended if not self.has_reached(rank, note.begun, wait.number)), None)

    def has_reached(self, rank: int, begun: int, number: int) -> bool:
        """Return whether a rank that has started ``begun`` collectives has reached the one that is ``number`` here."""
        return begun - self.peers[rank].begun >= number - self.peers[self.rank].begun

    def follow_steps(self, optimizer: int, counts: StepCounter) -> None:
        """Read the local steps of an optimizer from ``counts``, as long as that exists."""
        self._counts[optimizer] = weakref.ref(counts)

    def wait_for(self, number: int, done: Callable[[], bool], longest: float = _LONGEST) -> None:
        """Wait, sleeping between polls, until a collective is done.

        Args:
            number: the number that :meth:`start_collective` returned.
            done: returns whether the collective is done.
            longest: longest polling interval in seconds; 0: no sleep, if polling is what moves data.

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

    def enter(self, over: Callable[[], bool] | None = None) -> None:
        """Record that this rank starts the next collective and waits in it, until it calls :meth:`leave`."""
        self.wait = Wait(self.start_collective(), over=over)

    def leave(self) -> None:
        """Record that this rank no longer waits."""
        self.wait = None

    def begin_idle_barrier(self, look: Callable[[], T | None]) -> Callable[[], T | None]:
        """Record that this rank enters an idle barrier; return a function that polls it, None until all are there.

        Raises:
            Exception: from the returned function, :attr:`Wait.error`, if it was set meanwhile.
        """
        self.wait = wait = Wait(self.start_collective(), raises=True, idle=True)

        def watched() -> T | None:
            if wait.error is not None:
                raise wait.error
            found = look()
            if found is not None:
                self.leave()
            return found

        return watched

    def run_blocking(self, call: Callable[[], T]) -> T:
        """Return the result of a collective that cannot be interrupted."""
        around = self.wait
        self.enter()
        try:
            return call()
        finally:
            self.wait = around

    def limit(self, seconds: float | None) -> None:
        """Make waiting for ``seconds`` an error, unless another optimizer allows a longer wait.

        Raises:
            TypeError, ValueError: ``seconds`` is neither None nor a number above 0.
        """
        if seconds is not None:
            seconds = require_real(seconds, "`timeout_seconds`, unless it is None,", positive=True)
            self.timeout = seconds if self.timeout is None else max(self.timeout, seconds)

    def exceeds_timeout(self, wait: Wait, seconds: float) -> bool:
        """Return whether a wait of ``seconds`` is an error."""
        joining = self.elastic and not self.peers
        return self.timeout is not None and not wait.idle and not joining and seconds >= self.timeout

    @contextmanager
    def at(self, task: str) -> Iterator[None]:
        """Set this rank's :attr:`task` among these ranks inside a ``with`` block."""
        before, self.task = self.task, task
        try:
            yield
        finally:
            self.task = before

    def place(self) -> str:
        """Return a description of where this rank is among these ranks."""
        return self.task or ("construction of an optimizer" if self.last_record is None else self.last_record.place)

    def local_steps(self) -> int | None:
        """Return this rank's local steps of the optimizer in the latest handshake; None before any handshake."""
        if self.last_record is None:
            return None
        reference = self._counts.get(self.last_record.optimizer)
        counts = None if reference is None else reference()
        try:
            return int(self.last_record.local_steps if counts is None else counts.local_steps)
        except Exception:  # Variables of a graph cannot be read from outside of it.
            return int(self.last_record.local_steps)

    def last_seen(self, rank: int) -> int | None:
        """Return the local step of a global rank in the latest completed handshake; None if there was none."""
        return self.last_records[self.ranks.index(rank)].local_steps if self.last_records else None


class NullTracker(CollectiveTracker):
    """Tracker of ranks that are not watched: threads, or a single rank."""

    def __init__(self) -> None:
        super().__init__("", 0, [0])

    def set_peers(self, addresses: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Remember nothing: all such ranks share this object."""

    def follow_steps(self, optimizer: int, counts: StepCounter) -> None:
        """Remember nothing."""

    def limit(self, seconds: float | None) -> None:
        """Check it, and remember nothing."""
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
