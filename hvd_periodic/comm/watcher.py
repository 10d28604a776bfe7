"""Stall monitor that names missing ranks: one thread per process says where it is, and asks where the others are."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import numpy as np

from hvd_periodic.comm.attendance import Attendance, Wait, attendances
from hvd_periodic.comm.departure import watch_end
from hvd_periodic.comm.failures import OVER, Failures, wants_all
from hvd_periodic.comm.inquiry import TICK, Inquiry, at_step, position, report
from hvd_periodic.comm.presence import SIZE, Kind, Note, Peer, as_integers, number_of, own_hosts, packed, unpacked
from hvd_periodic.ranks import named

logger = logging.getLogger("hvd_periodic")

VARIABLE = "HVD_PERIODIC_WARN_SECONDS"
"""Environment variable: seconds of waiting after which missing ranks are named; 0: never."""

_DEFAULT_SECONDS = 60.0
_GRACE = 5.0
"""Seconds within which Horovod ends a collective after one of its ranks has ended."""

_SOON = 1.0
"""Seconds within which a rank reports why it ends, after Horovod has noticed its end."""

_SENDING = 1.0
"""Maximum seconds for sending a datagram."""

_ADVICE = (
    "Find out what keeps the ranks that have not come (py-spy dump --pid shows where a process is), or raise "
    "timeout_seconds if it may take so long"
)


def warn_seconds() -> float:
    """Return the seconds that the environment sets; 0: never.

    Raises:
        ValueError: they are not a number of at least 0.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"The environment variable {VARIABLE} must be a number of seconds, or 0 for no warnings. Received: {text!r}"
        )
    return seconds


