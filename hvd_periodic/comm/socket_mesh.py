"""TCP connections between all ranks of a set, which no stranger can take part in.

Ports are open only while the ranks connect. Every rank then shows that it knows the secret of this mesh, in three
messages of fixed size, the HMACs with SHA-256:

    connecting rank   magic, its rank, a random number a
    accepting rank    a random number b, HMAC(secret, "accepts", both ranks, a, b)
    connecting rank   HMAC(secret, "connects", both ranks, a, b)

The secret and the addresses travel through collectives of the job. Who does not know the secret is disconnected, and so
is who sends nothing, after a while; the others do not wait for it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector

from hvd_periodic.comm.stall_protocol import own_addresses
from hvd_periodic.comm.transports import Gather

SECONDS = 60.0
"""Seconds within which all ranks have to connect."""

_PATIENCE = 10.0
"""Seconds for one address, and for one guest."""

_AT_A_TIME = 32
"""Number of ranks to which this one connects at once: addresses that do not answer take their patience together."""

_GUESTS = 128
"""Number of connections that may be unfinished at once; a stranger who opens more ends the oldest."""

_NONCE = 32
_HELLO = struct.Struct(f"<8sI{_NONCE}s")
_MAGIC = b"hvdp\x00tcp"
_DIGEST = 32

_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After a minute without an answer of its host, a connection on which nothing is in flight ends."""

Address = tuple[str, int]


def connect_all(
    rank: int, size: int, gather: Gather, *, one_host: bool, seconds: float = SECONDS
) -> dict[int, socket.socket]:
    """Connect every rank with every other; collective.

    Args:
        rank: this rank.
        size: number of ranks.
        gather: the collective through which addresses and the secret travel.
        one_host: all ranks are on one host, whose other interfaces then stay closed.
        seconds: time within which all ranks have to connect.

    Returns:
        The connections by rank.

    Raises:
        RuntimeError: some ranks could not connect; on all ranks.
    """
    listeners, problem = _listeners(one_host, size)
    try:
        addresses = [listener.getsockname() for listener in listeners]
        told = gather((problem, addresses, secrets.token_bytes(_NONCE) if rank == 0 else b""))
        _raise_first([problem for problem, _, _ in told])
        meeting = _Meeting(rank, size, told[0][2], time.monotonic() + seconds)
        accepting = threading.Thread(target=meeting.accept, args=(listeners,), daemon=True)
        accepting.start()
        problem = meeting.connect([addresses for _, addresses, _ in told[:rank]])
        accepting.join()
    finally:
        for listener in listeners:
            listener.close()
    missing = [other for other in range(size) if other != rank and other not in meeting.connections]
    if missing and not problem:
        problem = f"rank {missing[0]} of the set has not connected to this rank within {seconds:g} s"
    try:
        _raise_first(gather(problem))
    except RuntimeError:
        for connection in meeting.connections.values():
            connection.close()
        raise
    return dict(sorted(meeting.connections.items()))


def _listeners(one_host: bool, size: int) -> tuple[list[socket.socket], str]:
    """Return sockets at free ports of this host's addresses; or none, and why."""
    found, problem = [], "this host has no IPv4 address"
    for host in own_addresses(one_host):
        try:
            found.append(socket.create_server((host, 0), backlog=size + _GUESTS))
        except OSError as error:  # A host's name may have addresses that none of its interfaces has.
            problem = f"this host accepts no connections at {host}: {error}"
    return found, "" if found else problem


def _raise_first(problems: Sequence[str]) -> None:
    found = next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None)
    if found is not None:
        raise RuntimeError(
            f"The ranks cannot connect with each other over TCP, for asynchronous exchange: {found}. Name the network "
            "between the hosts (HVD_PERIODIC_INTERFACE with the scripts, else NCCL_SOCKET_IFNAME), and let its "
            "firewall pass TCP at all ports above 1023"
        )


class _StrangerError(Exception):
    """Not a rank of the job."""


