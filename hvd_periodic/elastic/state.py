"""The part of an elastic state that all front ends share, and what runs a function with it."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.elastic import ElasticJob
from hvd_periodic.elastic.commits import Commits, Committable, Objects
from hvd_periodic.schedules import Seconds
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.version import __version__

T = TypeVar("T")


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that trains in a job whose ranks change; use it as a decorator.

    The function gets the state as its first argument. It is called again after every change of the ranks, with the
    state of the newest commit, and so begins where that commit was made. The ranks are those that
    ``HVD_PERIODIC_RENDEZVOUS`` brings together, over torch.distributed; without it, those of elastic Horovod.

    With a rendezvous, the first call takes part in the job: construct the model, the optimizer and the state before it.
    When the function returns on all ranks, the job is over, and no other process can join it.

    Raises:
        TypeError: the first argument is not a ``State``.
        ValueError: the settings are invalid; or the other workers have another model, local optimizer, algorithm,
            period, option, State or version of this package, or another secret. The others go on.
        ConnectionError: the rendezvous cannot be reached.
        TimeoutError: fewer workers than the minimum have come.
        RuntimeError: the job is over.

    Example::

        @hvdp.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                ...

        train(hvdp.elastic.State(model, optimizer, commit="exchange", epoch=0))
    """

    @wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> T:
        if not isinstance(state, CommittedState):
            raise TypeError(
                "A function under hvdp.elastic.run takes an hvdp.elastic.State as its first argument. Received: "
                f"{type(state).__name__}"
            )

        def train(state: CommittedState, *args: Any, **kwargs: Any) -> T:
            with state.original_errors():
                return function(state, *args, **kwargs)

        found: T = state.job.run(train, state, *args, **kwargs)
        return found

    return wrapper


