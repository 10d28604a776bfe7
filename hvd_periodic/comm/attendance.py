"""Which collectives a process has begun, and which it waits for: noted where it waits, and read where others ask."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np

from hvd_periodic.arguments import require_real
from hvd_periodic.comm.presence import Kind, Note, Peer, from_integers

T = TypeVar("T")

_FIRST, _LONGEST, _GROWTH = 2e-5, 1e-3, 1.1
"""Seconds between two looks at a collective, and their growth: at most a tenth of what was waited is slept too long.

Horovod's own waiting looks once in a millisecond, which is how long a small collective takes.
"""


class Told(Protocol):
    """What a rank tells where it meets the others; see :class:`~hvd_periodic.comm.meeting.Record`."""

    @property
    def optimizer(self) -> int:
        """Which optimizer it is about."""

    @property
    def local_steps(self) -> int:
        """Iterations so far."""

    @property
    def place(self) -> str:
        """What the rank has come for, in words."""


class Counts(Protocol):
    """What has counted the steps of an optimizer."""

    @property
    def local_steps(self) -> int:
        """Iterations so far."""


class Wait:
    """A collective that this rank waits for.

    Attributes:
        number: which one of its ranks it is.
        since: when the wait began, in seconds of the monotonic clock.
        over: says that it is over, where whoever has begun it cannot say so.
        raises: the one who waits looks at ``error`` now and then.
        assembly: of ranks that are done, which may take very long; those that have left take part.
        error: to be raised there.
    """

    __slots__ = ("assembly", "error", "number", "over", "raises", "since")

    def __init__(
        self, number: int, raises: bool = False, over: Callable[[], bool] | None = None, assembly: bool = False
    ) -> None:
        self.number, self.raises, self.over, self.assembly = number, raises, over, assembly
        self.since = time.monotonic()
        self.error: Exception | None = None


class Attendance:
    """Of this rank, among ranks whose collectives come in one order on all of them.

    So their number says who has come to which, and nothing else is compared. Noting costs two assignments.

    Args:
        name: of these ranks, the same on all of them.
        rank: this one, as the job counts.
        ranks: all of them, as the job counts.

    Attributes:
        begun: collectives that this rank has come to.
        wait: the one that it waits for now.
        last: what this rank told when it met the others last.
        seen: what all told then, in the order of ``ranks``.
        peers: where they are reached, by rank; those that can be.
        gone: notes of those that have ended, or that only take part in assemblies from now on, by rank.
        task: what this rank does among them, where that is no meeting.
        timeout: seconds after which waiting is an error; None: never.
        elastic: ranks may go and come: those that go are not told of, and until ranks have met nobody waits too long.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.name, self.rank, self.ranks = name, rank, list(ranks)
        self.begun = 0
        self.wait: Wait | None = None
        self.last: Told | None = None
        self.seen: Sequence[Told] = ()
        self.peers: dict[int, Peer] = {}
        self.gone: dict[int, Note] = {}
        self.task = ""
        self.timeout: float | None = None
        self.elastic = False
        self._counts: dict[int, weakref.ref[Counts]] = {}

    def come(self) -> int:
        """Note that this rank comes to the next collective; return its number."""
        self.begun += 1
        return self.begun

    def met(self, introductions: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Take note of where all ranks are reached, and from where they count."""
        found = zip(self.ranks, map(from_integers, introductions), strict=True)
        self.peers = {rank: peer for rank, peer in found if peer is not None}
        self.gone = {}

    def note_end(self, note: Note) -> None:
        """Take note that a rank has ended, or will do no more than take part in assemblies; the first reason counts."""
        known = self.gone.get(note.rank)
        if known is None or known.kind == Kind.LEAVE:
            self.gone[note.rank] = note

    def gone_before(self, wait: Wait) -> Note | None:
        """Return the note of a rank that will never come to what this one waits for; None if there is none.

        Where ranks may go, it is Horovod that tells the others, who recover from that.
        """
        gone = [] if self.elastic else list(self.gone.items())
        ended = [(rank, note) for rank, note in gone if not (wait.assembly and note.kind == Kind.LEAVE)]
        return next((note for rank, note in ended if not self.has_come(rank, note.begun, wait.number)), None)

    def has_come(self, rank: int, begun: int, number: int) -> bool:
        """Return whether a rank that has begun so many collectives has come to one that this rank numbers so."""
        return begun - self.peers[rank].begun >= number - self.peers[self.rank].begun

    def follow(self, optimizer: int, counts: Counts) -> None:
        """Read the local steps of an optimizer there, as long as it exists."""
        self._counts[optimizer] = weakref.ref(counts)

    def wait_for(self, number: int, done: Callable[[], bool], longest: float = _LONGEST) -> None:
        """Wait, asleep, until a collective is done.

        Args:
            number: that of :meth:`come`.
            done: looks.
            longest: seconds between two looks; 0: none, where to look is what moves data.

        Raises:
            Exception: what :attr:`Wait.error` was set to meanwhile.
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
        """Note that this rank comes to the next collective and waits in it, until it says :meth:`leave`."""
        self.wait = Wait(self.come(), over=over)

    def leave(self) -> None:
        """Note that this rank waits no longer."""
        self.wait = None

    def assembly(self, look: Callable[[], T | None]) -> Callable[[], T | None]:
        """Note that this rank comes to an assembly; return what looks whether all are there, None until they are.

        Raises:
            Exception: from what is returned, what :attr:`Wait.error` was set to meanwhile.
        """
        self.wait = wait = Wait(self.come(), raises=True, assembly=True)

        def watched() -> T | None:
            if wait.error is not None:
                raise wait.error
            found = look()
            if found is not None:
                self.leave()
            return found

        return watched

    def during(self, call: Callable[[], T]) -> T:
        """Return what a collective returns that cannot be interrupted."""
        around = self.wait
        self.enter()
        try:
            return call()
        finally:
            self.wait = around

    def limit(self, seconds: float | None) -> None:
        """Let waiting for so long be an error, or for as long as another optimizer allows.

        Raises:
            TypeError, ValueError: not None, and no number above 0.
        """
        if seconds is not None:
            seconds = require_real(seconds, "`timeout_seconds`, unless it is None,", positive=True)
            self.timeout = seconds if self.timeout is None else max(self.timeout, seconds)

    def is_too_long(self, wait: Wait, seconds: float) -> bool:
        """Return whether to wait for so long is an error."""
        joining = self.elastic and not self.peers
        return self.timeout is not None and not wait.assembly and not joining and seconds >= self.timeout

    @contextmanager
    def at(self, task: str) -> Iterator[None]:
        """Say what this rank does among these ranks inside a ``with`` block."""
        before, self.task = self.task, task
        try:
            yield
        finally:
            self.task = before

    def place(self) -> str:
        """Return where this rank is among these ranks, in words."""
        return self.task or ("construction of an optimizer" if self.last is None else self.last.place)

    def local_steps(self) -> int | None:
        """Return how far this rank has come with the optimizer that was last met for; None before a meeting."""
        if self.last is None:
            return None
        reference = self._counts.get(self.last.optimizer)
        counts = None if reference is None else reference()
        try:
            return int(self.last.local_steps if counts is None else counts.local_steps)
        except Exception:  # Variables of a graph cannot be read from outside of it.
            return int(self.last.local_steps)

    def last_seen(self, rank: int) -> int | None:
        """Return the local step at which a rank was met last, as the job counts ranks; None: it never was."""
        return self.seen[self.ranks.index(rank)].local_steps if self.seen else None


class Unattended(Attendance):
    """Of ranks that nobody watches: threads, or one rank alone."""

    def __init__(self) -> None:
        super().__init__("", 0, [0])

    def met(self, introductions: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Remember nothing: all such ranks share this object."""

    def follow(self, optimizer: int, counts: Counts) -> None:
        """Remember nothing."""

    def limit(self, seconds: float | None) -> None:
        """Check it, and remember nothing."""
        Attendance("", 0, [0]).limit(seconds)


_known: dict[str, Attendance] = {}


def attendance_of(name: str, rank: int, ranks: Sequence[int]) -> Attendance:
    """Return the attendance of this process among ranks, the same for all communicators of these."""
    known = _known.get(name)
    if known is None or (known.rank, known.ranks) != (rank, list(ranks)):
        known = _known[name] = Attendance(name, rank, ranks)
    return known


def forget_all() -> None:
    """Forget all ranks, where they have changed: their communicators are made anew."""
    _known.clear()


def attendances() -> list[Attendance]:
    """Return all of this process."""
    return list(_known.values())
