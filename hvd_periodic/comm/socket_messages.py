"""Messages of asynchronous exchange over TCP, for ranks that have no MPI.

Every message has a head of fixed size: its tag, the number of its bytes, and the dtype of its elements. The elements
are read once there is an array for them, of that dtype and size; until then they stay in the connection, and hold up
their sender alone. No message makes the receiver allocate memory, or run code.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

import numpy as np

from hvd_periodic.comm.process_end import abort
from hvd_periodic.comm.transports import LONG, Arrival, Messages, PeerLostError, Request

_HEAD = struct.Struct("<iq8s")
"""Tag, number of bytes, and dtype in numpy's notation."""

_FLUSH = 5.0
"""Seconds for what is still to be sent when the connections are closed."""

_TURN = 16
"""Number of reads from one connection before the others have their turn."""

_VIEWS = 64
"""Number of arrays handed to the system at once."""


class _SocketRequest:
    """A message that is being sent or received.

    Attributes:
        out: the array to receive into; None if the message is being sent.
        view: its bytes.
        complete: it has been sent or received.
        arrives: nobody waits for it: :meth:`SocketMessages.next` returns it.
        failed: why it never will be complete.
    """

    def __init__(self, changed: threading.Condition, tag: int, out: np.ndarray | None = None) -> None:
        self._changed, self.tag, self.out = changed, tag, out
        self.view = memoryview(b"") if out is None else _bytes_of(out)
        self.complete = self.arrives = False
        self.failed = ""

    def done(self) -> bool:
        """Return whether it is complete, or has failed."""
        return self.complete or bool(self.failed)

    def wait(self) -> None:
        """Wait until it is complete."""
        with self._changed:
            self._changed.wait_for(self.done)
        if self.failed:
            raise PeerLostError(self.failed)


class _Peer:
    """The connection to another rank.

    Attributes:
        name: how errors name it.
        sending: bytes to send, each with the request that they complete, if any.
        posted: requests to receive, in their order.
        head: memory for the head of the next message.
        filled: how many bytes of the head, or else of the elements, have come.
        message: tag, number of bytes and dtype of the next message, once its head is complete.
        target: the request that receives its elements, once there is one.
        mute: why nothing can be sent to it any longer, although it may have sent more before; empty while it works.
        lost: why the connection has ended; empty while it works.
        closed: its socket is closed.
        events: what its socket is watched for.
    """

    def __init__(self, rank: int, name: str, connection: socket.socket) -> None:
        self.rank, self.name, self.socket = rank, name, connection
        self.sending: deque[tuple[memoryview, _SocketRequest | None]] = deque()
        self.posted: list[_SocketRequest] = []
        self.head, self.filled = memoryview(bytearray(_HEAD.size)), 0
        self.message: tuple[int, int, str] | None = None
        self.target: _SocketRequest | None = None
        self.mute, self.lost, self.closed, self.events = "", "", False, 0

    def wanted(self) -> int:
        """Return the events for which to watch the socket."""
        if self.lost:
            return 0
        reads = self.message is None or self.target is not None
        return EVENT_READ * reads | EVENT_WRITE * bool(self.sending)

    def unexpected(self) -> int | None:
        """Return the tag of the next message if it has begun to arrive and no request waits for it."""
        return None if self.message is None or self.target is not None or self.lost else self.message[0]

    def accept(self, out: np.ndarray) -> None:
        """Check that the next message fits an array.

        Raises:
            ValueError: it has another size or dtype.
        """
        if self.message is not None and self.message[1:] != (out.nbytes, out.dtype.str):
            tag, nbytes, dtype = self.message
            raise ValueError(
                f"it sent {nbytes} bytes of {dtype!r} as message {tag}, which has {out.nbytes} of {out.dtype.str!r}"
            )