class CommittedState(ABC):
    """State of a worker in a job whose ranks change: committed objects, and the reaction to a change.

    ``hvd.elastic.run`` of elastic Horovod takes it for one of its own states, by the names of the methods.

    Args:
        tracked: what has a state of its own, by name.
        objects: plain objects, by name, which all ranks take from one.
        job: decides which processes take part.
        committed_at: when commits are made, as users say it.

    Attributes:
        commits: the commits of this rank.
        job: as given.
    """

    def __init__(self, tracked: Mapping[str, Any], objects: Objects, job: ElasticJob, committed_at: str) -> None:
        self._tracked, self._saved_state, self.job = dict(tracked), objects, job
        self._committed_at = committed_at
        self._reset_callbacks: list[Callable[[], None]] = []
        self._due: Sequence[Callable[[], None]] = ()
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self.commits = Commits(self._all_kept)
        for name, value in self._tracked.items():
            setattr(self, name, value)
        self._set_attrs()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_tracked", {}):
            self._tracked[name] = value
        super().__setattr__(name, value)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call functions after every change of the ranks, on those that remain, once the commit is restored."""
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Commit everything; then, if the ranks are about to change, interrupt training on all ranks.

        All ranks call this equally often, unless every exchange commits.
        """
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Commit everything, and keep the previous commit too."""
        self.commits.require_outside_center_block()
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}
        self.commits.keep(self._saved_state)

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Take note of hosts that were added or removed; a thread of elastic Horovod calls this."""
        self._host_messages.put((timestamp, result))

    def check_host_updates(self) -> None:
        """If the ranks are about to change, copy sharded centers to every rank and interrupt training on all ranks.

        Raises:
            HostsUpdatedInterrupt, RanksJoinInterrupt: they are, of elastic Horovod and of a rendezvous; on all ranks.
                All ranks then run :meth:`sync`.
        """
        news = []
        while not self._host_messages.empty():
            news.append(self._host_messages.get())
        interrupt = self.job.change_due(self._communicator(), news)
        if interrupt is not None:
            self.commits.share_centers(self._communicator())
            raise interrupt

    def on_reset(self) -> None:
        """Switch to the new ranks; postpone reset callbacks until :meth:`sync` has restored the commit."""
        self._host_messages = queue.Queue()
        self.reset()
        self._due = tuple(self._reset_callbacks)

    def place(self) -> tuple[int, int]:
        """Return the number of this worker among the workers of the job, from 0, and how many there are now.

        A worker is a rank; or an island, all of whose ranks have one number.

        Example::

            island, islands = state.place()
            inputs = examples[island * ranks + rank :: islands * ranks]     # of this rank of the island
        """
        communicator = self._communicator()
        return communicator.rank, communicator.size

    def restore(self) -> None:
        """Do nothing: :meth:`sync` restores the newest commit of all surviving ranks."""

    def reset(self) -> None:
        """Switch to the new ranks and restore the newest commit; communicates nothing."""
        self._saved_state = self.commits.reset(self._saved_state)
        self._set_attrs()

    def forget(self) -> None:
        """Forget all commits: the others have gone on without this process, which joins as a new one; local."""
        self.commits.forget()

    def sync(self) -> None:
        """Resume all ranks from the newest commit that all survivors hold; the other ranks join them.

        Raises:
            RuntimeError: the survivors hold no commit in common; raised on all ranks.
            ValueError: hyper-parameters make no sense for the new number of ranks, or ranks disagree; on all ranks.
        """
        self._saved_state = self.commits.sync(self._communicator(), self._saved_state, self._call_back)
        self._due = ()
        self._set_attrs()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What has to be equal in all workers of a job, in words by what it is."""
        found: dict[str, Any] = {
            "the version of hvd_periodic": __version__,
            "what the State keeps": ", ".join(sorted({*self._tracked, *self._saved_state})),
            "`commit` of the State": self._committed_at,
        }
        for name, kept in self._all_kept().items():
            found |= {f"`{name}`: {what}": value for what, value in kept.fingerprint.items()}
        return found

    def original_errors(self) -> AbstractContextManager[None]:
        """Return a block in which errors of exchanges are raised as they were, whatever a framework makes of them."""
        return nullcontext()

    def _call_back(self) -> None:
        for callback in self._due:
            callback()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    @abstractmethod
    def _all_kept(self) -> dict[str, Committable]:
        """Return the committable object of everything tracked, by name; of nested optimizers, the outermost first."""

    @abstractmethod
    def _communicator(self) -> Communicator:
        """Return the current ranks."""


def refuse_fixed(name: str, synchronizer: ReplicaSynchronizer[Any], averages: bool) -> None:
    """Raise a ValueError if the ranks of an optimizer, the argument ``name``, cannot change."""
    communicator = synchronizer.membership.communicator.handshake_group
    within = getattr(getattr(communicator, "process_set", None), "process_set_id", None)
    fixed = within is None and not communicator.elastic
    refused = {
        "exchanges asynchronously, among ranks that cannot change": synchronizer.exchanger.worker is not None,
        "wraps an hvd.DistributedOptimizer, whose ranks have to agree at every step": averages,
        f"exchanges within process set {within}, with which Horovod ends all ranks when one is lost; use "
        "process_set=hvdp.node_ranks instead": within not in (0, None),
        f"exchanges over {communicator.description}, whose ranks cannot change: restart all of them, and resume from a "
        "checkpoint": fixed,
    }
    for why, found in refused.items():
        if found:
            raise ValueError(f"`{name}` {why}: in elastic jobs, ranks exchange synchronously, all of them in one set")


def refuse_between_islands(name: str, synchronizer: ReplicaSynchronizer[Any], levels: int) -> None:
    """Raise a ValueError if these are the ranks of an island of an elastic job, and an optimizer cannot serve them.

    Args:
        name: of the argument that is the optimizer.
        synchronizer: its synchronizer.
        levels: number of optimizers that wrap each other.
    """
    if not synchronizer.membership.communicator.between_islands:
        return
    schedule = synchronizer.planner.schedule  # Of fragments, it has the user's.
    refused = {
        "a period in Seconds": isinstance(getattr(schedule, "whole", schedule), Seconds),
        "several levels of optimizers": levels > 1,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(
                f"`{name}` has {what}, which islands of an elastic job do not support: leave it out, or train without "
                "islands, in which case torch.distributed must not be initialized before the State is made"
            )
