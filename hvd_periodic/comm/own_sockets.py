"""The TCP connections of this process, also those that libraries have opened and give no access to.

Linux lists them among the descriptors of the process; elsewhere, none is found.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux lists the descriptors of this process."""

Address = tuple[str, int]
"""Of one end of a connection: host and port."""


def sockets() -> dict[int, str]:
    """Return the sockets of this process: the link that identifies each, by descriptor."""
    found: dict[int, str] = {}
    try:
        entries = list(_DESCRIPTORS.iterdir())
    except OSError:  # This is not Linux, or no descriptor is free.
        return found
    for entry in entries:
        with suppress(OSError):
            link = str(entry.readlink())
            if link.startswith("socket:"):
                found[int(entry.name)] = link
    return found


@contextmanager
def opened(number: int, link: str) -> Iterator[socket.socket]:
    """Return a socket, under a descriptor of its own; an OSError if it is closed, or is not TCP."""
    own = os.dup(number)
    try:
        # Without this type, Python would let all descriptors of the socket wait as socket.setdefaulttimeout() says.
        found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=own)
    except OSError:  # It is a file now.
        os.close(own)
        raise
    with found:
        if str((_DESCRIPTORS / str(found.fileno())).readlink()) != link:
            raise OSError
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError
        yield found


def ends(connection: socket.socket) -> tuple[Address, Address]:
    """Return both ends of a connection, the own one first; an OSError if there is none."""
    own, other = (end[:2] for end in (connection.getsockname(), connection.getpeername()))
    return plain(*own), plain(*other)


def plain(host: str, port: int) -> Address:
    """Return an address, the same for sockets of IPv4 and of IPv6."""
    return host.removeprefix("::ffff:"), port


def close_connections(others: Collection[Address]) -> None:
    """Close all connections to some addresses: calls that read from one or write to it fail within moments."""
    for number, link in sockets().items():
        with suppress(OSError), opened(number, link) as connection:
            if ends(connection)[1] in others:
                connection.shutdown(socket.SHUT_RDWR)
