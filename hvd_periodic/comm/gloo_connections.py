"""The TCP connections of Gloo's process groups, which it has no way to close while a collective is under way.

If a rank is stopped, a collective with it stays under way, and destroying its group waits for it. Closing the
connections ends the collective at once, here and on the other ranks. Gloo opens one port for each group, to which other
ranks connect; this finds both kinds of connections among the sockets that appeared while the group was created.
Connections of groups that a program has created are found by their ends, which two processes tell each other.
Tests: ``test_rendezvous.py::test_a_stopped_worker_is_excluded`` and
``test_rendezvous_islands.py::test_the_others_of_an_island_hear_of_an_error``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hvd_periodic.comm.own_sockets import ends, opened, sockets


class GlooConnections:
    """The connections of the process groups of this process, as far as they are known."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    @contextmanager
    def of_group(self, store: Any, name: str, rank: int, size: int) -> Iterator[None]:
        """Find the connections of a group that all its ranks create inside the ``with`` block.

        Args:
            store: the store through which they tell each other their ports.
            name: name of the group, new to the store.
            rank: this process among them.
            size: their number.
        """
        before = sockets()
        yield
        new = {number: link for number, link in sockets().items() if before.get(number) != link}
        own, connected = [], {}
        for number, link in new.items():
            with suppress(OSError), opened(number, link) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    own.append(found.getsockname()[1])
                else:
                    connected[number] = found.getsockname()[1], found.getpeername()[1]
        store.set(f"{name}.ports.{rank}", json.dumps(own))
        theirs = {port for other in range(size) for port in json.loads(store.get(f"{name}.ports.{other}"))}
        for number, (here, there) in connected.items():
            if here in own or there in theirs:
                self._known[number] = new[number]

    def close(self) -> None:
        """Close all connections: collectives that are under way fail within moments."""
        for number, link in self._known.items():
            with suppress(OSError), opened(number, link) as found:
                found.shutdown(socket.SHUT_RDWR)
        self._known.clear()


def links() -> list[list[str]]:
    """Return the TCP connections of this process, each by the addresses of its ends, the own one first."""
    found = []
    for number, link in sockets().items():
        with suppress(OSError), opened(number, link) as connection:
            found.append(_ends(connection))
    return found


def close_links(theirs: Collection[list[str]]) -> None:
    """Close the connections to a process whose :func:`links` are these: collectives with it fail within moments."""
    for number, link in sockets().items():
        with suppress(OSError), opened(number, link) as connection:
            if _ends(connection)[::-1] in theirs:
                connection.shutdown(socket.SHUT_RDWR)


def _ends(connection: socket.socket) -> list[str]:
    """Return the addresses of both ends of a connection; an OSError if there is none."""
    return [_address(*end) for end in ends(connection)]


def _address(host: str, port: int) -> str:
    """Return an address; within a host, with the name of the host."""
    local = host.startswith("127.") or host == "::1"
    return f"{socket.gethostname() if local else ''} {host} {port}"
