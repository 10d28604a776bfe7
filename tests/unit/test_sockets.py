"""TCP connections between ranks: strangers at ports, ranks that end, messages that no rank sends, the service."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_periodic.algorithms import AGN, EASGD, Algorithm, SlowMo
from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.service import ANSWER, payload_tag
from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.comm import socket_mesh
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.socket_messages import _HEAD, SocketMessages
from hvd_periodic.comm.threads import ThreadCommunicator, run
from hvd_periodic.comm.transports import PeerLostError
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, PeriodicOptimizer
from tests.conftest import PATIENCE
from tests.sockets import OverSockets, connected

pytestmark = pytest.mark.timeout(60)

RANKS = 3

Address = tuple[str, int]


class Strangers:
    """Connections to ports from outside of the job."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []

    def send(self, address: Address, data: bytes) -> None:
        """Connect, send something, and stay."""
        self.connections.append(socket.create_connection(address, timeout=30 * PATIENCE))
        with suppress(OSError):
            self.connections[-1].sendall(data)

    def attack(self, address: Address, generator: random.Random) -> None:
        """Send nothing, noise, and what ranks send as far as a stranger knows it."""
        noise = [generator.randbytes(generator.randrange(400)) for _ in range(12)]
        ends = [generator.randbytes(generator.choice([0, 31, 32, 200])) for _ in range(5)]
        known = [hello(rank) + end for rank, end in zip((0, 1, 2, 7, 2**32 - 1), ends, strict=True)]
        for data in (b"", hello(2)[:20], *noise, *known):
            self.send(address, data)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    found = Strangers()
    yield found
    found.close()


class Attacked:
    """Gathers for a thread: strangers reach the ports before any rank does.

    Args:
        communicator: the ranks.
        attack: what strangers do at one address.
        seen: gets the addresses of all ranks.
    """

    def __init__(
        self, communicator: ThreadCommunicator, attack: Callable[[Address], None], seen: list[Address]
    ) -> None:
        self._communicator, self._attack, self._seen = communicator, attack, seen

    def __call__(self, value: Any) -> list[Any]:
        gathered = self._communicator.allgather_object(value, "attacked")
        if isinstance(value, tuple):
            if self._communicator.rank == 0:
                found = [address for _, addresses, _ in gathered for address in addresses]
                self._seen += found
                for address in found:
                    self._attack(address)
            self._communicator.allgather_object(None, "strangers are there")
        return gathered


def hello(rank: int) -> bytes:
    return socket_mesh._HELLO.pack(socket_mesh._MAGIC, rank, bytes(32))


def test_strangers_are_dropped_while_ranks_connect(strangers: Strangers) -> None:
    """And afterwards no port is open."""
    generator = random.Random(5)
    addresses: list[Address] = []

    def ranks(communicator: ThreadCommunicator) -> list[int]:
        gather = Attacked(communicator, lambda address: strangers.attack(address, generator), addresses)
        connections = connected(communicator, gather=gather)
        messages = SocketMessages(communicator.rank, connections)
        found = []
        for other in connections:
            messages.send(np.array([10 * communicator.rank + other]), other, 4)
        for other in connections:
            out = np.empty(1, np.int64)
            messages.receive(out, other, 4).wait()
            found.append(int(out[0]))
        communicator.allgather_object(None, "end")
        messages.close()
        return found

    assert run(RANKS, ranks) == [[10, 20], [1, 21], [2, 12]]
    assert len(addresses) == RANKS
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30 * PATIENCE)


def test_more_strangers_than_a_rank_keeps(strangers: Strangers) -> None:
    """The oldest have to go; all that they are told is a random number and a digest, in answer to a rank's hello."""

    def attack(address: Address) -> None:
        for _ in range(18):  # As many as the system keeps until they are accepted.
            strangers.send(address, hello(2))

    def ranks(communicator: ThreadCommunicator) -> int:
        connections = connected(communicator, gather=Attacked(communicator, attack, []))
        for connection in connections.values():
            connection.close()
        return len(connections)

    with patch.object(socket_mesh, "_GUESTS", 16):
        assert run(RANKS, ranks) == [2, 2, 2]
    for guest in strangers.connections:
        told = b""
        with suppress(OSError):
            while part := guest.recv(1000):
                told += part
        assert len(told) in (0, 64)