class _Guest:
    """A connection to this rank that may come from a stranger.

    Attributes:
        expected: bytes of its next message.
        received: what has come of that.
        until: when it is disconnected.
        known: the rank that it says it is, and the HMAC that shows it; None before the first message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.expected, self.received = connection, _HELLO.size, b""
        self.until = time.monotonic() + _PATIENCE
        self.known: tuple[int, bytes] | None = None


class _Meeting:
    """The ranks that connect.

    Attributes:
        connections: finished connections by rank.
    """

    def __init__(self, rank: int, size: int, secret: bytes, until: float) -> None:
        self._rank, self._size, self._secret, self._until = rank, size, secret, until
        self.connections: dict[int, socket.socket] = {}

    # Lower ranks: this one connects

    def connect(self, addresses: Sequence[Sequence[Address]]) -> str:
        """Connect to all lower ranks, some at a time; return the first problem, or an empty string."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            problems = list(pool.map(self._connect_to, range(len(addresses)), addresses))
        return next(filter(None, problems), "")

    def _connect_to(self, other: int, addresses: Sequence[Address]) -> str:
        """Connect to a rank at the first of its addresses that answers; return the problem, or an empty string."""
        failures = []
        for address in addresses:
            try:
                self.connections[other] = self._connect(other, address)
            except OSError as error:
                failures.append(f"{address[0]}:{address[1]} ({error or type(error).__name__})")
            else:
                return ""
        return f"no connection to rank {other} of the set at {', '.join(failures)}"

    def _connect(self, other: int, address: Address) -> socket.socket:
        patience = max(min(_PATIENCE, self._until - time.monotonic()), 1e-3)
        connection = socket.create_connection(address, patience)
        try:
            own = secrets.token_bytes(_NONCE)
            connection.sendall(_HELLO.pack(_MAGIC, self._rank, own))
            answer = _receive(connection, _NONCE + _DIGEST)
            its, shown = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(shown, self._digest(b"accepts", other, self._rank, own, its)):
                raise ConnectionError("it does not know the secret of this job")
            connection.sendall(self._digest(b"connects", other, self._rank, own, its))
        except OSError:
            connection.close()
            raise
        return _prepared(connection)

    # Higher ranks: this one accepts

    def accept(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections until all higher ranks have come, or time is over."""
        missing = set(range(self._rank + 1, self._size))
        guests: list[_Guest] = []
        with DefaultSelector() as selector:
            for listener in listeners:
                listener.setblocking(False)
                selector.register(listener, EVENT_READ)

            def dismiss(guest: _Guest, ends: bool = True) -> None:
                selector.unregister(guest.connection)
                guests.remove(guest)
                if ends:
                    guest.connection.close()

            while missing and (now := time.monotonic()) < self._until:
                for guest in [guest for guest in guests if now >= guest.until] + guests[:-_GUESTS]:
                    if guest in guests:
                        dismiss(guest)
                ready = selector.select(min([self._until, *(guest.until for guest in guests)]) - now)
                for key, _ in ready:
                    if key.data is None:
                        with suppress(OSError):  # It may have left meanwhile.
                            connection = key.fileobj.accept()[0]  # type: ignore[union-attr]
                            connection.setblocking(False)
                            guests.append(_Guest(connection))
                            selector.register(connection, EVENT_READ, guests[-1])
                        continue
                    try:
                        finished = self._hear(key.data, missing)
                    except BlockingIOError:
                        continue
                    except (OSError, _StrangerError):
                        dismiss(key.data)
                        continue
                    if finished is not None:
                        dismiss(key.data, ends=False)
                        missing.remove(finished)
                        self.connections[finished] = _prepared(key.data.connection)
            for guest in list(guests):
                dismiss(guest)

    def _hear(self, guest: _Guest, missing: set[int]) -> int | None:
        """Read what a guest has sent; return its rank once it has shown that it is one.

        Raises:
            OSError: its connection has ended.
            _StrangerError: it is not a rank that is missing, or has left.
        """
        part = guest.connection.recv(guest.expected - len(guest.received))
        if not part:
            raise _StrangerError
        guest.received += part
        if len(guest.received) < guest.expected:
            return None
        received, guest.received = guest.received, b""
        if guest.known is not None:
            other, expected = guest.known
            if not hmac.compare_digest(received, expected) or other not in missing:
                raise _StrangerError
            return other
        magic, other, its = _HELLO.unpack(received)
        if magic != _MAGIC or other not in missing:
            raise _StrangerError
        own = secrets.token_bytes(_NONCE)
        answer = own + self._digest(b"accepts", self._rank, other, its, own)
        if guest.connection.send(answer) < len(answer):
            raise _StrangerError
        guest.known = other, self._digest(b"connects", self._rank, other, its, own)
        guest.expected = _DIGEST
        return None

    def _digest(self, role: bytes, accepting: int, connecting: int, first: bytes, second: bytes) -> bytes:
        message = role + struct.pack("<2I", accepting, connecting) + first + second
        return hmac.digest(self._secret, message, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionError("it has closed the connection")
        received += part
    return received


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # Systems name them differently.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setblocking(False)
    return connection
