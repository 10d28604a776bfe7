"""What processes tell each other outside of collectives: marks of arrival, addresses and datagrams.

Before the first handshake, when ranks do not know each other's addresses, they leave marks in the storage of their job.
From then on, stall monitors exchange datagrams.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

TEXT_BYTES = 400
"""Bytes of the text in a datagram."""

_FORMAT = struct.Struct(f"<4sB16sqqqqqd{TEXT_BYTES}s")
_MAGIC = b"hvdp"
_ADDRESSES = 4
"""Maximum number of IPv4 addresses of a host that others try."""

_INTERFACES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "NCCL_SOCKET_IFNAME")
"""Environment variables that tell launchers which network to use: names of interfaces, or subnets."""

_SENDING = 1.0
"""Maximum seconds for sending a datagram."""

SIZE = _FORMAT.size
"""Bytes of a datagram."""


class MessageType(IntEnum):
    """Type of a datagram.

    Attributes:
        ASK: asks where the receiver is.
        ANSWER: answers ASK.
        EXIT: the sender ends.
        IDLE: the sender only takes part in idle barriers from now on.
        EVICT: the receiver has to end, so that the others can go on without it.
        EVICTED: another rank was told to end.
        ERROR: the sender has an error, and will end.
    """

    ASK = 0
    ANSWER = 1
    EXIT = 2
    IDLE = 3
    EVICT = 4
    EVICTED = 5
    ERROR = 6


@dataclass(frozen=True)
class Datagram:
    """A message between two stall monitors. All have one size; the text is only ever displayed.

    Attributes:
        type: its type.
        token: the receiver's token, which only the ranks of its handshakes know.
        ranks: a number that identifies the set of ranks among which the sender waits.
        rank: rank of the sender.
        query: number of the query, which an answer repeats.
        begun: number of collectives of these ranks that the sender has started.
        local_steps: local steps of the sender; -1: unknown.
        seconds: how long the sender has been waiting; 0: it is not waiting.
        text: where the sender is, or why it ends.
    """

    type: int
    token: bytes
    ranks: int
    rank: int
    query: int = 0
    begun: int = 0
    local_steps: int = -1
    seconds: float = 0.0
    text: str = ""


def encode(datagram: Datagram) -> bytes:
    """Return the bytes of a datagram."""
    *values, text = astuple(datagram)
    return _FORMAT.pack(_MAGIC, *values, text.encode()[:TEXT_BYTES])


def decode(data: bytes) -> Datagram | None:
    r"""Return the datagram that has these bytes; None if they are something else.

    Example:
        >>> decode(encode(Datagram(MessageType.EXIT, bytes(16), ranks=7, rank=2, text="Ende\x1b[2J"))).text
        'Ende?[2J'
        >>> decode(b"hello") is None
        True
    """
    if len(data) != SIZE or not data.startswith(_MAGIC):
        return None
    _, kind, token, ranks, rank, query, begun, local_steps, seconds, text = _FORMAT.unpack(data)
    letters = text.rstrip(b"\0").decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else "?" for letter in letters)
    return Datagram(kind, token, ranks, rank, query, begun, local_steps, seconds, shown)


def stable_hash(name: str) -> int:
    """Return a number of 56 bits that is the same for a name in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Peer:
    """Address of a process.

    Attributes:
        token: the token with which it recognizes the ranks of its handshakes.
        addresses: pairs of host and port, of which one or several may work.
        begun: number of collectives of these ranks that it had started before the handshake.
    """

    token: bytes
    addresses: tuple[tuple[str, int], ...]
    begun: int = 0


def as_integers(peer: Peer) -> np.ndarray:
    """Return the address of a process as integers, for a handshake."""
    found = [int(ipaddress.IPv4Address(host)) << 16 | port for host, port in peer.addresses[:_ADDRESSES]]
    found += [0] * (_ADDRESSES - len(found))
    return np.array([*struct.unpack("<2q", peer.token), peer.begun, *found], np.int64)


def from_integers(integers: np.ndarray | None) -> Peer | None:
    """Return the address of another process, from its integers; None if it cannot be reached.

    Example:
        >>> from_integers(as_integers(Peer(b"0123456789abcdef", (("127.0.0.1", 80),), 3)))
        Peer(token=b'0123456789abcdef', addresses=(('127.0.0.1', 80),), begun=3)
    """
    if integers is None or len(integers) != 3 + _ADDRESSES:
        return None
    first, second, begun, *told = map(int, integers)
    found = tuple((str(ipaddress.IPv4Address(each >> 16)), each & 0xFFFF) for each in told if each)
    return Peer(struct.pack("<2q", first, second), found, begun)