def test_a_rank_that_does_not_come_is_an_error_on_all() -> None:
    connect = socket_mesh._Meeting._connect

    def broken(self: Any, other: int, address: Address) -> socket.socket:
        if self._rank == 2 and other == 0:
            raise ConnectionRefusedError("the network is down")
        return connect(self, other, address)

    def ranks(communicator: ThreadCommunicator) -> str:
        with pytest.raises(RuntimeError) as failure:
            connected(communicator, seconds=1.0)
        return str(failure.value)

    with patch.object(socket_mesh._Meeting, "_connect", broken):
        errors = run(RANKS, ranks)
    assert len(set(errors)) == 1
    assert errors[0].startswith(
        "The ranks cannot connect with each other over TCP, for asynchronous exchange: rank 0: "
    )
    assert "rank 2 of the set has not connected to this rank within 1 s" in errors[0]


def test_a_rank_of_another_job_is_a_stranger() -> None:
    """It speaks the same language, and knows another secret."""

    def ranks(communicator: ThreadCommunicator) -> str:
        def gather(value: Any) -> list[Any]:
            gathered = communicator.allgather_object(value, "secrets")
            if isinstance(value, tuple) and communicator.rank == 1:
                gathered[0] = (*gathered[0][:2], bytes(32))
            return gathered

        with pytest.raises(RuntimeError) as failure:
            connected(communicator, gather=gather, seconds=1.0)
        return str(failure.value)

    assert all("has not connected to this rank" in error for error in run(2, ranks))


def test_a_rank_that_does_not_answer_holds_up_no_other() -> None:
    """Each rank connects to all others at once."""
    connect = socket_mesh._Meeting._connect
    connects = threading.Barrier(2, timeout=30 * PATIENCE)

    def together(self: Any, other: int, address: Address) -> socket.socket:
        if self._rank == 2:
            connects.wait()
        return connect(self, other, address)

    def ranks(communicator: ThreadCommunicator) -> list[int]:
        connections = connected(communicator)
        communicator.allgather_object(None, "connected")
        for connection in connections.values():
            connection.close()
        return list(connections)

    with patch.object(socket_mesh._Meeting, "_connect", together):
        assert run(RANKS, ranks) == [[1, 2], [0, 2], [0, 1]]


# Messages from a rank that a test plays


@contextmanager
def played() -> Iterator[tuple[SocketMessages, socket.socket, SocketMessages]]:
    """Yield rank 0, the raw end of its connection with rank 1, and rank 2."""
    (first, raw), (second, third) = socket.socketpair(), socket.socketpair()
    for each in (first, second, third):
        each.setblocking(False)
    messages, other = SocketMessages(0, {1: first, 2: second}), SocketMessages(2, {0: third})
    try:
        yield messages, raw, other
    finally:
        raw.close()
        messages.close()
        other.close()


def frame(tag: int, data: np.ndarray) -> bytes:
    return _HEAD.pack(tag, data.nbytes, data.dtype.str.encode()) + data.tobytes()


def ten(tag: int) -> np.ndarray:
    if tag != 1:
        raise ValueError(f"message {tag}")
    return np.empty(10)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(1e-3)


