"""Elastic jobs over torch.distributed, whose members the rendezvous of torch's own elastic launcher decides on.

The rendezvous is used in the processes that train, without its launcher, which would start processes again. It decides
by compare-and-set on one value in a store, so that there is no protocol here. The other choice, torchft's lighthouse,
needs a package of its own with a server, and decides before every step; here, ranks rarely change.

A round of the rendezvous has ranks, a process group, and keys in the store of its own. What a process sends in a round
reaches only processes in the same round.

If a worker is an island, its first rank takes part in the rendezvous, and tells the other ranks of each round. These
give signs of life to it, and look in the store for what it cannot tell them while they wait for other islands. All
ranks look there for errors of the others.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.collective_tracker import CollectiveTracker, trackers
from hvd_periodic.comm.elastic import ElasticJob, Function, RanksJoinInterrupt, RanksLostError, State
from hvd_periodic.comm.island_failures import IslandFailures, IslandRankError
from hvd_periodic.comm.nccl_groups import BACKENDS, require_nccl
from hvd_periodic.comm.rendezvous_settings import JOB, NCCL, RendezvousSettings
from hvd_periodic.comm.rendezvous_state import RendezvousState, View, require_same_terms
from hvd_periodic.comm.rendezvous_store import (
    JobOverError,
    RendezvousWatch,
    connected,
    explained,
    patience,
    without_server,
)
from hvd_periodic.comm.torch_distributed import (
    TorchDistributedCommunicator,
    close_world,
    elastic_group,
    island_here,
    open_between,
    open_world,
    take_part_as,
)
from hvd_periodic.logs import logger, set_up

_POLL = 0.05
"""Seconds, at most, between two looks whether all workers of a round have come."""

_LAST_CALL = 2.0
"""Seconds that a round stays open once the minimum of workers is there, and nobody else is expected."""

_BEATS = 10
"""Signs of life, at least, within the seconds after which a worker counts as lost."""

_LOOKS = 1.0
"""Seconds, at most, between two signs of life: with each, a worker learns who is lost and who waits."""

_IN_VAIN = 3
"""Rounds of the same workers that fail alike, without a commit in between: it is an error of the program."""

_UNCONNECTED = 10
"""Rounds of the same workers in which they do not connect, without a commit in between: they cannot."""


@dataclass(frozen=True)
class _Round:
    """A round of the rendezvous.

    Attributes:
        number: which.
        rank: this worker among those of the round.
        size: their number.
        missed: whether there were others without this worker.
    """

    number: int
    rank: int
    size: int
    missed: bool


class TorchRendezvous(ElasticJob):
    """A job whose workers meet at a rendezvous.

    Args:
        settings: the rendezvous, and the terms on which this worker takes part.

    Attributes:
        island: the ranks that take part as one worker; None: this process alone.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self.island = island_here()
        self._settings = settings
        self._state: RendezvousState | None = None
        self._handler: Any = None
        self._store: Any = None
        self._signs: Any = None
        self._answers = RendezvousWatch(settings)
        self._watch: threading.Thread | None = None
        self._failures_within: IslandFailures | None = None
        self._ended = threading.Event()
        self._arrivals = CollectiveTracker("", 0, [0])
        self._heard: IslandRankError | None = None
        self._meets = False
        self._rounds, self._round, self._missed = 0, -1, False
        self._failures: list[tuple[Any, str]] = []
        self._began = self._over = self._met = False

    def change_due(self, communicator: Communicator, news: Sequence[tuple[float, int]]) -> Exception | None:
        """Return an interrupt if a worker waits for the next round."""
        waiting = self._state is not None and self._state.view.waiting
        due = any(communicator.allgather_object(waiting, "hvd_periodic.waiting"))
        if self.island is not None:
            due = self.island.settle(asks=due)
        self._failures = []
        return RanksJoinInterrupt() if due else None

    def run(self, function: Function, state: State, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``function(state, ...)``, called again in every round; leave the job if it fails.

        Raises:
            RuntimeError: the job is over; it fails in the same way again and again; another rank of this island has
                raised an error; or NCCL is asked for, and there is none.
            ValueError, ConnectionError, TimeoutError: as :func:`hvd_periodic.elastic.state.run`.
        """
        set_up()
        if self._began:
            raise JobOverError(
                "A function under hvdp.elastic.run has ended in this process before, which takes part once: train in "
                f"one function, or start the process again, if the job is over with another name in {JOB}"
            )
        take_part_as(self.island)
        if self._settings.nccl:
            if self.island is not None:
                raise RuntimeError(f"{NCCL} is set, and islands exchange over Gloo: unset it")
            require_nccl()
        try:
            self._arrive(state)
            self._began = True
            return self._in_rounds_or_leave(function, state, args, kwargs)
        finally:
            self._answers.stop()

    def _arrive(self, state: State) -> None:
        """Connect to the rendezvous, together with the other ranks of an island."""
        if self.island is None:
            self._connect(state)
            return
        ranks = self.island.ranks
        build_on_all(ranks, "hvd_periodic.rendezvous", lambda: self._connect(state))
        own = self.island.of_first(lambda: self._view.own)
        key = f"hvd_periodic.{self._settings.job}.failed.{own}"
        self._failures_within = IslandFailures(self._signs, key, ranks.rank, ranks.size)
        self._watch = threading.Thread(target=self._look, args=[own], name="hvd_periodic.island", daemon=True)
        self._watch.start()

    def _in_rounds_or_leave(self, function: Function, state: State, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of the function; leave the job if it fails."""
        try:
            return self._in_rounds(function, state, args, kwargs)
        except BaseException as error:
            cause = self._leave(error)
            if cause is not None:
                raise cause from error
            raise

    def _in_rounds(self, function: Function, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function, called again in every round."""
        self._failures = []
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
                everyone = TorchDistributedCommunicator(elastic_group())
                everyone.allgather_object(None, "hvd_periodic.over")
                everyone.settle()
                self._close()
                return result
            except RanksJoinInterrupt:
                logger.warning("Workers wait to take part: all ranks meet them now")
            except JobOverError:
                if returned:  # Others have heard that all ranks had returned.
                    self._stop_looking()
                    return result
                raise
            except (RanksLostError, TimeoutError) as error:
                if isinstance(error, TimeoutError) and "timeout_seconds=" not in str(error):
                    raise
                if self.island is not None:
                    close_world()  # Others with this position wait for this rank.
                    self.island.give_up(error)
                if self._in_vain(error):
                    raise
                logger.warning("A rank was lost, the others go on: %s", error)

    def _in_vain(self, error: Exception) -> bool:
        """Return whether rounds of the same workers fail in the same way; the first rank of an island says so.

        If they have not connected, which may be due to a busy machine, it takes more of them.
        """
        limit = _IN_VAIN if self._met else _UNCONNECTED
        failure = (self._view.members, str(error) if self._met else "")
        self._failures = [*self._failures, failure][-_UNCONNECTED:]
        last = self._failures[-limit:]
        found = len(last) == limit and len(set(last)) == 1
        return found if self.island is None else self.island.of_first(lambda: found)

    @property
    def _view(self) -> View:
        return View() if self._state is None else self._state.view

    def _explained(self) -> AbstractContextManager[None]:
        """Return a ``with`` block that raises errors of the rendezvous in words of this package."""
        return explained(self._settings, lambda: self._view.taking_part, lambda: self._answers.failure)

    def _connect(self, state: State) -> None:
        """Connect to the rendezvous; for the worker, check that it belongs to the job."""
        settings = self._settings
        with self._explained():
            self._answers.start()
            self._store, self._signs = connected(settings), connected(settings)
            if self.island is not None and not self.island.is_first:
                return
            mine = self._signs
            ticket = mine.add(f"hvd_periodic.{settings.job}.workers", 1)
            own = f"{ticket:09d}.{socket.gethostname()}"
            secret = settings.secret.encode()
            terms = settings.terms | {"the number of ranks of a worker": self._ranks} | state.fingerprint
            require_same_terms(mine, settings.job, secret, terms)
            self._state = RendezvousState(
                mine,
                settings.job,
                secret,
                own,
                _LAST_CALL,
                settings.lost_seconds,
                settings.maximum,
                self._end_waits,
                self._ranks,
            )
            seconds = timedelta(seconds=settings.join_seconds)
            self._handler = DynamicRendezvousHandler.from_backend(
                settings.job,
                self._store,
                self._state,
                settings.minimum,
                settings.maximum,
                own,
                RendezvousTimeout(seconds, timedelta(seconds=_LAST_CALL), patience(settings), patience(settings)),
                self._interval,  # type: ignore[arg-type]  # Seconds, of which it makes a timedelta.
                round(settings.lost_seconds / self._interval),
            )
        logger.warning(
            "Worker %d of job %r waits at %s:%d for at least %d",
            *(ticket, settings.job, settings.host, settings.port, settings.minimum),
        )

    @property
    def _interval(self) -> float:
        """Seconds between two signs of life."""
        return min(self._settings.lost_seconds / _BEATS, _LOOKS)

    @property
    def _ranks(self) -> int:
        """Number of ranks that take part as this worker."""
        return 1 if self.island is None else self.island.ranks.size

    def _next_round(self) -> None:
        """Leave the round, and take part in the next; note whether there were others without this worker."""
        self._met = False
        close_world()
        settings, island = self._settings, self.island
        found, store = self._meet() if island is None else island.of_first(self._meet_for_all)
        self._missed |= found.missed
        self._round = found.number
        self._await_all(found)
        if island is None:
            backends = BACKENDS if settings.nccl else "gloo"
            open_world(store, found.rank, found.size, settings.one_host, backends)
        else:
            name = f"hvd_periodic.{settings.job}.islands.{found.number}"
            with_prefix: Any = dist.PrefixStore  # type: ignore[attr-defined]  # As TCPStore.
            store = with_prefix(f"{name}.{island.ranks.rank}", self._store)
            open_between(store, name, found.rank, found.size, settings.one_host)
        self._rounds += 1
        self._met = True

    def _meet_for_all(self) -> tuple[_Round, None]:
        """Take part in the next round for this island."""
        return self._meet()[0], None

    def _meet(self) -> tuple[_Round, Any]:
        """Take part in the next round of the rendezvous; return it, with its store."""
        with self._explained(), without_server():
            before = self._view.round
            self._meets = True
            try:
                found = self._handler.next_rendezvous()
            finally:
                self._meets = False
            view = self._view
            missed = before >= 0 and view.round != before + 1
            ranks = sorted(view.members)  # torch leaves out those that have died since the round was complete.
            return _Round(view.round, ranks.index(view.own), len(ranks), missed), found.store

    def _await_all(self, found: _Round) -> None:
        """Wait until all that this process connects to in a round are about to connect, however slow they are.

        Connecting cannot be interrupted, and times out after 30 s, which a busy host may miss.

        Raises:
            RanksLostError: one of them is lost.
        """
        position = 0 if self.island is None else self.island.ranks.rank
        key = f"hvd_periodic.{self._settings.job}.here.{found.number}.{position}"
        with self._explained():
            self._store.add(key, 1)
            self._arrivals.wait_for(0, lambda: self._store.add(key, 0) >= found.size, _POLL)

    def _end_waits(self, view: View) -> None:
        """End the waits of this worker if nobody can exchange in its round any more.

        Raises:
            IslandRankError: another rank of this island has raised an error while this one waits for the next round.
        """
        if self._meets and self._heard is not None:
            raise self._heard
        if not view.lost or self._over:
            return
        if self.island is not None:  # Ranks of the island may wait in that round after this one has left it.
            with suppress(RuntimeError):  # The store is down.
                self._signs.set(self._lost(view.round), b"lost")
        self._end_exchanges()

    def _look(self, own: str) -> None:
        """Hear of errors in this island; give its first rank signs of life, and hear from it of rounds; in a thread."""
        beats = f"hvd_periodic.{self._settings.job}.beats.{own}.{self.island.ranks.rank}"  # type: ignore[union-attr]
        while not self._ended.wait(self._interval / 2):
            number = self._round
            with suppress(RuntimeError, OSError):  # The store is down, or no descriptor is free.
                self._look_within()
                if self._state is not None:
                    continue
                self._signs.add(beats, 1)
                if self._signs.check([self._lost(number)]) and number == self._round:
                    self._end_exchanges()

    def _look_within(self) -> None:
        """End all waits of this rank if another one of its island has raised an error; the first rank then leaves."""
        heard = None if self._failures_within is None else self._failures_within.heard()
        if heard is None:
            return
        self._heard = heard
        if self._state is not None:
            with suppress(RendezvousConnectionError):
                self._state.leave()
        self._end_exchanges(heard)
        _end_wait(self.island.ranks.tracker, heard)  # type: ignore[union-attr]

    def _end_exchanges(self, error: Exception | None = None) -> None:
        """End the waits of this process for ranks that it exchanges with."""
        lost = RanksLostError("A worker gives no sign of life, or has left the others after a loss")
        for tracker in [self._arrivals, *(tracker for tracker in trackers() if tracker.elastic)]:
            _end_wait(tracker, error or lost)

    def _lost(self, number: int) -> str:
        """Return the key that says that nobody can exchange in a round any more."""
        return f"hvd_periodic.{self._settings.job}.lost.{number}"

    def _leave(self, error: BaseException) -> IslandRankError | None:
        """Leave the job because of an error, and tell the others at once, since the process may live on; local.

        Returns:
            The error of another rank of the island that has caused this one; None if there is none.
        """
        self._over = True
        self._stop_looking()
        cause = None
        if self._failures_within is not None:
            with suppress(Exception):  # The store is down, or the error has no text. The program's own error counts.
                self._failures_within.tell(error)
                cause = self._failures_within.cause(error)
        if self._handler is not None:
            self._handler._stop_heartbeats()
        if self._state is not None:
            with suppress(RendezvousConnectionError):
                self._state.leave()
        close_world()
        return cause

    def _close(self) -> None:
        """Mark the job as over: nobody can join it any more. End the thread that gives signs of life.

        If Python ended it while it waits for the store, in C++, the process would abort.
        """
        self._over = True
        self._stop_looking()
        if self._handler is not None:
            with suppress(RendezvousConnectionError):
                self._handler.shutdown()

    def _stop_looking(self) -> None:
        """End the thread of a rank of an island."""
        self._ended.set()
        if self._watch is not None:
            self._watch.join()


def _end_wait(tracker: CollectiveTracker, error: Exception) -> None:
    """End the wait of this process among some ranks, if it waits and can be interrupted."""
    wait = tracker.wait
    if wait is not None and wait.raises and wait.error is None:
        wait.error = error
