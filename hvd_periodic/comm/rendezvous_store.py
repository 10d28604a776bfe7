"""The store of a rendezvous: connections to it, and its errors and torch's in words of this package."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from hvd_periodic.comm.rendezvous_settings import JOB, RANKS, SECRET, RendezvousSettings
from hvd_periodic.comm.rendezvous_state import OtherSecretError

_CONNECTING = 5.0
"""Seconds within which a rendezvous that can be reached accepts a connection."""

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

    Another kind of server, or one that is stopped, may accept it without an answer, for which torch waits forever.

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

    threading.Thread(target=connect, name="hvd_periodic.connect", daemon=True).start()
    try:
        store = found.get(timeout=max(4 * _CONNECTING, patience(settings).total_seconds()))
    except queue.Empty:
        raise dist.DistNetworkError("The server there accepts connections, but does not answer") from None
    if isinstance(store, Exception):
        raise store
    store.set_timeout(patience(settings))
    return store


@contextmanager
def explained(settings: RendezvousSettings, come: Callable[[], int]) -> Iterator[None]:
    """Raise errors of the rendezvous inside the ``with`` block in words of this package.

    Args:
        settings: the rendezvous.
        come: returns how many workers have come, as far as this one knows.
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
        reason = error.__cause__ or error
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
