"""Stall monitor: a thread of every process that says where this rank is, and names the ranks that it waits for.

When a collective takes long, the monitor asks the other ranks which collectives they have reached (a *query*), and logs
the answers; after ``timeout_seconds``, it ends the wait with an error. When a rank exits, the monitor ends the waits
for that rank.
"""

from __future__ import annotations

import logging
import math
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

from hvd_periodic.arguments import seconds_in_environment
from hvd_periodic.comm.collective_tracker import TICK, CollectiveTracker, StallQuery, Wait, at_step, trackers
from hvd_periodic.comm.exit_notice import OVER, Failures, prints_every_traceback, send_exit_notices
from hvd_periodic.comm.process_end import end_now
from hvd_periodic.comm.stall_protocol import (
    SIZE,
    Datagram,
    MessageType,
    Peer,
    as_integers,
    decode,
    encode,
    mark_arrived,
    open_sockets,
    own_addresses,
    stable_hash,
)
from hvd_periodic.frames import position
from hvd_periodic.ranks import named

logger = logging.getLogger("hvd_periodic")

VARIABLE = "HVD_PERIODIC_WARN_SECONDS"
"""Environment variable: seconds of waiting after which missing ranks are named; 0: never."""

_DEFAULT_SECONDS = 60.0

_GRACE = 5.0
"""Seconds within which Horovod ends a collective after one of its ranks has ended."""

_SOON = 1.0
"""Seconds within which a rank reports why it ends, after Horovod has noticed its end."""

_ADVICE = (
    "Find out what delays the missing ranks (py-spy dump --pid shows where a process is), or raise timeout_seconds if "
    "it may take that long"
)


def warn_seconds() -> float:
    """Return the seconds that the environment sets; 0: never.

    Raises:
        ValueError: they are not a number of at least 0.
    """
    return seconds_in_environment(VARIABLE, _DEFAULT_SECONDS, 0, "or 0 for no warnings")


