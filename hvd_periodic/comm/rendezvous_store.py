"""The store of a rendezvous: connections to it, and its errors and torch's in words of this package."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.comm.own_sockets import Address, close_connections, ends, opened, plain, sockets
from hvd_periodic.comm.rendezvous_settings import JOB, RANKS, SECRET, RendezvousSettings
from hvd_periodic.comm.rendezvous_state import OtherSecretError
from hvd_periodic.logs import logger

_CONNECTING = 5.0
"""Seconds within which a rendezvous that can be reached accepts a connection."""

_ASKING = 1.0
"""Seconds between two questions whether the rendezvous still answers."""

_NO_SERVER = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable with which torch's rendezvous starts no further store on rank 0."""


class JobOverError(RuntimeError):
    """The ranks of the job have finished training."""


def patience(settings: RendezvousSettings) -> timedelta:
    """Return how long the store may take to answer, and workers of a round to tell others of themselves.

    The next round waits as long for a worker that is lost, so giving up earlier would only end rounds of workers that
    are slow.
    """
    return timedelta(seconds=max(settings.lost_seconds, _CONNECTING))


def connected(settings: RendezvousSettings) -> Any:
    """Return a connection to the store, for which torch tries twice.

    Another kind of server, or one that is stopped, may accept it without an answer, for which torch waits forever. The
    thread that waits then ends as well: if it woke up while Python ends, the process would abort.

    Raises:
        DistNetworkError: there is no store.
    """
    host, port = settings.host.strip("[]"), settings.port
    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # Not in builds without torch.distributed.
    limit = timedelta(seconds=_CONNECTING)
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            found.put(open_store(host, port, is_master=False, timeout=limit, wait_for_workers=False))
        except Exception as error:
            found.put(error)

    thread = threading.Thread(target=connect, name="hvd_periodic.connect", daemon=True)
    thread.start()
    try:
        store = found.get(timeout=max(4 * _CONNECTING, patience(settings).total_seconds()))
    except queue.Empty:
        close_connections(_addresses(settings))
        thread.join(_CONNECTING)
        raise dist.DistNetworkError("The server there accepts connections, but does not answer") from None
    if isinstance(store, Exception):
        raise store
    store.set_timeout(patience(settings))
    return store


def _addresses(settings: RendezvousSettings) -> set[Address]:
    """Return the addresses of the rendezvous."""
    with suppress(OSError):
        found = socket.getaddrinfo(settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM)
        return {plain(str(address[0]), int(address[1])) for *_, address in found}
    return set()


class RendezvousWatch:
    """Notices that the rendezvous answers no more, and ends all waits for it.

    torch waits for an answer of its store without a limit, also in code of its own, and in C++. Therefore a thread
    asks the store again and again, with a limit. If no answer comes, it closes all connections of this process to the
    address of the rendezvous, until training ends, whereupon all calls to the store fail, now and later. Linux only.

    Args:
        settings: the rendezvous.

    Attributes:
        failure: why the rendezvous counts as lost, in words; empty if its connection has ended.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self.failure = ""
        self._settings, self._limit = settings, max(settings.lost_seconds, 2 * _CONNECTING)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._others: set[Address] = set()
        self._store: Any = None

    def start(self) -> None:
        """Connect, and begin to ask.

        Raises:
            DistNetworkError: there is no store.
        """
        self.failure = ""
        self._ended.clear()
        self._others, before = _addresses(self._settings), sockets()
        self._store = connected(self._settings)
        for connection, other in self._own(before):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_value(self._limit))
            self._others.add(other)
        self._thread = threading.Thread(target=self._ask, name="hvd_periodic.rendezvous", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, when everything else that waits for the rendezvous has ended.

        If Python ended it while it waits for the store, in C++, the process would abort.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _own(self, before: dict[int, str]) -> Iterator[tuple[socket.socket, Address]]:
        """Yield the connections to the rendezvous that were not there before, and where they end.

        That may be another address than the given one, such as 0.0.0.0, or than another look at its name returns.
        """
        for number, link in sockets().items():
            if before.get(number) != link:
                with suppress(OSError), opened(number, link) as connection:
                    _, other = ends(connection)
                    if other[1] == self._settings.port:
                        yield connection, other

    def _ask(self) -> None:
        """Ask the store again and again; once it does not answer, close the connections to it, also new ones."""
        began = time.monotonic()
        try:
            while not self._ended.wait(_ASKING):
                began = time.monotonic()
                self._store.check(["hvd_periodic.answers"])
            return
        except RuntimeError:
            if time.monotonic() - began >= self._limit:
                self.failure = f"It has not answered for {self._limit:g} s"
        logger.warning(
            "The rendezvous at %s:%d is lost: training goes on, but no worker can join, and the loss of one ends the "
            "job. %s",
            *(self._settings.host, self._settings.port, self.failure or "It has closed the connection"),
        )
        close_connections(self._others)
        while not self._ended.wait(_ASKING):
            close_connections(self._others)


def _time_value(seconds: float) -> bytes:
    """Return seconds as the operating system takes them."""
    whole = int(seconds)
    return struct.pack("@ll", whole, int(1e6 * (seconds - whole)))


@contextmanager
def explained(
    settings: RendezvousSettings, come: Callable[[], int], failure: Callable[[], str] = str
) -> Iterator[None]:
    """Raise errors of the rendezvous inside the ``with`` block in words of this package.

    Args:
        settings: the rendezvous.
        come: returns how many workers have come, as far as this one knows.
        failure: returns why the rendezvous is lost; empty: the error says it.
    """
    place = f"{settings.host}:{settings.port}"
    try:
        yield
    except OtherSecretError:
        raise ValueError(
            f"Job {settings.job!r} at {place} has another secret than this worker: set the same {SECRET} for all "
            f"workers; or, for another job, another name in {JOB}"
        ) from None
    except RendezvousTimeoutError:
        raise TimeoutError(
            f"{come()} of at least {settings.minimum} workers have come to {place} in {settings.join_seconds:g} s, or "
            f"they have not exchanged since: start more, or lower the minimum, `min_ranks` of the State or {RANKS}"
        ) from None
    except (RendezvousClosedError, RendezvousGracefulExitError):
        raise JobOverError(
            f"Job {settings.job!r} at {place} is over: for another job, start the rendezvous again, or set another "
            f"name in {JOB}"
        ) from None
    except dist.DistStoreError as error:
        raise RanksLostError(f"A process was lost while all ranks met: {error}") from error
    except (RendezvousConnectionError, dist.DistError) as error:
        reason = failure() or error.__cause__ or error
        raise ConnectionError(
            f"The rendezvous at {place} cannot be reached, without which no rank can join or be lost: start it "
            f"with hvdp rendezvous --port {settings.port} on {settings.host}, before the workers. {reason}"
        ) from None


@contextmanager
def without_server() -> Iterator[None]:
    """Keep torch's rendezvous from starting a store on rank 0 inside the ``with`` block."""
    before = os.environ.get(_NO_SERVER)
    os.environ[_NO_SERVER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_SERVER]
        else:
            os.environ[_NO_SERVER] = before
