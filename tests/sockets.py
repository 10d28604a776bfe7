"""Connections between threads, as those of processes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from hvd_periodic.comm.peers import Peers
from hvd_periodic.comm.socket_mesh import connect_all
from hvd_periodic.comm.socket_messages import SocketMessages
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.comm.transports import Messages, SharedMemory


def connected(communicator: ThreadCommunicator, **options: Any) -> dict[int, socket.socket]:
    """Connect all threads of a communicator; collective."""
    gather = options.pop("gather", lambda value: communicator.allgather_object(value, "connected"))
    return connect_all(communicator.rank, communicator.size, gather, one_host=True, **options)


def closed_at_the_end(communicator: ThreadCommunicator, messages: SocketMessages) -> SocketMessages:
    """Return messages that are closed when all threads have ended, as those of processes are."""
    communicator._group.at_end.append(messages.close)
    return messages


class _ClosedPeers(Peers):
    _communicator: ThreadCommunicator

    def _connected(self) -> SocketMessages:
        return closed_at_the_end(self._communicator, super()._connected())


class OverSockets(ThreadCommunicator):
    """Threads that share no memory, and reach each other over TCP."""

    def __init__(self, threads: ThreadCommunicator) -> None:
        super().__init__(threads.rank, threads._group)
        self.peers = _ClosedPeers(threads, one_host=True)

    def shares_memory(self) -> bool:
        return False

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        raise NotImplementedError

    def messages(self) -> Messages:
        return self.peers.messages()

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        return self.peers.begin_idle_barrier(barrier_id)

    def dead_ranks(self) -> list[int]:
        return self.peers.dead_ranks()