class StallMonitor:
    """Stall monitor of one process.

    Args:
        warns_after: seconds of waiting before a warning; 0: never.
        one_host: whether all ranks are on this host.
        of_process: returns the trackers to monitor.

    Attributes:
        own: address of this monitor.
        exit_received: set when another process has announced its exit.
        failures: errors of other ranks.

    Raises:
        OSError: this host cannot receive datagrams.
    """

    def __init__(
        self, warns_after: float, one_host: bool, of_process: Callable[[], Sequence[CollectiveTracker]] = trackers
    ) -> None:
        self._warns_after, self._one_host, self._trackers = warns_after, one_host, of_process
        self._sockets = open_sockets(own_addresses(one_host))
        self._readable = DefaultSelector()
        for each in self._sockets:
            self._readable.register(each, EVENT_READ)
        self.own = Peer(secrets.token_bytes(16), tuple(each.getsockname() for each in self._sockets))
        self.exit_received = threading.Event()
        self.failures = Failures()
        self._next: dict[str, tuple[Wait, float]] = {}
        self._queries: dict[str, StallQuery] = {}
        self._ending: dict[int, float] = {}
        self._evicting: dict[str, Wait] = {}
        self._asked = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hvd_periodic stall monitor", daemon=True)
        self._thread.start()

    def address(self, tracker: CollectiveTracker) -> np.ndarray:
        """Return this process's address and its count of collectives as integers, for other ranks."""
        return as_integers(replace(self.own, begun=tracker.begun))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        with suppress(OSError):
            self._sockets[0].sendto(b"", self.own.addresses[0])  # It need not wait for its next look.
        self._thread.join()
        self._readable.close()
        for each in self._sockets:
            each.close()

    # The thread: receive datagrams, then look at the waits

    def _run(self) -> None:
        next_look = 0.0
        while not self._closed:
            for key, _ in self._readable.select(self._pause()):
                receiver: Any = key.fileobj
                try:
                    data, source = receiver.recvfrom(SIZE + 1)
                except OSError:  # A datagram sent to a process that has ended comes back as an error.
                    continue
                self._receive(data, source, receiver)
            now = time.monotonic()
            if now >= next_look:
                self._look(now)
                next_look = now + TICK if self._queries else now

    def _pause(self) -> float:
        """Return for how many seconds nothing can be due."""
        if self._queries:
            return TICK
        limits = [limit for limit in (self._warns_after, *(each.timeout for each in self._trackers())) if limit]
        return min([1.0, *(limit / 4 for limit in limits)])

    def _receive(self, data: bytes, source: tuple[str, int], receiver: socket.socket) -> None:
        received = decode(data)
        if received is None or not secrets.compare_digest(received.token, self.own.token):
            return
        tracker = next((each for each in self._trackers() if stable_hash(each.name) == received.ranks), None)
        peer = None if tracker is None else tracker.peers.get(received.rank)
        if tracker is None or peer is None:
            return
        if received.type == MessageType.ASK:
            with suppress(OSError):
                receiver.sendto(encode(self._answer(received, tracker, peer)), source)
        elif received.type == MessageType.ANSWER:
            query = self._queries.get(tracker.name)
            if query is not None and query.number == received.query:
                query.answers[received.rank] = received
        elif received.type == MessageType.ERROR:
            self.failures.record(received)
        elif received.type in (MessageType.EXIT, MessageType.IDLE):
            tracker.record_exit(received)
            self.failures.record(received)
            self.exit_received.set()
        elif received.type == MessageType.EVICTED and tracker.wait is not None:
            self._evicting[tracker.name] = tracker.wait
        elif received.type == MessageType.EVICT:
            self._evict_self(received, tracker)

    def _answer(self, question: Datagram, tracker: CollectiveTracker, peer: Peer) -> Datagram:
        """Return a datagram that says where this process is."""
        waiting = [(each, wait) for each in self._trackers() if (wait := each.wait) is not None]
        steps, seconds, text = tracker.local_steps(), 0.0, position()
        if waiting:
            other, wait = waiting[0]
            seconds, text = time.monotonic() - wait.since, other.place()
        numbers = question.ranks, tracker.rank, question.query, tracker.begun, steps
        return Datagram(MessageType.ANSWER, peer.token, *numbers, seconds, text)

    def _look(self, now: float) -> None:
        """Ask about waits that have been long, and report the answers."""
        for tracker in self._trackers():
            wait, query = tracker.wait, self._queries.get(tracker.name)
            notice = None if wait is None else tracker.exited_before(wait)
            if wait is not None and notice is not None:
                self._end_wait(tracker, wait, notice, now)
            elif query is not None and query.wait is not wait:
                del self._queries[tracker.name]
            elif query is not None:
                self._follow_up(query, now)
            elif wait is not None:
                self._begin_query(tracker, wait, now)

    def _end_wait(self, tracker: CollectiveTracker, wait: Wait, notice: Datagram, now: float) -> None:
        """End this rank, too: the one that has ended will never arrive."""
        since = self._ending.setdefault(id(wait), now)
        if wait.raises or now - since >= _GRACE:
            error = RuntimeError(
                f"Rank {tracker.rank} waits in {tracker.place()}, and rank {notice.rank}"
                f"{at_step(notice.local_steps)} has ended: {notice.text}"
            )
            self._raise(wait, error, prints=prints_every_traceback() or notice.text == OVER)

    def _begin_query(self, tracker: CollectiveTracker, wait: Wait, now: float) -> None:
        known, due = self._next.get(tracker.name, (None, 0.0))
        if known is not wait:
            due = self._warns_after or math.inf
        final = tracker.exceeds_timeout(wait, now - wait.since)
        if final or now - wait.since >= due:
            self._asked += 1
            self._queries[tracker.name] = StallQuery(tracker, wait, self._asked, final, now)
            self._follow_up(self._queries[tracker.name], now)

    def _follow_up(self, query: StallQuery, now: float) -> None:
        """Ask the missing ranks; once they have answered, or have had time to, report where they are."""
        tracker, wait = query.tracker, query.wait
        query.final = tracker.exceeds_timeout(wait, now - wait.since)
        if not query.is_over(now):
            for rank in query.due(now):
                query.asked[rank] = now
                self._send(MessageType.ASK, tracker, rank, query=query.number)
            return
        del self._queries[tracker.name]
        if tracker.wait is not wait:
            return
        self._next[tracker.name] = wait, 2 * (now - wait.since)
        text = query.report(time.monotonic(), self._one_host)
        if query.final:
            self._time_out(query, f"{text}. That is longer than timeout_seconds={tracker.timeout:g}")
        else:
            logger.warning("%s", text)

    def _time_out(self, query: StallQuery, text: str) -> None:
        """End the wait with an error; or, in elastic jobs, end the processes that keep the others waiting."""
        tracker, wait = query.tracker, query.wait
        stalled = query.not_waiting() if tracker.elastic else []
        if stalled:
            logger.warning("%s. This rank tells %s to end; the others continue", text, named(stalled))
            self._evicting[tracker.name] = wait
            for rank in query.others():
                kind = MessageType.EVICT if rank in stalled else MessageType.EVICTED
                self._send(kind, tracker, rank, begun=wait.number)
        elif self._evicting.get(tracker.name) is not wait:  # Otherwise, Horovod will report the ranks told to end.
            self._raise(wait, TimeoutError(f"{text}. {_ADVICE}"))

    def _evict_self(self, order: Datagram, tracker: CollectiveTracker) -> None:
        """End this process, unless it has reached the collective meanwhile."""
        if tracker.elastic and tracker.has_reached(order.rank, order.begun, tracker.begun + 1):
            line = (
                f"Rank {tracker.rank} is in {position()}, and rank {order.rank} has timed out waiting for it: it waited"
            )
            print(f"{line} longer than timeout_seconds={tracker.timeout:g}", file=sys.stderr, flush=True)
            end_now(1)

    def _raise(self, wait: Wait, error: Exception, prints: bool = True) -> None:
        """Raise an error in the waiting code; if that is inside a library, print the error and end the process."""
        if wait.raises:
            wait.error = error
            return
        line = f"{type(error).__name__}: {error}"
        if prints:
            print(line, file=sys.stderr, flush=True)
        self.announce_exit(line)
        end_now(1)

    # Exit notices, in the main thread

    def first_error(self, error: BaseException) -> str | None:
        """Return why another rank ended before an error of this one, if one did."""
        if "Horovod" in f"{type(error).__name__}: {error}":
            self.exit_received.wait(_SOON)
        notices = [notice for tracker in self._trackers() for notice in tracker.exited.values()]
        if not notices:
            return None
        return f"rank {notices[0].rank}{at_step(notices[0].local_steps)} has ended: {notices[0].text}"

    def is_first(self, text: str) -> bool:
        """Report an error to all known processes; return whether this one prints it."""
        known = self._known()
        if not known:
            return True
        rank = known[0].rank
        others = {other for tracker in known for other in tracker.peers} - {rank}
        self.announce_exit(text, MessageType.ERROR)
        return self.failures.is_first(rank, text, others, _SOON)

    def summary(self, text: str) -> str | None:
        """Return which ranks ended with this error, and which with other errors; None if the job may go on."""
        known = self._known()
        if not known:
            return None
        size = len({rank for tracker in known for rank in tracker.ranks})
        return self.failures.summary(known[0].rank, text, size, at_step(known[0].local_steps()))

    def _known(self) -> list[CollectiveTracker]:
        """Return the trackers of ranks that have met and that one failing rank ends."""
        return [tracker for tracker in self._trackers() if tracker.peers and not tracker.elastic]

    def announce_exit(self, text: str, kind: MessageType = MessageType.EXIT) -> None:
        """Tell all known processes that this one ends, and why; or that it will only take part in idle barriers."""
        for tracker in self._trackers():
            numbers = {"begun": tracker.begun, "local_steps": tracker.local_steps()}
            for rank in set(tracker.peers) - {tracker.rank}:
                self._send(kind, tracker, rank, text=text, **numbers)

    def _send(self, kind: MessageType, tracker: CollectiveTracker, rank: int, **more: Any) -> None:
        """Send a datagram to the process of a rank, if it can be reached."""
        peer = tracker.peers.get(rank)
        if peer is not None:
            self.send(Datagram(kind, peer.token, stable_hash(tracker.name), tracker.rank, **more), peer)

    def send(self, datagram: Datagram, peer: Peer) -> None:
        """Send a datagram to another process, on every route that may reach it."""
        for each, address in product(self._sockets, peer.addresses):
            try:
                each.sendto(encode(datagram), address)
            except OSError:  # No route: the rank will be reported as not answering.
                continue


