"""How ranks reach each other without collectives and without MPI: shared memory, TCP connections, idle barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator, common_barrier
from hvd_periodic.comm.process_end import abort
from hvd_periodic.comm.shared_memory import LivenessBarrier, open_window, shares_folder
from hvd_periodic.comm.socket_mesh import connect_all
from hvd_periodic.comm.socket_messages import SocketMessages
from hvd_periodic.comm.transports import Messages, SharedMemory

_ENTER, _LEAVE = range(2)
"""Tags of the messages of idle barriers."""


class Peers:
    """The other ranks of a set, for asynchronous exchange without MPI; its methods are those of a communicator.

    Args:
        communicator: the ranks; its collectives carry names of files, addresses and secrets.
        one_host: all ranks are on one host.
    """

    def __init__(self, communicator: Communicator, one_host: bool) -> None:
        self._communicator, self._one_host = communicator, one_host
        self.rank, self.size = communicator.rank, communicator.size
        self._barrier: LivenessBarrier | SocketBarrier | None = None

    def shares_memory(self) -> bool:
        """Return whether all ranks are on one host. Collective."""
        return shares_folder(self.rank, self._gather)

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return a window of shared memory. Collective."""
        memory = open_window(self.rank, self._gather, nbytes, spare=0, later=later)
        if self._barrier is None:
            words = open_window(self.rank, self._gather, LivenessBarrier.nbytes(self.size), spare=0)
            self._barrier = LivenessBarrier(words, self.rank, self.size)
            self._gather(None)
        return memory

    def messages(self) -> Messages:
        """Return messages over connections of their own. Collective."""
        if self._barrier is None:
            self._barrier = SocketBarrier(self._connected(), self.size)
        return self._connected()

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        """Enter an idle barrier of all live ranks.

        Raises:
            RuntimeError: neither memory nor messages have been requested yet.
        """
        if self._barrier is None:
            raise RuntimeError("There is no idle barrier before shared_memory() or messages()")
        return self._barrier.begin(barrier_id)

    def leave(self) -> None:
        """Mark the end of this process as regular."""
        if self._barrier is not None:
            self._barrier.leave()

    def dead_ranks(self) -> list[int]:
        """Return the dead ranks."""
        return [] if self._barrier is None else self._barrier.dead_ranks()

    def give_up(self, ranks: Iterable[int]) -> None:
        """Let idle barriers wait for some ranks no longer."""
        if self._barrier is not None:
            self._barrier.give_up(ranks)

    def alive(self) -> bool:
        """Return True: nothing ends the connections while this process lives."""
        return True

    def abort(self) -> None:
        """End this process, upon which launchers end the others."""
        abort()

    def _gather(self, value: Any) -> list[Any]:
        return self._communicator.allgather_object(value, "hvd_periodic.peers")

    def _connected(self) -> SocketMessages:
        connections = connect_all(self.rank, self.size, self._gather, one_host=self._one_host)
        return SocketMessages(self.rank, connections, self._communicator.global_ranks)


class SocketBarrier:
    """Idle barrier over TCP, which does not wait for dead ranks, whose connections end with them.

    Args:
        messages: messages that nothing else uses.
        size: number of ranks.
    """

    def __init__(self, messages: SocketMessages, size: int) -> None:
        self._messages = messages
        self._others = [rank for rank in range(size) if rank != messages.rank]
        self._entered = 0
        self._ids: dict[int, dict[int, int]] = {rank: {} for rank in self._others}
        self._left: set[int] = set()
        self._given_up: set[int] = set()

    def leave(self) -> None:
        """Mark the end of this rank's process as regular."""
        self._tell(_LEAVE, 0)

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose connections have ended without :meth:`leave`, and those that were given up."""
        return [rank for rank in self._receive() if rank not in self._left]

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait for some ranks no longer, whether or not they live."""
        self._given_up |= set(ranks)

    def begin(self, barrier_id: int) -> Callable[[], int | None]:
        """Enter the next barrier of all live ranks; as :meth:`Communicator.begin_idle_barrier`."""
        self._entered += 1
        entered = self._entered
        self._tell(_ENTER, barrier_id)

        def poll() -> int | None:
            lost = self._receive()
            if any(entered not in self._ids[rank] and rank not in lost for rank in self._others):
                return None
            ids = [barrier_id, *(found.pop(entered) for found in self._ids.values() if entered in found)]
            return common_barrier(ids)

        return poll

    def _tell(self, tag: int, barrier_id: int) -> None:
        for rank in self._others:
            self._messages.send(np.array([self._entered, barrier_id]), rank, tag)

    def _receive(self) -> list[int]:
        """Take what others have told; return the ranks that are lost or were given up before that."""
        lost = sorted({*self._messages.lost, *self._given_up})
        while (arrival := self._messages.next(_memory)) is not None:
            if arrival.tag == _LEAVE:
                self._left.add(arrival.source)
            else:
                entered, barrier_id = arrival.data.tolist()
                self._ids[arrival.source][entered] = barrier_id
        return lost


def _memory(tag: int) -> np.ndarray:
    if tag not in (_ENTER, _LEAVE):
        raise ValueError(f"it sent message {tag} to an idle barrier")
    return np.empty(2, np.int64)


_peers: dict[tuple[str, tuple[int, ...]], tuple[object, Peers]] = {}
"""Those of this process with the library's set of ranks, which all optimizers of these ranks share."""


def peers_of(communicator: Communicator, process_set: object, one_host: bool) -> Peers:
    """Return the peers of a rank among the ranks of a communicator; collective.

    Args:
        communicator: the ranks.
        process_set: the object that represents them in their library, which makes another when it is initialized again.
        one_host: all ranks are on one host.
    """
    key = communicator.handshake_name, tuple(communicator.global_ranks)
    known = _peers.get(key)
    here = known is not None and known[0] is process_set
    everywhere = all(communicator.allgather_object(here, "hvd_periodic.peers"))
    if known is None or not everywhere:
        known = _peers[key] = process_set, Peers(communicator, one_host)
    return known[1]