def taken(messages: SocketMessages) -> Iterator[tuple[int, float]]:
    """Yield source and last element of what arrives."""
    while True:
        arrival = messages.next(ten)
        if arrival is None:
            messages.pause(1e-3)
        else:
            assert (arrival.tag, arrival.data.shape) == (1, (10,))
            yield arrival.source, float(arrival.data[-1])


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ((1, 2**62, b"<f8"), "it sent 4611686018427387904 bytes of '<f8' as message 1, which has 80 of '<f8'"),
        ((1, -80, b"<f8"), "it sent -80 bytes of '<f8' as message 1"),
        ((1, 80, b"<i8"), "it sent 80 bytes of '<i8' as message 1, which has 80 of '<f8'"),
        ((1, 80, b"|O"), "it sent 80 bytes of '|O' as message 1"),
        ((1, 80, b"\xff" * 8), "'ascii' codec can't decode byte"),
        ((2, 80, b"<f8"), "message 2"),
        ((-1, 80, b"<f8"), "message -1"),
    ],
)
def test_messages_that_no_rank_sends(head: tuple[int, int, bytes], text: str) -> None:
    """End the connection that they came from, and no other."""
    with played() as (messages, raw, other):
        raw.sendall(_HEAD.pack(*head))
        until(lambda: messages.next(ten) is None and messages.lost == [1])
        for request in (messages.send(np.zeros(1), 1, 1), messages.receive(np.zeros(1), 1, 1)):
            assert request.done()
            with pytest.raises(PeerLostError, match="Rank 1 has ended, or its connection has: ") as failure:
                request.wait()
            assert text in str(failure.value)
        other.send(np.arange(10.0), 0, 1)
        assert next(taken(messages)) == (2, 9)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([frame(1, np.ones(10)), frame(1, np.ones(3))]), max_size=6))
def test_noise(parts: list[bytes]) -> None:
    """It never raises, and never becomes anything else than a message of that tag, dtype and size."""
    with played() as (messages, raw, other):
        with suppress(OSError):
            raw.sendall(b"".join(parts))
        raw.close()
        other.send(np.full(10, 2.0), 0, 1)
        arrived = taken(messages)
        while next(arrived)[0] != 2:
            pass


def test_a_rank_that_stops_in_the_middle_of_a_message_holds_up_nobody() -> None:
    with played() as (messages, raw, other):
        raw.sendall(frame(1, np.ones(10))[:50])
        for value in range(50):
            other.send(np.full(10, float(value)), 0, 1)
        arrived = taken(messages)
        assert [next(arrived) for _ in range(50)] == [(2, value) for value in range(50)]
        raw.sendall(frame(1, np.ones(10))[50:])
        assert next(arrived) == (1, 1.0)


def test_all_that_a_rank_sent_before_its_end_arrives() -> None:
    with played() as (messages, raw, _):
        raw.sendall(b"".join(frame(1, np.full(10, float(value))) for value in range(5)))
        raw.close()
        until(lambda: messages._peers[1].message is not None)
        assert messages.lost == []
        arrived = taken(messages)
        assert [next(arrived) for _ in range(5)] == [(1, value) for value in range(5)]
        until(lambda: messages.lost == [1])


def test_all_that_a_rank_sent_arrives_although_nothing_can_be_sent_to_it() -> None:
    with played() as (messages, raw, _):
        raw.sendall(b"".join(frame(1, np.full(10, float(value))) for value in range(5)))
        raw.close()
        until(lambda: messages._peers[1].message is not None)
        with pytest.raises(PeerLostError, match=r"its connection has: .*Broken pipe"):
            messages.send(np.ones(10), 1, 1).wait()
        with pytest.raises(PeerLostError, match="Rank 1 has ended"):
            messages.send(np.ones(10), 1, 1).wait()
        assert messages.lost == []
        arrived = taken(messages)
        assert [next(arrived) for _ in range(5)] == [(1, value) for value in range(5)]
        until(lambda: messages.lost == [1])


def test_an_array_that_is_not_contiguous() -> None:
    with played() as (messages, _, _), pytest.raises(ValueError, match="is not contiguous"):
        messages.send(np.zeros((4, 4))[:, 1], 1, 1)