_monitor: StallMonitor | None = None
_lock = threading.Lock()


def stall_monitor(one_host: bool) -> StallMonitor | None:
    """Return the stall monitor of this process, started on first use; None if this host allows none.

    Raises:
        ValueError: the environment sets something other than a number of seconds.
    """
    global _monitor
    seconds = warn_seconds()
    with _lock:
        if _monitor is None:
            try:
                _monitor = StallMonitor(seconds, one_host)
                send_exit_notices(_monitor)
            except OSError as error:
                logger.warning("Missing ranks cannot be asked where they are: %s", error)
        return _monitor


def monitor_address(
    tracker: CollectiveTracker, one_host: bool, store: Callable[[], Any] = lambda: None, marked: bool = True
) -> tuple[np.ndarray | None, Exception | None]:
    """Return the address of this process's stall monitor, after this rank has left a mark that it has arrived.

    Args:
        tracker: the ranks.
        one_host: whether all of them are on this host.
        store: returns the store for the mark; None: the launcher's.
        marked: whether to leave a mark: not if other ranks of the launcher have the same name and number.

    Returns:
        the address, or None if this host allows no monitor; and the error that keeps this rank from going on, if any.
    """
    try:
        monitor = stall_monitor(one_host)
    except ValueError as error:
        return None, error
    if marked and not tracker.peers and not tracker.elastic:
        mark_arrived(tracker.name, tracker.rank, store())
    return None if monitor is None else monitor.address(tracker), None


def announce_leaving() -> None:
    """Tell all known processes that this one has reached the end of its program, and only waits for the others."""
    if _monitor is not None:
        _monitor.announce_exit(OVER, MessageType.IDLE)
