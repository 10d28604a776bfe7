"""Ranks as threads of one process, for tests and simulation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.transports import SHORT, Arrival, LocalMemory, Messages, Request, SharedMemory
from hvd_periodic.vectors.layout import chunk

T = TypeVar("T")

_OPS = {"sum": np.add, "max": np.maximum}


class ThreadCommunicator(Communicator):
    """One rank of a group made by :func:`run`; buffers are numpy arrays, or anything that numpy views without a copy.

    Sums run in rank order, so that results are bitwise reproducible.
    """

    description = "threads of one process"
    processes = False

    def __init__(self, rank: int, group: _Group) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Reduce in rank order, at once."""
        np.asarray(buffer)[...] = self._reduced(buffer, name, op)
        return lambda: buffer

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Copy the root's values into ``buffer``."""
        values = self._group.exchange(self.rank, (name, root), np.asarray(buffer).copy())
        np.asarray(buffer)[...] = values[root]
        return buffer

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Reduce in rank order, at once; the result is a part of ``buffer``."""
        start, stop = chunk(len(buffer), self.rank, self.size)
        np.asarray(buffer)[start:stop] = self._reduced(buffer, name, "sum")[start:stop]
        return lambda: buffer[start:stop]

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into ``out``, or into a new array."""
        gathered = np.concatenate(self._group.exchange(self.rank, (name,), np.asarray(buffer).copy()))
        if out is None:
            return gathered
        np.asarray(out)[...] = gathered
        return out

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Exchange parts at once, in place."""
        everything = self._group.exchange(self.rank, (name,), np.asarray(buffer).copy())
        np.asarray(buffer)[...] = np.concatenate([np.split(one, self.size)[self.rank] for one in everything])
        return lambda: buffer

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the values of all threads."""
        return self._group.exchange(self.rank, (name,), value)

    def shares_memory(self) -> bool:
        """Return True: the ranks are threads, which share all memory."""
        return True

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return memory of this process."""
        made = _ThreadMemory(nbytes + later) if self.rank == 0 else None
        memory: SharedMemory = self._group.exchange(self.rank, ("memory",), made)[0]
        return memory

    def messages(self) -> Messages:
        """Return messages through memory of this process."""
        own = _Mailbox()
        return _ThreadMessages(self.rank, self._group.exchange(self.rank, ("messages",), own), self._group)

    def _reduced(self, buffer: Any, name: str, op: str) -> Any:
        values = self._group.exchange(self.rank, (name, op), np.asarray(buffer).copy())
        total = values[0].copy()
        for value in values[1:]:
            _OPS[op](total, value, out=total)
        return total


class _ThreadMemory(LocalMemory):
    """Memory of one process, and locks of threads."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._locks: dict[int, threading.Lock] = {}

    def try_lock(self, number: int) -> bool:
        """Hold a lock if it is free."""
        return self._lock(number).acquire(blocking=False)

    def unlock(self, number: int) -> None:
        """Release a lock."""
        self._lock(number).release()

    def _lock(self, number: int) -> threading.Lock:
        return self._locks.setdefault(number, threading.Lock())


