"""Watchers of several ranks in one process: whom they name, and whom they do not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hvd_periodic.comm import collective_tracker
from hvd_periodic.comm.collective_tracker import CollectiveTracker, Wait
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.comm.stall_monitor import VARIABLE, StallMonitor, warn_seconds
from hvd_periodic.comm.stall_protocol import (
    SIZE,
    Datagram,
    MessageType,
    Peer,
    as_integers,
    decode,
    encode,
    from_integers,
    own_addresses,
    stable_hash,
)
from hvd_periodic.numpy import SGD, ModelAverageOptimizer

pytestmark = pytest.mark.timeout(60)

PATIENCE = 30.0


@dataclass
class Rank:
    """One rank that is watched."""

    tracker: CollectiveTracker
    monitor: StallMonitor


@contextmanager
def ranks(count: int, warns_after: float = 0.05, timeout: float | None = None) -> Iterator[list[Rank]]:
    """Ranks that have met; each with a thread of its own that answers, and the first one warns."""
    made = []
    for rank in range(count):
        tracker = CollectiveTracker("some ranks", rank, range(count))
        tracker.limit(timeout)
        tracker.begun = 10 * rank  # They need not have counted from the same place before they met.
        warns = warns_after if rank == 0 else 0
        made.append(Rank(tracker, StallMonitor(warns, True, lambda tracker=tracker: [tracker])))
    addresses = [rank.monitor.address(rank.tracker) for rank in made]
    for rank in made:
        rank.tracker.set_peers(addresses)
        rank.tracker.last_record = Record(Purpose.EXCHANGE, optimizer=1, local_steps=6)
        rank.tracker.last_records = [Record(Purpose.EXCHANGE, optimizer=1, local_steps=3)] * count
    try:
        yield made
    finally:
        for rank in made:
            rank.monitor.close()


class Counted:
    """Has counted steps."""

    local_steps = 5


class Heard(logging.Handler):
    """Collects warnings, and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Datagram a warning."""
        self.texts.append(record.getMessage())
        self.told.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    logging.getLogger("hvd_periodic").addHandler(handler)
    yield handler
    logging.getLogger("hvd_periodic").removeHandler(handler)


def wait_in_thread(rank: Rank, done: Callable[[], bool]) -> tuple[threading.Thread, list[Exception]]:
    """Let a rank come to the next collective and wait there; return the thread, and what it raises."""
    errors: list[Exception] = []
    number = rank.tracker.start_collective()

    def work() -> None:
        try:
            rank.tracker.wait_for(number, done)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


def test_who_does_not_come_is_named_and_nobody_else(heard: Heard) -> None:
    with ranks(3) as (first, second, third):
        third.tracker.follow_steps(1, counts := Counted())
        second.tracker.start_collective()
        done = threading.Event()
        thread, errors = wait_in_thread(first, done.is_set)
        assert heard.told.wait(PATIENCE)
        done.set()
        thread.join(PATIENCE)
    assert not errors
    assert counts.local_steps == 5
    assert heard.texts[0].startswith("Rank 0 has waited 0.")
    assert (
        " s in exchange of optimizer 1 at local step 6: rank 2 at local step 5 has not arrived: it is in "
        in (heard.texts[0])
    )
    assert "rank 1" not in heard.texts[0]
    assert "test_waiting.py" in heard.texts[0], "where its main thread is"


def test_a_rank_that_waits_elsewhere_says_for_what(heard: Heard) -> None:
    with ranks(2) as (first, second):
        second.tracker.wait = Wait(0)
        second.tracker.wait.since = 0.0
        second.tracker.task = "center()"
        done = threading.Event()
        thread, _ = wait_in_thread(first, done.is_set)
        assert heard.told.wait(PATIENCE)
        done.set()
        thread.join(PATIENCE)
    assert "rank 1 at local step 6 has not arrived: it waits for" in heard.texts[0]
    assert heard.texts[0].endswith("in center()")


def test_a_rank_that_does_not_answer_is_named_with_the_step_of_the_last_meeting(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_tracker, "_PATIENCE", 0.1)
    with ranks(2) as (first, second):
        second.monitor.close()
        second.monitor.close = lambda: None  # type: ignore[method-assign]
        done = threading.Event()
        thread, _ = wait_in_thread(first, done.is_set)
        assert heard.told.wait(PATIENCE)
        done.set()
        thread.join(PATIENCE)
    assert heard.texts[0].endswith("rank 1 does not answer; its last handshake was at local step 3")


def test_nobody_is_accused_where_all_have_come(heard: Heard) -> None:
    with ranks(2) as (first, second):
        second.tracker.start_collective()
        second.tracker.start_collective()
        done = threading.Event()
        thread, _ = wait_in_thread(first, done.is_set)
        assert heard.told.wait(PATIENCE)
        done.set()
        thread.join(PATIENCE)
    assert heard.texts[0].endswith("All ranks have arrived: data is in transit, or the network has stopped")


def test_nobody_is_accused_before_ranks_have_met(heard: Heard) -> None:
    with ranks(2) as (first, _):
        first.tracker.peers = {}
        done = threading.Event()
        thread, _ = wait_in_thread(first, done.is_set)
        assert heard.told.wait(PATIENCE)
        done.set()
        thread.join(PATIENCE)
    assert "The missing ranks are not known" in heard.texts[0]
    assert "rank 1" not in heard.texts[0]


def test_warnings_come_at_growing_intervals(heard: Heard) -> None:
    with ranks(2, warns_after=0.02) as (first, _):
        done = threading.Event()
        thread, _ = wait_in_thread(first, lambda: len(heard.texts) >= 4 or done.is_set())
        thread.join(PATIENCE)
    waited = [float(text.split("waited ")[1].split(" s in")[0]) for text in heard.texts]
    assert waited == sorted(waited)
    assert waited[3] >= 8 * 0.02, "doubled three times"


def test_waiting_too_long_is_an_error(heard: Heard) -> None:
    with ranks(2, warns_after=0, timeout=0.1) as (first, _):
        thread, errors = wait_in_thread(first, lambda: False)
        thread.join(PATIENCE)
    assert [type(error) for error in errors] == [TimeoutError]
    assert "rank 1 at local step 6 has not arrived" in str(errors[0])
    assert "longer than timeout_seconds=0.1" in str(errors[0])
    assert not heard.texts, "0 warns never"


def test_waiting_for_a_rank_that_has_ended_is_an_error() -> None:
    with ranks(3) as (first, second, third):
        third.tracker.start_collective()
        third.monitor.announce_exit("its program is over")  # It had come: nobody waits for it.
        done = threading.Event()
        thread, errors = wait_in_thread(first, done.is_set)
        assert first.monitor.exit_received.wait(PATIENCE)
        assert thread.is_alive()
        second.monitor.announce_exit("ValueError: of the second")
        thread.join(PATIENCE)
    assert [type(error) for error in errors] == [RuntimeError]
    assert "rank 1 at local step 6 has ended: ValueError: of the second" in str(errors[0])


def test_elastic_ranks_leave_it_to_horovod() -> None:
    with ranks(2) as (first, second):
        first.tracker.elastic = True
        wait = Wait(first.tracker.start_collective())
        second.monitor.announce_exit("killed")
        assert first.monitor.exit_received.wait(PATIENCE)
        assert first.tracker.exited_before(wait) is None


def test_a_rank_that_has_left_comes_to_assemblies_and_to_nothing_else() -> None:
    with ranks(2) as (first, second):
        second.monitor.announce_exit("its program is over", MessageType.IDLE)
        second.tracker.start_collective()
        assert first.monitor.exit_received.wait(PATIENCE)
        look = first.tracker.begin_idle_barrier(iter([None, 7]).__next__)
        assert first.tracker.wait is not None
        assert first.tracker.exited_before(first.tracker.wait) is None
        assert [look(), look()] == [None, 7]
        assert first.tracker.wait is None
        thread, errors = wait_in_thread(first, lambda: False)
        thread.join(PATIENCE)
    assert [type(error) for error in errors] == [RuntimeError]
    assert "rank 1 at local step 6 has ended: its program is over" in str(errors[0])


@pytest.mark.parametrize("idle", [True, False])
def test_idle_barriers_take_longer_than_the_timeout_unless_a_call_limits_them(idle: bool) -> None:
    with ranks(2, timeout=5.0) as (first, _), first.tracker.at("adopt()", idle=idle):
        first.tracker.begin_idle_barrier(lambda: None)
        assert first.tracker.wait is not None
        assert first.tracker.exceeds_timeout(first.tracker.wait, 6.0) is not idle


def test_who_holds_the_others_up_is_given_up_under_elastic_horovod(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, and of those that wait nobody does: Horovod will tell them."""
    ended = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    with ranks(3, warns_after=0, timeout=0.2) as (first, second, third):
        for rank in (first, second, third):
            rank.tracker.elastic = True
        done = threading.Event()
        threads, errors = zip(*(wait_in_thread(rank, done.is_set) for rank in (first, third)), strict=True)
        assert ended.wait(PATIENCE)
        second.monitor.close()
        for rank in (first, third):  # Whoever gives up the second, the other knows.
            while rank.monitor._evicting.get("some ranks") is not rank.tracker.wait:
                assert heard.told.wait(PATIENCE)
        done.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert errors == ([], [])
    assert "This rank tells rank 1 to end; the others continue" in heard.texts[0]


