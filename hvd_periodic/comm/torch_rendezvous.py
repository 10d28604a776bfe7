"""Elastic jobs over torch.distributed, whose members the rendezvous of torch's own elastic launcher decides on.

The rendezvous is used in the processes that train, without its launcher, which would start processes again. It decides
by compare-and-set on one value in a store, so that there is no protocol here. The other choice, torchft's lighthouse,
needs a package of its own with a server, and decides before every step; here, ranks rarely change.

A round of the rendezvous has ranks, a process group, and keys in the store of its own. What a process sends in a round
reaches only processes in the same round.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Iterator, Sequence
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
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.collective_tracker import trackers
from hvd_periodic.comm.elastic import ElasticJob, Function, RanksJoinInterrupt, RanksLostError, State
from hvd_periodic.comm.rendezvous_settings import JOB, RANKS, SECRET, RendezvousSettings
from hvd_periodic.comm.rendezvous_state import OtherSecretError, RendezvousState, View
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator, close_world, open_world
from hvd_periodic.logs import logger, set_up

_CONNECTING = timedelta(seconds=5)
"""Within which a store answers."""

_LAST_CALL = 2.0
"""Seconds that a round stays open once the minimum of workers is there, and nobody else is expected."""

_BEATS = 10
"""Signs of life, at least, within the seconds after which a worker counts as lost."""

_LOOKS = 1.0
"""Seconds, at most, between two signs of life: with each, a worker learns who is lost and who waits."""

_IN_VAIN = 3
"""Rounds of the same workers that fail at the same place, after which it is an error of the program."""

_NO_SERVER = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable with which torch's rendezvous starts no further store on rank 0."""