def test_ranks_that_change_are_refused() -> None:
    """They would be connected with ranks that are gone."""
    communicator: Any = object.__new__(HorovodCommunicator)
    communicator.elastic, communicator.size = True, 2
    with pytest.raises(RuntimeError, match="needs ranks that do not change, and this job is elastic: start it without"):
        communicator.shares_memory()


# The service, over these messages


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_the_service_while_strangers_are_at_every_port(center: str, strangers: Strangers) -> None:
    """Elastic averaging conserves the sum of replicas and center; nothing that strangers do changes a number."""
    addresses: list[Address] = []
    generator = random.Random(3)
    trained = threading.Event()

    def later() -> None:
        """Go on at the ports of ranks that train."""
        while not trained.is_set():
            for address in list(addresses):
                with suppress(OSError), socket.create_connection(address, timeout=30 * PATIENCE) as connection:
                    connection.sendall(generator.randbytes(100))
            time.sleep(1e-3)

    def ranks(threads: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray]:
        communicator = OverSockets(threads)
        attacked = Attacked(threads, lambda address: strangers.attack(address, generator), addresses)
        vars(communicator.peers)["_gather"] = attacked
        x = np.zeros(50)
        options: dict[str, Any] = {"asynchronous": True, "center": center, "process_set": communicator}
        optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 1, moving_rate=0.25, **options)
        for _ in range(20):
            optimizer.step([np.full(50, -1.0 - threads.rank)])
        optimizer.finalize()
        replica = x.copy()
        with optimizer.center():
            return replica, x.copy()

    noise = threading.Thread(target=later)
    with patch.dict(os.environ, {VARIABLE: "service"}):
        noise.start()
        try:
            found = run(RANKS, ranks)
        finally:
            trained.set()
            noise.join()
    for _, c in found:
        assert sum(x for x, _ in found) + c == pytest.approx(np.full(50, 20.0 * (1 + 2 + 3)), rel=1e-12)


def test_a_worker_that_ends_in_the_middle_of_a_push() -> None:
    """What it pushed in part counts for nothing; the others go on, are told, and end with one center."""

    def ranks(threads: ThreadCommunicator) -> Any:
        communicator = OverSockets(threads)
        x = {"a": np.zeros(5), "b": np.zeros(5, np.float32)}
        options: dict[str, Any] = {"asynchronous": True, "process_set": communicator}
        optimizer = AGNOptimizer(SGD(0.0), x, 1, SGD(1.0), **options)
        gradients = [np.full(5, -1.0), np.full(5, -1.0, np.float32)]
        optimizer.step(gradients)
        threads.allgather_object(None, "pushed")
        transport = optimizer.synchronizer.exchanger.worker.transport
        if threads.rank == 2:
            transport._begin(Exchange(3, 1.0))
            transport._requests.send(gradients[0], 0, 8).wait()
            for messages in (transport._requests, transport._replies, communicator.peers._barrier._messages):
                messages.close()
            return None
        for _ in range(4):
            optimizer.step(gradients)
        optimizer.finalize()
        with optimizer.center():
            return x["a"].tolist(), x["b"].tolist(), communicator.dead_ranks()

    with patch.dict(os.environ, {VARIABLE: "service"}):
        assert run(3, ranks) == [([11.0] * 5, [11.0] * 5, [2])] * 2 + [None]


STOPPED_BEFORE: dict[str, tuple[Algorithm, dict[str, Any], int]] = {
    "a payload": (AGN(), {}, payload_tag(1)),
    "learning rates": (SlowMo(), {}, ANSWER),
    "presence": (EASGD(0.25), {"parameters": {"a": "present"}}, ANSWER),
}
"""Algorithm, options, and the tag of the message before which a worker is stopped; another one has come before."""