def own_addresses(one_host: bool) -> list[str]:
    """Return the addresses of this host that other ranks may reach: those of the user's interfaces, or of its name."""
    if one_host:
        return ["127.0.0.1"]
    found = [address for variable in _INTERFACES for address in _of_setting(os.environ.get(variable, ""))]
    if not found:
        found = list(_of_name())
    return list(dict.fromkeys(found))[:_ADDRESSES]


def _of_setting(setting: str) -> Iterator[str]:
    """Yield the addresses of this host on the networks that a launcher was told to use."""
    for part in filter(None, re.split(r"[,\s]+", setting)):
        try:
            network = ipaddress.IPv4Network(part, strict=False)
        except ValueError:
            address = _of_interface(part)
        else:
            address = _towards(str(network.network_address + 1))
            if address is not None and ipaddress.IPv4Address(address) not in network:
                address = None
        if address is not None:
            yield address


def _of_interface(name: str) -> str | None:
    """Return the address of a network interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])


def _of_name() -> Iterator[str]:
    """Yield the addresses of this host's name, and the address of its route to other networks."""
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_DGRAM)
        yield from (str(address[0]) for *_, address in resolved if not str(address[0]).startswith("127."))
    except OSError:
        pass
    outward = _towards("192.0.2.1")  # Reserved for documentation: nothing is sent, the host only looks up its route.
    if outward is not None:
        yield outward


def _towards(host: str) -> str | None:
    """Return the address from which this host would send to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def open_sockets(hosts: Sequence[str]) -> list[socket.socket]:
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


_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
"""Environment variables with the address of horovodrun's server, under Gloo."""

_FOLDER = "PMIX_SERVER_TMPDIR"
"""Environment variable with the folder of Open MPI's session on this host."""

_SECONDS = 2.0
"""Maximum seconds for a look at all marks, and for a request to the server."""

_stores: dict[str, Any] = {}
"""Stores of a job's library by the name of the ranks."""


def mark_arrived(name: str, rank: int, store: Any = None) -> None:
    """Leave a mark that a rank has arrived at the first handshake of some ranks; without storage, do nothing.

    The storage is the store of the job's library, if it has one that a thread may query, with ``set(key, value)`` and
    ``check(keys)``; under Gloo, horovodrun's server; otherwise the folder of Open MPI's session on this host. All that
    is read there is whether a mark exists.
    """
    try:
        if store is not None:
            _stores[name] = store
            store.set(_key(name, rank), "here")
        elif all(variable in os.environ for variable in _SERVER):
            _ask("PUT", name, rank)
        elif _FOLDER in os.environ:
            _file(name, rank).touch()
    except (OSError, RuntimeError, http.client.HTTPException):
        return


def missing_ranks(name: str, ranks: Iterable[int], own: int, one_host: bool) -> list[int] | None:
    """Return the ranks, other than this one, that have not left a mark; None if that is unknown."""
    deadline = time.monotonic() + _SECONDS
    try:
        if name in _stores:
            missing = [rank for rank in (own, *ranks) if not _stores[name].check([_key(name, rank)])]
        elif all(variable in os.environ for variable in _SERVER):
            missing = []
            for rank in (own, *ranks):
                if time.monotonic() > deadline:
                    return None
                if _ask("GET", name, rank) != http.client.OK:
                    missing.append(rank)
        elif one_host and _FOLDER in os.environ:
            missing = [rank for rank in ranks if not _file(name, rank).exists()]
        else:
            return None
    except (OSError, RuntimeError, http.client.HTTPException):
        return None
    return None if own in missing else missing


def _key(name: str, rank: int) -> str:
    return f"{name}.{rank}"


def _file(name: str, rank: int) -> Path:
    return Path(os.environ[_FOLDER], _key(name, rank))


def _ask(method: str, name: str, rank: int) -> int:
    host, port = (os.environ[variable] for variable in _SERVER)
    connection = http.client.HTTPConnection(host, int(port), timeout=_SECONDS)
    try:
        connection.request(method, f"/{name}/{rank}", b"here" if method == "PUT" else None)
        return connection.getresponse().status
    finally:
        connection.close()