class TorchRendezvous(ElasticJob):
    """A job whose workers meet at a rendezvous.

    Args:
        settings: the rendezvous, and the terms on which this worker takes part.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._state: RendezvousState | None = None
        self._handler: Any = None
        self._rounds, self._missed = 0, False
        self._over = False

    def change_due(self, communicator: Communicator, news: Sequence[tuple[float, int]]) -> Exception | None:
        """Return an interrupt if a worker waits for the next round."""
        waiting = self._state is not None and self._state.view.waiting
        if any(communicator.allgather_object(waiting, "hvd_periodic.waiting")):
            return RanksJoinInterrupt()
        return None

    def run(self, function: Function, state: State, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``function(state, ...)``, called again in every round; leave the job if it fails.

        Raises:
            RuntimeError: the job is over; or it fails in the same way again and again.
            ValueError, ConnectionError, TimeoutError: as :func:`hvd_periodic.elastic.state.run`.
        """
        set_up()
        self._connect(state)
        try:
            return self._in_rounds(function, state, args, kwargs)
        except BaseException:
            self._leave()
            raise

    def _in_rounds(self, function: Function, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function, called again in every round."""
        failures: list[tuple[Any, str]] = []
        returned = False
        while True:
            try:
                self._next_round()
                if self._missed:
                    logger.warning("The other ranks have gone on without this process, which joins as a new one")
                    state.forget()
                if self._rounds > 1:
                    state.on_reset()
                self._missed = False
                state.sync()
                returned = False
                result = function(state, *args, **kwargs)
                returned = True
                TorchDistributedCommunicator().allgather_object(None, "hvd_periodic.over")
                self._close()
                return result
            except RanksJoinInterrupt:
                logger.warning("Workers wait to take part: all ranks meet them now")
            except JobOverError:
                if returned:  # Others have heard that all ranks had returned.
                    return result
                raise
            except (RanksLostError, TimeoutError) as error:
                if isinstance(error, TimeoutError) and "timeout_seconds=" not in str(error):
                    raise
                failures = [*failures, (self._view.members, str(error))][-_IN_VAIN:]
                if len(failures) == _IN_VAIN and len(set(failures)) == 1:
                    raise
                logger.warning("A rank was lost, the others go on: %s", error)

    @property
    def _view(self) -> View:
        return View() if self._state is None else self._state.view

    def _connect(self, state: State) -> None:
        """Connect to the rendezvous, and check that this worker belongs to the job."""
        if self._handler is not None:
            raise JobOverError(
                "A function under hvdp.elastic.run has ended in this process before, which takes part once: train in "
                f"one function, or start the process again, if the job is over with another name in {JOB}"
            )
        settings = self._settings
        with self._explained():
            mine, groups = self._store(), self._store()
            ticket = mine.add(f"hvd_periodic.{settings.job}.workers", 1)
            own = f"{ticket:09d}.{socket.gethostname()}"
            secret = settings.secret.encode()
            self._check_fingerprint(mine, state, secret)
            self._state = RendezvousState(
                mine, settings.job, secret, own, _LAST_CALL, settings.lost_seconds, settings.maximum, self._end_waits
            )
            seconds = timedelta(seconds=settings.join_seconds)
            interval = min(settings.lost_seconds / _BEATS, _LOOKS)
            self._handler = DynamicRendezvousHandler.from_backend(
                settings.job,
                groups,
                self._state,
                settings.minimum,
                settings.maximum,
                own,
                RendezvousTimeout(seconds, timedelta(seconds=_LAST_CALL), _CONNECTING, _CONNECTING),
                interval,  # type: ignore[arg-type]  # Seconds, of which it makes a timedelta.
                round(settings.lost_seconds / interval),
            )
        logger.warning(
            "Worker %d of job %r waits at %s:%d for at least %d",
            *(ticket, settings.job, settings.host, settings.port, settings.minimum),
        )

    def _store(self) -> Any:
        """Return a connection to the store."""
        settings = self._settings
        host = settings.host.strip("[]")
        connect: Any = dist.TCPStore  # type: ignore[attr-defined]  # Not in builds without torch.distributed.
        return connect(host, settings.port, is_master=False, timeout=_CONNECTING, wait_for_workers=False)

    def _check_fingerprint(self, store: Any, state: State, secret: bytes) -> None:
        """Raise a ValueError if the first worker of the job has another model, algorithm, version or secret."""
        mine = {what: str(value) for what, value in (self._settings.terms | state.fingerprint).items()}
        text = json.dumps(mine, sort_keys=True)
        signed = json.dumps([text, hmac.digest(secret, text.encode(), "sha256").hex()])
        found = store.compare_set(f"hvd_periodic.{self._settings.job}.fingerprint", "", signed).decode()
        if found == signed:
            return
        theirs, signature = json.loads(found)
        if not hmac.compare_digest(signature, hmac.digest(secret, theirs.encode(), "sha256").hex()):
            raise OtherSecretError
        theirs = json.loads(theirs)
        different = sorted(what for what in mine.keys() | theirs if mine.get(what) != theirs.get(what))
        described = "; ".join(f"{what}: {mine.get(what)} here, {theirs.get(what)} there" for what in different)
        raise ValueError(
            f"Job {self._settings.job!r} at this rendezvous trains something else: {described}. Train the same in all "
            f"workers; or name this job in {JOB}"
        )

    def _next_round(self) -> None:
        """Leave the round, and take part in the next; note whether there were others without this process."""
        close_world()
        with self._explained(), _without_server():
            before = self._view.round
            found = self._handler.next_rendezvous()
            self._missed |= before >= 0 and self._view.round != before + 1
            ranks = sorted(self._view.members)  # torch leaves out those that have died since the round was complete.
            open_world(found.store, ranks.index(self._view.own), len(ranks), self._settings.one_host)
        self._rounds += 1

    def _end_waits(self, view: View) -> None:
        """End the waits of this process if nobody can exchange in its round any more."""
        if not view.lost or self._over or not dist.is_initialized():
            return
        for tracker in trackers():
            wait = tracker.wait
            if wait is not None and wait.raises and wait.error is None:
                wait.error = RanksLostError("A worker gives no sign of life, or has left the others after a loss")

    def _leave(self) -> None:
        """Tell the others at once that this process takes part no longer, which may live on; local."""
        self._over = True
        self._handler._stop_heartbeats()
        if self._state is not None:
            with suppress(RendezvousConnectionError):
                self._state.leave()
        close_world()

    def _close(self) -> None:
        """Mark the job as over: nobody can join it any more. End the thread that gives signs of life.

        If Python ended it while it waits for the store, in C++, the process would abort.
        """
        self._over = True
        with suppress(RendezvousConnectionError):
            self._handler.shutdown()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of the rendezvous in words of this package."""
        settings = self._settings
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
                f"{self._view.taking_part} of at least {settings.minimum} workers have come to {place} in "
                f"{settings.join_seconds:g} s, or they have not exchanged since: start more, or lower "
                f"the minimum, `min_ranks` of the State or {RANKS}"
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


class JobOverError(RuntimeError):
    """The ranks of the job have finished training."""


@contextmanager
def _without_server() -> Iterator[None]:
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