def test_who_comes_late_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("it has come"))
    with ranks(2, warns_after=0) as (first, second):
        second.tracker.elastic = True
        first.tracker.start_collective()
        note = Datagram(MessageType.EVICT, second.monitor.own.token, 0, 0, begun=first.tracker.begun)
        second.tracker.start_collective()
        second.monitor._evict_self(note, second.tracker)
        second.tracker.elastic = False
        first.tracker.start_collective()
        second.monitor._evict_self(replace(note, begun=first.tracker.begun), second.tracker)


def test_what_strangers_send_is_passed_over(heard: Heard) -> None:
    with ranks(2) as (first, second):
        stranger = Datagram(MessageType.EXIT, bytes(16), 0, 1, text="no")
        second.monitor.send(stranger, first.monitor.own)
        second.monitor._sockets[0].sendto(b"GET / HTTP/1.1", first.monitor.own.addresses[0])
        second.monitor._sockets[0].sendto(bytes(SIZE), first.monitor.own.addresses[0])
        second.monitor.announce_exit("yes")
        assert first.monitor.exit_received.wait(PATIENCE)
        assert [note.text for note in first.tracker.exited.values()] == ["yes"]


def test_a_note_arrives_as_it_was_sent() -> None:
    note = Datagram(MessageType.ANSWER, bytes(range(16)), 7, 2, 3, 4, 5, 6.5, "in load(), train.py:8, größer")
    assert decode(encode(note)) == note
    assert len(encode(replace(note, text="ä" * 1000))) == SIZE
    peer = Peer(bytes(range(240, 256)), (("10.0.0.1", 1), ("255.255.255.254", 65535)), 9)
    assert from_integers(as_integers(peer)) == peer
    assert from_integers(np.empty(0, np.int64)) is None