class Watcher:
    """Stall monitor of one process.

    Args:
        warns_after: seconds of waiting before a warning; 0: never.
        one_host: whether all ranks are on this host.
        of_process: returns the trackers to watch.

    Raises:
        OSError: this host cannot receive datagrams.
    """

    def __init__(
        self, warns_after: float, one_host: bool, of_process: Callable[[], Sequence[Attendance]] = attendances
    ) -> None:
        self._warns_after, self._one_host, self._attendances = warns_after, one_host, of_process
        self._sockets = _opened(own_hosts(one_host))
        self._readable = DefaultSelector()
        for each in self._sockets:
            self._readable.register(each, EVENT_READ)
        self.own = Peer(secrets.token_bytes(16), tuple(each.getsockname() for each in self._sockets))
        self._next: dict[str, tuple[Wait, float]] = {}
        self._inquiries: dict[str, Inquiry] = {}
        self._ending: dict[int, float] = {}
        self._given_up: dict[str, Wait] = {}
        self.told = threading.Event()
        """Set when another process has reported its end."""
        self.failures = Failures()
        self._asked = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hvd_periodic watcher", daemon=True)
        self._thread.start()

    def introduction(self, attendance: Attendance) -> np.ndarray:
        """Return this process's address and its count of collectives as integers, for other ranks."""
        return as_integers(replace(self.own, begun=attendance.begun))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.join()
        self._readable.close()
        for each in self._sockets:
            each.close()

    def _run(self) -> None:
        looks_at = 0.0
        while not self._closed:
            for key, _ in self._readable.select(self._pause()):
                receiver: Any = key.fileobj
                try:
                    data, source = receiver.recvfrom(SIZE + 1)
                except OSError:  # A datagram sent to a process that has ended comes back as an error.
                    continue
                self._receive(data, source, receiver)
            now = time.monotonic()
            if now >= looks_at:
                self._look(now)
                looks_at = now + TICK if self._inquiries else now

    def _pause(self) -> float:
        """Return for how many seconds nothing can be due."""
        if self._inquiries:
            return TICK
        limits = [limit for limit in (self._warns_after, *(a.timeout for a in self._attendances())) if limit]
        return min([1.0, *(limit / 4 for limit in limits)])

    def _receive(self, data: bytes, source: tuple[str, int], receiver: socket.socket) -> None:
        note = unpacked(data)
        if note is None or not secrets.compare_digest(note.token, self.own.token):
            return
        attendance = next((a for a in self._attendances() if number_of(a.name) == note.ranks), None)
        peer = None if attendance is None else attendance.peers.get(note.rank)
        if attendance is None or peer is None:
            return
        if note.kind == Kind.ASK:
            with suppress(OSError):
                receiver.sendto(packed(self._answer(note, attendance, peer)), source)
        elif note.kind == Kind.ANSWER:
            inquiry = self._inquiries.get(attendance.name)
            if inquiry is not None and inquiry.number == note.wait:
                inquiry.answers[note.rank] = note
        elif note.kind == Kind.FAIL:
            self.failures.hear(note)
        elif note.kind in (Kind.END, Kind.LEAVE):
            attendance.note_end(note)
            self.failures.hear(note)
            self.told.set()
        elif note.kind == Kind.GIVEN_UP and attendance.wait is not None:
            self._given_up[attendance.name] = attendance.wait
        elif note.kind == Kind.GIVE_UP:
            self._be_given_up(note, attendance)

    def _answer(self, question: Note, attendance: Attendance, peer: Peer) -> Note:
        """Return a note that says where this process is."""
        waiting = [(a, wait) for a in self._attendances() if (wait := a.wait) is not None and not _is_over(wait)]
        steps, seconds, text = attendance.local_steps(), 0.0, position()
        if waiting:
            other, wait = waiting[0]
            seconds, text = time.monotonic() - wait.since, other.place()
        return Note(
            Kind.ANSWER,
            peer.token,
            question.ranks,
            attendance.rank,
            question.wait,
            attendance.begun,
            -1 if steps is None else steps,
            seconds,
            text,
        )

    def _look(self, now: float) -> None:
        """Ask about waits that have been long, and report the answers."""
        for attendance in self._attendances():
            wait, inquiry = attendance.wait, self._inquiries.get(attendance.name)
            gone = None if wait is None else attendance.gone_before(wait)
            if wait is not None and gone is not None and not _is_over(wait):
                self._end_with(attendance, wait, gone, now)
            elif inquiry is not None and inquiry.wait is not wait:
                del self._inquiries[attendance.name]
            elif inquiry is not None:
                self._follow_up(inquiry, now)
            elif wait is not None:
                self._begin_inquiry(attendance, wait, now)

    def _begin_inquiry(self, attendance: Attendance, wait: Wait, now: float) -> None:
        known, due = self._next.get(attendance.name, (None, 0.0))
        if known is not wait:
            due = self._warns_after or math.inf
        final = attendance.is_too_long(wait, now - wait.since)
        if (final or now - wait.since >= due) and not _is_over(wait):
            self._asked += 1
            self._inquiries[attendance.name] = Inquiry(attendance, wait, self._asked, final, now)
            self._follow_up(self._inquiries[attendance.name], now)

    def _follow_up(self, inquiry: Inquiry, now: float) -> None:
        attendance = inquiry.attendance
        inquiry.final = attendance.is_too_long(inquiry.wait, now - inquiry.wait.since)
        if inquiry.is_over(now):
            del self._inquiries[attendance.name]
            if attendance.wait is inquiry.wait and not _is_over(inquiry.wait):
                self._next[attendance.name] = inquiry.wait, 2 * (now - inquiry.wait.since)
                text = report(inquiry, time.monotonic(), self._one_host)
                if inquiry.final:
                    self._give_up(inquiry, f"{text}. It is longer than timeout_seconds={attendance.timeout:g}")
                else:
                    logger.warning("%s", text)
        else:
            for rank in inquiry.to_be_asked(now):
                inquiry.asked[rank] = now
                self._ask(inquiry, rank)

    def _give_up(self, inquiry: Inquiry, text: str) -> None:
        """End the wait with an error; or, in elastic jobs, end the processes that hold up the others."""
        attendance, wait = inquiry.attendance, inquiry.wait
        sick = inquiry.holding_up() if attendance.elastic else []
        if sick:
            logger.warning("%s. This rank tells %s to end; the others go on", text, named(sick))
            self._given_up[attendance.name] = wait
            for rank in inquiry.others():
                self._send(Kind.GIVE_UP if rank in sick else Kind.GIVEN_UP, attendance, rank, begun=wait.number)
        elif self._given_up.get(attendance.name) is not wait:  # Otherwise, Horovod will report the ranks told to end.
            self._raise(wait, TimeoutError(f"{text}. {_ADVICE}"))

    def _be_given_up(self, note: Note, attendance: Attendance) -> None:
        """End this process, unless it has reached the collective meanwhile."""
        if attendance.elastic and attendance.has_come(note.rank, note.begun, attendance.begun + 1):
            line = f"Rank {attendance.rank} is in {position()}, and is given up by rank {note.rank}, which has waited"
            print(f"{line} longer than timeout_seconds={attendance.timeout:g}", file=sys.stderr, flush=True)
            os._exit(1)

    def _ask(self, inquiry: Inquiry, rank: int) -> None:
        self._send(Kind.ASK, inquiry.attendance, rank, wait=inquiry.number)

    def _end_with(self, attendance: Attendance, wait: Wait, gone: Note, now: float) -> None:
        """End this rank, too: the one that has ended will never arrive."""
        since = self._ending.setdefault(id(wait), now)
        if wait.raises or now - since >= _GRACE:
            error = RuntimeError(
                f"Rank {attendance.rank} waits in {attendance.place()}, and rank {gone.rank}"
                f"{at_step(gone.local_steps)} has ended: {gone.text}"
            )
            self._raise(wait, error, prints=wants_all() or gone.text == OVER)

    def _raise(self, wait: Wait, error: Exception, prints: bool = True) -> None:
        """Raise an error in the waiting code; if that is inside a library, print the error and end the process."""
        if wait.raises:
            wait.error = error
            return
        line = f"{type(error).__name__}: {error}"
        if prints:
            print(line, file=sys.stderr, flush=True)
        self.tell_end(line)
        os._exit(1)

    def first_error(self, error: BaseException) -> str | None:
        """Return why another rank ended before an error of this one, if one did."""
        if "Horovod" in f"{type(error).__name__}: {error}":
            self.told.wait(_SOON)
        notes = [note for attendance in self._attendances() for note in attendance.gone.values()]
        return f"rank {notes[0].rank}{at_step(notes[0].local_steps)} has ended: {notes[0].text}" if notes else None

    def is_first(self, text: str) -> bool:
        """Report an error to all known processes; return whether this one prints it."""
        met = [attendance for attendance in self._attendances() if attendance.peers and not attendance.elastic]
        if not met:
            return True
        rank = met[0].rank
        others = {other for attendance in met for other in attendance.peers} - {rank}
        self.tell_end(text, Kind.FAIL)
        return self.failures.is_first(rank, text, others, _SOON)

    def summary(self, text: str) -> str | None:
        """Return which ranks ended with this error, and which with other errors; None if the job may go on."""
        met = [attendance for attendance in self._attendances() if attendance.peers and not attendance.elastic]
        if not met:
            return None
        steps = met[0].local_steps()
        size = len({rank for attendance in met for rank in attendance.ranks})
        return self.failures.summary(met[0].rank, text, size, at_step(-1 if steps is None else steps))

    def tell_end(self, text: str, kind: Kind = Kind.END) -> None:
        """Tell all known processes that this one ends, and why; or that it will only take part in idle barriers."""
        for attendance in self._attendances():
            steps = attendance.local_steps()
            for rank in set(attendance.peers) - {attendance.rank}:
                numbers = {"begun": attendance.begun, "local_steps": -1 if steps is None else steps}
                self._send(kind, attendance, rank, text=text, **numbers)

    def _send(self, kind: Kind, attendance: Attendance, rank: int, **more: Any) -> None:
        """Send a note to the process of a rank, if it can be reached."""
        peer = attendance.peers.get(rank)
        if peer is not None:
            self.send(Note(kind, peer.token, number_of(attendance.name), attendance.rank, **more), peer)

    def send(self, note: Note, peer: Peer) -> None:
        """Send a note to another process, on every route that may reach it."""
        for each, address in product(self._sockets, peer.addresses):
            try:
                each.sendto(packed(note), address)
            except OSError:  # No route: the rank will be reported as not answering.
                continue


