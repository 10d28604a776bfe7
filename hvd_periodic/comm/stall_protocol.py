"""Datagrams with which processes ask each other where they are, separate from all collectives; and their addresses.

All datagrams have one size, and hold numbers and a short text, which is only ever displayed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

TEXT_BYTES = 400
"""Bytes of the text in a datagram."""

_FORM = struct.Struct(f"<4sB16sqqqqqd{TEXT_BYTES}s")
_MAGIC = b"hvdp"
_ADDRESSES = 4
"""Maximum number of IPv4 addresses of a host that others try."""

_INTERFACES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "NCCL_SOCKET_IFNAME")
"""Environment variables that tell launchers which network to use: names of interfaces, or subnets."""

SIZE = _FORM.size
"""Bytes of a datagram."""


class MessageType(IntEnum):
    """Type of a datagram.

    Attributes:
        ASK: asks where the receiver is.
        ANSWER: answers ASK.
        EXIT: the sender ends.
        IDLE: the sender only takes part in idle barriers from now on.
        EVICT: the receiver is to end, so that the others can go on without it.
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
    """Content of a datagram.

    Attributes:
        kind: its type.
        token: the receiver's token, which it has only told the ranks of its handshakes.
        ranks: a number that identifies the set of ranks among which the sender waits.
        rank: rank of the sender.
        wait: number of the query, which an answer repeats.
        begun: number of collectives of these ranks that the sender has started.
        local_steps: local steps of the sender; -1: unknown.
        seconds: how long the sender has been waiting; 0: it is not waiting.
        text: where the sender is, or why it ends.
    """

    kind: int
    token: bytes
    ranks: int
    rank: int
    wait: int = 0
    begun: int = 0
    local_steps: int = -1
    seconds: float = 0.0
    text: str = ""


def encode(note: Datagram) -> bytes:
    """Return a note as the bytes of a datagram."""
    text = note.text.encode()[:TEXT_BYTES]
    numbers = note.ranks, note.rank, note.wait, note.begun, note.local_steps, note.seconds
    return _FORM.pack(_MAGIC, note.kind, note.token, *numbers, text)


def decode(data: bytes) -> Datagram | None:
    r"""Return the note in a datagram; None if it is something else.

    Example:
        >>> decode(encode(Datagram(MessageType.EXIT, bytes(16), ranks=7, rank=2, text="Ende\x1b[2J"))).text
        'Ende?[2J'
        >>> decode(b"hello") is None
        True
    """
    if len(data) != SIZE or not data.startswith(_MAGIC):
        return None
    _, kind, token, ranks, rank, wait, begun, local_steps, seconds, text = _FORM.unpack(data)
    letters = text.rstrip(b"\0").decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else "?" for letter in letters)
    return Datagram(kind, token, ranks, rank, wait, begun, local_steps, seconds, shown)


def stable_hash(name: str) -> int:
    """Return the number that identifies a set of ranks in datagrams."""
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


def from_integers(integers: Sequence[int] | np.ndarray) -> Peer | None:
    """Return the address of another process, from its integers; None if it cannot be reached.

    Example:
        >>> from_integers(as_integers(Peer(b"0123456789abcdef", (("127.0.0.1", 80),), 3)))
        Peer(token=b'0123456789abcdef', addresses=(('127.0.0.1', 80),), begun=3)
    """
    if len(integers) != 3 + _ADDRESSES:
        return None
    first, second, begun, *told = map(int, integers)
    found = tuple((str(ipaddress.IPv4Address(each >> 16)), each & 0xFFFF) for each in told if each)
    return Peer(struct.pack("<2q", first, second), found, begun)


def own_addresses(one_host: bool) -> list[str]:
    """Return the addresses of this host that other ranks may reach: those of the user's interfaces, or of its name.

    Args:
        one_host: whether all ranks are on this host.
    """
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