class _ThreadRequest:
    """A message between two threads.

    Attributes:
        source: the rank that sends it.
        tag: its tag.
        out: memory for it.
        complete: it has been sent or received.
    """

    def __init__(self, group: _Group, source: int, tag: int, out: np.ndarray) -> None:
        self._group, self.source, self.tag, self.out, self.complete = group, source, tag, out, False

    def fill(self, data: np.ndarray) -> None:
        """Receive the message."""
        _bytes_of(self.out)[:] = data
        self.complete = True

    def done(self) -> bool:
        """Return whether it has been sent or received."""
        return self.complete

    def wait(self) -> None:
        """Wait for the message.

        Raises:
            BrokenBarrierError: a thread has failed.
        """
        while not self.complete:
            if not self._group.alive:
                raise threading.BrokenBarrierError
            time.sleep(SHORT)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class _Mailbox:
    """The messages to one rank: those that it has asked for, and those that have arrived before that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.expected: list[_ThreadRequest] = []
        self.arrived: list[tuple[int, int, np.ndarray]] = []


class _ThreadMessages(Messages):
    """Messages between threads, in memory: whatever is sent has arrived.

    Args:
        rank: this rank.
        mailboxes: those of all ranks.
        group: the threads.
    """

    def __init__(self, rank: int, mailboxes: Sequence[_Mailbox], group: _Group) -> None:
        self.rank, self._mailboxes, self._group = rank, mailboxes, group

    def send(self, data: np.ndarray, rank: int, tag: int) -> Request:
        """Copy the data to a rank; the request is complete at once."""
        copied, box = _bytes_of(np.ascontiguousarray(data)).copy(), self._mailboxes[rank]
        with box.lock:
            asked = next((each for each in box.expected if (each.source, each.tag) == (self.rank, tag)), None)
            if asked is None:
                box.arrived.append((self.rank, tag, copied))
            else:
                box.expected.remove(asked)
                asked.fill(copied)
        request = _ThreadRequest(self._group, self.rank, tag, data)
        request.complete = True
        return request

    def receive(self, out: np.ndarray, rank: int, tag: int) -> Request:
        """Take a message that has arrived, or ask for it."""
        request, box = _ThreadRequest(self._group, rank, tag, out), self._mailboxes[self.rank]
        with box.lock:
            found = next((each for each in box.arrived if each[:2] == (rank, tag)), None)
            if found is None:
                box.expected.append(request)
            else:
                box.arrived = [each for each in box.arrived if each is not found]
                request.fill(found[2])
        return request

    def next(self, allocate: Callable[[int], np.ndarray]) -> Arrival | None:
        """Return the next message that nobody has asked for, or None."""
        box = self._mailboxes[self.rank]
        with box.lock:
            if not box.arrived:
                return None
            source, tag, data = box.arrived.pop(0)
        out = allocate(tag)
        _bytes_of(out)[:] = data
        return Arrival(source, tag, out)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def alive(self) -> bool:
        """Return whether all threads run."""
        return self._group.alive

    def abort(self) -> None:
        """End the collectives of all threads with an error."""
        self._group.abort()

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference."""


class _Group:
    """A place where ``size`` threads meet to exchange values; the last to arrive wakes the others.

    This takes a half to a quarter of the time of two passes of a ``threading.Barrier``, whose threads also wait for
    each other to leave.

    Attributes:
        over: all threads have ended.
        broken: a thread has failed, or has waited too long: nobody meets any more.
        at_end: functions that release what the threads have opened, called once all have ended.
    """

    over = False
    broken = False

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size = size
        self.at_end: list[Callable[[], object]] = []
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._meeting: dict[int, tuple[tuple[object, ...], Any]] = {}
        self._waiting: list[threading.Lock] = []

    @property
    def alive(self) -> bool:
        """Whether all threads run, and none has failed."""
        return not (self.over or self.broken)

    def exchange(self, rank: int, call: tuple[object, ...], value: Any) -> list[Any]:
        """Return the values that all ranks passed to the same call.

        Raises:
            BrokenBarrierError: another rank has failed, or ranks have waited longer than ``timeout_seconds``.
            RuntimeError: ranks met in different calls.
        """
        woken = threading.Lock()
        woken.acquire()
        with self._lock:
            if self.broken:
                raise threading.BrokenBarrierError
            meeting = self._meeting
            meeting[rank] = call, value
            self._waiting.append(woken)
            if len(meeting) == self.size:
                for each in self._waiting:
                    each.release()
                self._meeting, self._waiting = {}, []
        if not woken.acquire(timeout=self._timeout_seconds) and len(meeting) < self.size:
            self.abort()
        if len(meeting) < self.size:
            raise threading.BrokenBarrierError
        met = [meeting[each] for each in range(self.size)]
        if any(other != call for other, _ in met):
            raise RuntimeError(f"Ranks met in different collectives, by rank: {[other for other, _ in met]}")
        return [each for _, each in met]

    def abort(self) -> None:
        """End this meeting and all later ones with an error on every rank."""
        with self._lock:
            self.broken = True
            for each in self._waiting:
                each.release()
            self._waiting = []


def run(size: int, function: Callable[[ThreadCommunicator], T], timeout_seconds: float = 60.0) -> list[T]:
    """Run ``function(communicator)`` on ``size`` ranks, one thread each, and return their results in rank order.

    A rank that raises breaks the collectives of the others; the first error is raised here.

    Args:
        size: number of ranks.
        function: the work of each rank.
        timeout_seconds: how long a rank waits in one collective before all fail.

    Raises:
        BrokenBarrierError: ranks waited for each other longer than ``timeout_seconds``.

    Example:
        >>> run(3, lambda comm: int(comm.allreduce(np.array([comm.rank]), "ranks")()[0]))
        [3, 3, 3]
    """
    group = _Group(size, timeout_seconds)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    broken: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(rank, group))
        except threading.BrokenBarrierError as error:
            broken.append(error)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.over = True
    for release in group.at_end:
        release()
    if errors or broken:
        raise (errors + broken)[0]
    return results
