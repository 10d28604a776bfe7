"""Connections between threads, as those of processes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from hvd_periodic.comm.peers import Peers
from hvd_periodic.comm.socket_mesh import connect_all
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.comm.transports import Messages, SharedMemory


def connected(communicator: ThreadCommunicator, **options: Any) -> dict[int, socket.socket]:
    """Connect all threads of a communicator; collective."""
    gather = options.pop("gather", lambda value: communicator.allgather_object(value, "connected"))
    return connect_all(communicator.rank, communicator.size, gather, one_host=True, **options)


class OverSockets(ThreadCommunicator):
    """Threads that share no memory, and reach each other over TCP."""

    def __init__(self, threads: ThreadCommunicator) -> None:
        super().__init__(threads.rank, threads._group)
        self.peers = Peers(threads, one_host=True)

    def shares_memory(self) -> bool:
        return False

    def shared_memory(self, nbytes: int) -> SharedMemory:
        raise NotImplementedError

    def messages(self) -> Messages:
        return self.peers.messages()

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        return self.peers.begin_idle_barrier(barrier_id)

    def dead_ranks(self) -> list[int]:
        return self.peers.dead_ranks()