class SocketMessages(Messages):
    """Messages over TCP connections, which a thread serves: no rank's messages wait for another rank's.

    Args:
        rank: this rank.
        connections: connections to the other ranks, which :func:`~hvd_periodic.comm.socket_mesh.connect_all` made.
        names: what errors call the ranks. Default: their numbers.
    """

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], names: Sequence[object] | None = None
    ) -> None:
        self.rank = rank
        self._peers = {
            other: _Peer(other, f"Rank {other if names is None else names[other]}", connection)
            for other, connection in connections.items()
        }
        self._arrived: deque[Arrival] = deque()
        self._turn = 0
        self._changed = threading.Condition()
        self._closed = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector = DefaultSelector()
        self._selector.register(self._ear, EVENT_READ)
        self._watch()
        self._thread = threading.Thread(target=self._run, name="hvd_periodic connections", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> list[int]:
        """The ranks that have ended, or whose connections have; all that they sent before has been received."""
        with self._changed:
            return [peer.rank for peer in self._peers.values() if peer.lost]

    def send(self, data: np.ndarray, rank: int, tag: int) -> Request:
        """Start to send."""
        request = _SocketRequest(self._changed, tag)
        head = memoryview(_HEAD.pack(tag, data.nbytes, data.dtype.str.encode()))
        with self._changed:
            peer = self._peers[rank]
            request.failed = peer.lost or peer.mute
            if not request.failed:
                idle = not peer.sending
                peer.sending += [(head, None), (_bytes_of(data), request)]
                if idle:
                    self._write(peer)
                self._ring(peer)
        return request

    def receive(self, out: np.ndarray, rank: int, tag: int) -> Request:
        """Start to receive into ``out``."""
        request = _SocketRequest(self._changed, tag, out)
        with self._changed:
            peer = self._peers[rank]
            request.failed = peer.lost
            if not peer.lost:
                peer.posted.append(request)
                if peer.message is not None and peer.target is None:
                    self._read(peer)
                self._ring(peer)
        return request

    def next(self, allocate: Callable[[int], np.ndarray]) -> Arrival | None:
        """Return the next message, once it is complete; until then, others may come first."""
        with self._changed:
            if not self._arrived:
                self._admit(allocate)
            return self._arrived.popleft() if self._arrived else None

    def pause(self, seconds: float) -> None:
        """Sleep until a message arrives, but no longer."""

        def awake() -> bool:
            waiting = (peer.unexpected() is not None for peer in self._peers.values())
            return self._closed or bool(self._arrived) or any(waiting)

        with self._changed:
            self._changed.wait_for(awake, max(seconds, LONG))

    def alive(self) -> bool:
        """Return whether the connections are not closed."""
        return not self._closed

    def abort(self) -> None:
        """End this process: launchers then end the job, and the other ranks notice."""
        abort()

    def close(self) -> None:
        """Send what is still to be sent, and close the connections, unless they are closed."""
        with self._changed:
            if not self._closed:
                self._changed.wait_for(lambda: not any(peer.sending for peer in self._peers.values()), _FLUSH)
                self._closed = True
                self._wake()
        self._thread.join()

    # Called under the lock

    def _admit(self, allocate: Callable[[int], np.ndarray]) -> None:
        """Provide memory for messages that wait, beginning with another rank each time."""
        peers = list(self._peers.values())
        self._turn = (self._turn + 1) % max(len(peers), 1)
        for peer in peers[self._turn :] + peers[: self._turn]:
            tag = peer.unexpected()
            if tag is None:
                continue
            try:
                request = _SocketRequest(self._changed, tag, allocate(tag))
            except ValueError as error:
                self._lose(peer, str(error))
                continue
            request.arrives = True
            peer.posted.append(request)
            self._read(peer)
            self._ring(peer)

    def _read(self, peer: _Peer) -> None:
        """Read what has come, as far as there is memory for it."""
        try:
            for _ in range(_TURN):
                if peer.lost or not self._read_some(peer):
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._lose(peer, str(error))

    def _read_some(self, peer: _Peer) -> bool:
        """Read once; return whether more can be read."""
        if peer.message is None:
            peer.filled += _received(peer.socket, peer.head[peer.filled :])
            if peer.filled < _HEAD.size:
                return True
            tag, nbytes, dtype = _HEAD.unpack(peer.head)
            peer.message, peer.filled = (tag, nbytes, dtype.rstrip(b"\0").decode("ascii")), 0
        if peer.target is None:
            request = next((each for each in peer.posted if each.tag == peer.message[0]), None)
            if request is None or request.out is None:
                return False
            peer.accept(request.out)
            peer.posted.remove(request)
            peer.target = request
        if peer.filled < len(peer.target.view):
            peer.filled += _received(peer.socket, peer.target.view[peer.filled :])
        if peer.filled == len(peer.target.view):
            request, peer.target, peer.message, peer.filled = peer.target, None, None, 0
            request.complete = True
            if request.arrives and request.out is not None:
                self._arrived.append(Arrival(peer.rank, request.tag, request.out))
        return True

    def _write(self, peer: _Peer) -> None:
        """Send as much as the system takes."""
        try:
            while peer.sending:
                count = peer.socket.sendmsg([view for view, _ in list(peer.sending)[:_VIEWS]])
                while peer.sending and count >= len(peer.sending[0][0]):
                    view, request = peer.sending.popleft()
                    count -= len(view)
                    if request is not None:
                        request.complete = True
                if count:
                    view, request = peer.sending[0]
                    peer.sending[0] = view[count:], request
        except BlockingIOError:
            return
        except OSError as error:
            self._stop_sending(peer, str(error))

    def _stop_sending(self, peer: _Peer, reason: str) -> None:
        """Fail what is to be sent to a rank; what it has sent can still be read."""
        peer.mute = f"{peer.name} has ended, or its connection has: {reason}"
        for _, request in peer.sending:
            if request is not None:
                request.failed = peer.mute
        peer.sending.clear()
        self._ring(peer)
        self._changed.notify_all()

    def _lose(self, peer: _Peer, reason: str) -> None:
        """End a connection, and everything that waits for it."""
        self._stop_sending(peer, reason)
        peer.lost = peer.mute
        for request in [*peer.posted, peer.target]:
            if request is not None:
                request.failed = peer.lost
        peer.posted.clear()
        peer.target = None
        self._ring(peer)

    def _ring(self, peer: _Peer) -> None:
        """Wake the thread if it has to watch a connection for something else, or no longer."""
        if peer.wanted() != peer.events:
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # It has been told often enough.
            self._bell.send(b"\0")

    # The thread

    def _run(self) -> None:
        while True:
            ready = self._selector.select()
            with self._changed:
                for key, events in ready:
                    if key.data is None:
                        self._ear.recv(4096)
                        continue
                    if events & EVENT_READ:
                        self._read(key.data)
                    if events & EVENT_WRITE and not key.data.lost:
                        self._write(key.data)
                if self._closed:
                    break
                self._watch()
                self._changed.notify_all()
        self._selector.close()
        for each in (*(peer.socket for peer in self._peers.values()), self._bell, self._ear):
            each.close()

    def _watch(self) -> None:
        """Watch every connection for what it needs, and close those that are lost."""
        for peer in self._peers.values():
            wanted = peer.wanted()
            if wanted != peer.events:
                if not peer.events:
                    self._selector.register(peer.socket, wanted, peer)
                elif not wanted:
                    self._selector.unregister(peer.socket)
                else:
                    self._selector.modify(peer.socket, wanted, peer)
                peer.events = wanted
            if peer.lost and not peer.closed:
                peer.socket.close()
                peer.closed = True


def _received(connection: socket.socket, view: memoryview) -> int:
    count = connection.recv_into(view)
    if count == 0:
        raise ConnectionError("it has closed the connection")
    return count


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of an array as bytes.

    Raises:
        ValueError: the array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"An array of shape {array.shape} and strides {array.strides} is not contiguous")
    return array.reshape(-1).view(np.uint8).data