@pytest.mark.parametrize("center", ["root", "sharded"])
@pytest.mark.parametrize("before", STOPPED_BEFORE)
def test_a_worker_that_is_stopped_in_the_middle_of_a_push(before: str, center: str) -> None:
    """The others push meanwhile; its push counts once when it goes on: as if it had pushed then, to the bit."""
    algorithm, options, tag = STOPPED_BEFORE[before]

    def ranks(threads: ThreadCommunicator, stops: bool, begun: threading.Event, pushed: threading.Barrier) -> Any:
        x = {"a": np.zeros(5), "b": np.zeros(5, np.float32)}
        place: dict[str, Any] = {"asynchronous": True, "center": center, "process_set": OverSockets(threads)}
        optimizer = PeriodicOptimizer(SGD(0.5, 0.5), x, algorithm, 1, **place, **options)
        optimizer.synchronizer.begin()

        def step() -> None:
            optimizer.step([np.full(5, -1.0 - threads.rank), np.full(5, -1.0 - threads.rank, np.float32)])

        for turn in range(3):
            if turn == threads.rank:
                step()
            threads.allgather_object(None, "pushed")
        messages = optimizer.synchronizer.exchanger.worker.transport._requests
        send = messages.send

        def stopped(data: np.ndarray, rank: int, of: int) -> Any:
            if of == tag and not begun.is_set():
                begun.set()
                pushed.wait()
            return send(data, rank, of)

        if threads.rank == 2:
            if stops:
                messages.send = stopped
            else:
                begun.set()
                pushed.wait()
            step()
        else:
            assert begun.wait(30 * PATIENCE)
            for turn in (0, 1, 0, 1):
                if turn == threads.rank:
                    step()
                turns[turn].wait()
            pushed.wait()
        optimizer.finalize()
        with optimizer.center():
            return x["a"].tolist(), x["b"].tolist()

    found = []
    with patch.dict(os.environ, {VARIABLE: "service"}):
        for stops in (True, False):
            turns = [threading.Barrier(2, timeout=30 * PATIENCE) for _ in range(2)]
            shared = threading.Event(), threading.Barrier(3, timeout=30 * PATIENCE)
            found.append(run(3, lambda threads, stops=stops, shared=shared: ranks(threads, stops, *shared)))
    assert found[0] == found[1]
    assert found[0] == [found[0][0]] * 3


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_pushes_of_others_are_counted(center: str) -> None:
    """Two workers push by turns, the second twice: 0, 1, 0, 2, 1, 0 pushes of the other since the worker's last."""

    def ranks(threads: ThreadCommunicator) -> tuple[int, int]:
        options: dict[str, Any] = {"asynchronous": True, "center": center, "process_set": OverSockets(threads)}
        optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(50)}, 1, **options)
        optimizer.synchronizer.begin()
        for turn in (0, 1, 1, 0, 1, 1):
            if turn == threads.rank:
                optimizer.step([np.ones(50)])
            threads.allgather_object(None, "pushed")
        optimizer.finalize()
        return optimizer.synchronizer.counters.pushes_missed, optimizer.synchronizer.counters.staleness_max

    with patch.dict(os.environ, {VARIABLE: "service"}):
        assert run(2, ranks) == [(2, 2), (2, 1)]


def test_the_state_of_an_optimizer_travels() -> None:
    """From the root to a rank that saves, and back to the root, as arrays and without pickle."""

    def ranks(threads: ThreadCommunicator) -> Any:
        x = np.zeros(5)
        options = {"asynchronous": True, "process_set": OverSockets(threads), "root_rank": 1}
        optimizer = AGNOptimizer(SGD(1.0), {"x": x}, 1, SGD(0.5, momentum=0.5), **options)
        optimizer.step([np.full(5, -1.0)])
        threads.allgather_object(None, "trained")
        return optimizer.synchronizer.exchanger.worker.state()

    # Around all threads: were each to patch it, the last to end would restore the other's patch.
    with patch.dict(os.environ, {VARIABLE: "service"}), patch("pickle.loads", side_effect=AssertionError):
        first, second = run(2, ranks)
    assert str(first) == str(second)
    assert any(isinstance(value, list) and value for value in first.values())