def _opened(hosts: Sequence[str]) -> list[socket.socket]:
    """Return a socket on each of these addresses of this host.

    Raises:
        OSError: there are none, or none can receive datagrams.
    """
    found, refusal = [], OSError("this host has no IPv4 address")
    for host in hosts:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            opened.bind((host, 0))
        except OSError as error:  # A host's name may have addresses that none of its interfaces has.
            opened.close()
            refusal = error
            continue
        opened.settimeout(_SENDING)
        found.append(opened)
    if not found:
        raise refusal
    return found


def _is_over(wait: Wait) -> bool:
    return wait.over is not None and wait.over()


_watcher: Watcher | None = None
_lock = threading.Lock()


def watcher(one_host: bool) -> Watcher | None:
    """Return the stall monitor of this process, started on first use; None if this host allows none.

    Args:
        one_host: whether all ranks of the job are on this host.

    Raises:
        ValueError: the environment sets something other than a number of seconds.
    """
    global _watcher
    seconds = warn_seconds()
    with _lock:
        if _watcher is None:
            try:
                _watcher = Watcher(seconds, one_host)
                watch_end(_watcher)
            except OSError as error:
                logger.warning("Ranks that do not come cannot be asked where they are: %s", error)
        return _watcher


def tell_leaving() -> None:
    """Tell all known processes that this one has reached the end of its program, and only waits for the others."""
    if _watcher is not None:
        _watcher.tell_end(OVER, Kind.LEAVE)