def test_addresses_are_those_the_launcher_was_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_addresses(one_host=True) == ["127.0.0.1"]
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.0/8,no_such_interface")
    assert own_addresses(one_host=False) == ["127.0.0.1"]


def test_it_listens_on_the_named_addresses_alone(monkeypatch: pytest.MonkeyPatch, heard: Heard) -> None:
    """Of an address that no interface has, as the name of a host may have one, nothing is told to the others."""
    named = ["127.0.0.2", "203.0.113.7", "127.0.0.3"]
    monkeypatch.setattr("hvd_periodic.comm.stall_monitor.own_addresses", lambda one_host: named)
    with ranks(2) as (first, second):
        for rank in (first, second):
            bound = [each.getsockname() for each in rank.monitor._sockets]
            assert [host for host, _ in bound] == ["127.0.0.2", "127.0.0.3"]
            assert list(rank.monitor.own.addresses) == bound
        for address in first.monitor.own.addresses:
            only = replace(first.monitor.own, addresses=(address,))
            first.monitor.exit_received.clear()
            note = Datagram(MessageType.EXIT, only.token, stable_hash("some ranks"), 1, text="over there")
            second.monitor.send(note, only)
            assert first.monitor.exit_received.wait(PATIENCE)
    monkeypatch.setattr("hvd_periodic.comm.stall_monitor.own_addresses", lambda one_host: named[1:2])
    with pytest.raises(OSError, match="Cannot assign requested address"):
        StallMonitor(0, False, list)


def test_the_environment_says_when_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert warn_seconds() == 60
    for text, seconds in (("0", 0.0), (" 2.5 ", 2.5), ("", 60.0)):
        monkeypatch.setenv(VARIABLE, text)
        assert warn_seconds() == seconds
    for text in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of seconds.* Received: '{text}'"):
            warn_seconds()


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (-1.0, ValueError), ("1", TypeError), (True, TypeError)])
def test_a_limit_is_a_positive_number(value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="`timeout_seconds`, unless it is None, must be"):
        ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 2, timeout_seconds=value)  # type: ignore[arg-type]


def test_the_longest_limit_counts() -> None:
    tracker = CollectiveTracker("some ranks", 0, [0, 1])
    for seconds in (None, 2.0, 3.0, 1.0, None):
        tracker.limit(seconds)
    assert tracker.timeout == 3.0
