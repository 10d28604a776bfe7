"""In-memory commits for elastic jobs; every surviving rank holds a copy."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.collective_tracker import forget_trackers
from hvd_periodic.elastic.backups import ShardBackup, mirrored, recovered
from hvd_periodic.elastic.shards import (
    FullCenter,
    Share,
    full_center,
    merge_group_centers,
    own_share,
    start_from_center,
)
from hvd_periodic.ranks import titled
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer

_KEPT = 2
"""Commits: a rank may be lost between those of two others, which are never further apart."""

Objects = dict[str, Any]
"""Plain objects by name."""


class Committable(ABC):
    """Something with a state, as a front end knows it."""

    @abstractmethod
    def copied(self) -> Any:
        """Return a copy of its state."""

    @abstractmethod
    def restore(self, copied: Any) -> None:
        """Set it to what :meth:`copied` returned; keeps no part of it."""

    @abstractmethod
    def begin(self, loaded: bool) -> None:
        """Let all ranks start from what the first one has: nobody has trained.

        Args:
            loaded: states of exchanges were loaded on some rank, so that exchanges find out who has what.
        """

    @abstractmethod
    def take_from(self, giver: int) -> None:
        """Let all ranks have what one of them has."""


class CommittableOptimizer(Committable):
    """Something that exchanges."""

    @property
    @abstractmethod
    def synchronizer(self) -> Any:
        """What runs the exchanges: a :class:`~hvd_periodic.sync.synchronizer.ReplicaSynchronizer`."""

    @abstractmethod
    def rejoin(self, name: str) -> None:
        """Be of the ranks that there are now, under a prefix of the names of collectives; communicates nothing."""

    def has_whole(self, copied: Any) -> bool:
        """Return whether the center is in what :meth:`copied` returned; not of a share that was loaded from a file."""
        return all(vectors.get("center") for vectors in self.exchanges_in(copied)["vectors"].values())

    def share(self) -> Share:
        """Return what this rank holds of the center, in copies that travel."""
        return own_share(self.synchronizer)

    @abstractmethod
    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the state of the exchanges in what :meth:`copied` returned."""

    @abstractmethod
    def resharded(self, saved: Any) -> Any:
        """Return the state of the center's optimizer, of any number of ranks, as those that there are now hold it."""

    @abstractmethod
    def completed(self, copied: Any, whole: FullCenter) -> Any:
        """Return what :meth:`copied` returned, which lacks the center, with it."""

    def recovered(self, communicator: Communicator, copied: Any, mirror: ShardBackup | None) -> FullCenter:
        """Return the center of what ranks have kept, with the state of its optimizer cut for those of now."""
        has_whole = copied is not None and mirror is None
        whole = full_center(self.synchronizer, self.exchanges_in(copied)) if has_whole else None
        found = recovered(communicator, self.synchronizer, mirror, whole)
        return replace(found, optimizer_state=self.resharded(found.optimizer_state))

    def own(self) -> dict[str, Any]:
        """Return what this rank has of the state of its exchanges by itself, in copies."""
        own: dict[str, Any] = (
            self.synchronizer.checkpoint.save_own() if self.has_shares else self.synchronizer.state_dict()
        )
        return own

    @property
    def divided(self) -> bool:
        """Whether the center is not on every rank, and so not what each has kept of it."""
        return not self.synchronizer.exchanger.placement.everywhere

    @property
    def has_shares(self) -> bool:
        """Whether ranks hold shares of the center now: before training begins, each has the whole, or has loaded it."""
        checkpoint = self.synchronizer.checkpoint
        loaded = checkpoint.has_loaded() and checkpoint.state is None
        return self.divided and bool(self.synchronizer.begun or loaded)

    def ready(self) -> None:
        """Be ready to train, once all ranks have what they go on from; all of them together."""


@dataclass(frozen=True)
class Commit:
    """What training can go on from.

    Attributes:
        objects: plain objects, which all ranks share.
        states: of everything else, by name.
        mirrors: of centers that are not on every rank, which their states lack.
    """

    objects: Objects
    states: dict[str, Any]
    mirrors: dict[str, ShardBackup]

    def parts(self, name: str) -> tuple[Any, ShardBackup | None]:
        """Return the state under a name, and the mirror of the center that it lacks, if it does."""
        return self.states[name], self.mirrors.get(name)


@dataclass(frozen=True)
class _CommitInfo:
    """What a rank tells the others when they come together.

    Attributes:
        generation: how often it has done so.
        numbers: of the commits that it holds.
        loaded: states of exchanges were loaded.
        prepared: of the commit that it has made together with others, and not heard that all have.
        address: what the others have to know to ask it where it is.
    """

    generation: int
    numbers: set[int]
    loaded: bool
    prepared: set[int]
    address: np.ndarray | None


class Commits:
    """Keeps numbered copies, and lets ranks that have come together go on from one of them.

    Every rank that goes on puts back its own copy of the newest commit that all of these hold. Those that have none
    have joined: one of the others gives them all that it has, and they start from the center.

    A commit of :meth:`sync` counts once a rank has heard that all have prepared theirs. One that is lost meanwhile may
    keep that from some: when they come together again, those that have heard say so, and the others, all of which have
    it prepared, go on from it as well. Where nobody has heard, all go on from what was before.

    Args:
        kept: returns what is kept now, by name, in the same order on all ranks.

    Attributes:
        held: copies of this rank, by number.
    """

    def __init__(self, kept: Callable[[], Mapping[str, Committable]]) -> None:
        self._kept = kept
        self._generation = 0
        self._prepared: dict[int, Commit] = {}
        self.held: dict[int, Commit] = {}

    def require_outside_center_block(self) -> None:
        """Raise a RuntimeError inside ``center()``, where models hold the center and not their replicas."""
        for each in self._exchanges().values():
            each.synchronizer.center_reader.require_outside_center_block("commit")

    def keep(self, objects: Objects) -> None:
        """Keep a copy of everything, beside the one before."""
        self.held[max(self.held, default=-1) + 1] = self._commit(objects)
        for old in sorted(self.held)[:-_KEPT]:
            del self.held[old]

    def reset(self, objects: Objects) -> Objects:
        """Take notice of new ranks and put back the newest copy; communicates nothing. Return its objects."""
        forget_trackers()
        self._rejoin(self._generation + 1)
        if not self.held:
            return objects
        return self._put_back(self.held[max(self.held)], {})

    def share_centers(self, communicator: Communicator) -> None:
        """Give every rank the whole of divided centers, in the newest commit that all ranks hold; all of them together.

        Horovod is about to remove some of these ranks, and says which only once they are gone.
        """
        exchanges = {name: kept for name, kept in self._exchanges().items() if kept.divided}
        if not exchanges:
            return
        common = set.intersection(*communicator.allgather_object(set(self.held), "hvd_periodic.held"))
        if not common:
            return
        commit = self.held[max(common)]
        states = dict(commit.states)
        for name, mirror in commit.mirrors.items():
            whole = exchanges[name].recovered(communicator, states[name], mirror)
            states[name] = exchanges[name].completed(states[name], whole)
        self.held[max(common)] = replace(commit, states=states, mirrors={})

    def sync(self, communicator: Communicator, objects: Objects, change: Callable[[], None]) -> Objects:
        """Let all ranks go on from the newest commit of those that have one; return the objects that all share.

        Args:
            communicator: the ranks that there are now.
            objects: of this rank.
            change: called on ranks that go on, once they have what they had: they go on from what it leaves.

        Raises:
            RuntimeError: no commit is held by all of them; on all ranks.
            ValueError: hyper-parameters that make no sense for so many ranks, or ranks that disagree; on all ranks.
        """
        told = self._met(communicator)
        self._rejoin(1 + max(each.generation for each in told))
        holders = {rank: each.numbers for rank, each in enumerate(told) if each.numbers}
        common = set.intersection(*holders.values()) if holders else {-1}
        if not common:
            raise RuntimeError(
                f"{titled(holders)} hold no commit in common: commit() was not called equally often on all "
                "ranks. Start the job anew from a checkpoint"
            )
        with nullcontext() if holders else self._loaded_still():
            if holders:
                objects = self._go_on(communicator, objects, self.held.get(max(common)), list(holders), change)
            else:
                change()
                for kept in self._kept().values():
                    kept.begin(loaded=any(each.loaded for each in told))
                objects = communicator.broadcast_object(objects, "hvd_periodic.objects", 0)
            for each in self._exchanges().values():
                each.ready()
            self._prepared = {1 + max(set.union(common, *holders.values())): self._commit(objects)}
            communicator.allgather_object(None, "hvd_periodic.prepared")  # Who returns knows that all have come.
        self.held, self._prepared = self._prepared, {}
        return objects

    def _met(self, communicator: Communicator) -> list[_CommitInfo]:
        """Return what all ranks have; and hold what this one has prepared, if another one has heard that all had."""
        loaded = any(each.synchronizer.checkpoint.has_loaded() for each in self._exchanges().values())
        address, _ = communicator.address()
        mine = _CommitInfo(self._generation, set(self.held), loaded, set(self._prepared), address)
        with communicator.tracker.at("State.sync()"):
            told: list[_CommitInfo] = communicator.allgather_object(mine, "hvd_periodic.commits")
        communicator.tracker.set_peers([each.address for each in told])
        heard = set().union(*(each.numbers for each in told))
        if heard & self._prepared.keys():
            self.held = self._prepared
        self._prepared = {}
        return [replace(each, numbers=each.prepared) if heard & each.prepared else each for each in told]

    def _go_on(
        self,
        communicator: Communicator,
        objects: Objects,
        own: Commit | None,
        holders: Sequence[int],
        change: Callable[[], None],
    ) -> Objects:
        """Go on from a commit that ranks hold, of which the first gives it to those that join; return its objects."""
        giver = min(holders)
        wholes = {
            name: kept.recovered(communicator, *(own.parts(name) if own is not None else (None, None)))
            for name, kept in self._exchanges().items()
            if kept.divided
        }
        if own is not None:
            objects = self._put_back(own, wholes)
            change()
            own = replace(own, states=self._copies())
        for kept in self._kept().values():
            kept.take_from(giver)
        objects = communicator.broadcast_object(objects, "hvd_periodic.objects", giver)
        if own is not None:
            self._put_back(own, wholes)
        for name, each in self._exchanges().items():
            steps = each.synchronizer.local_steps
            if each.synchronizer.membership.is_lockstep_group:
                merge_group_centers(each.synchronizer, holders)
            elif own is None:
                start_from_center(each.synchronizer, wholes.get(name))
                text = "Rank %d has joined at local step %d, and starts from the center"
                each.synchronizer.membership.log.warning(text, communicator.rank, steps)
            if steps == 0:  # Nobody has trained: what is loaded into models before the first step counts, as ever.
                each.synchronizer.checkpoint.forget()
        return objects

    @contextmanager
    def _loaded_still(self) -> Iterator[None]:
        """Let this rank be what it was where the block fails: what was loaded is what training begins from then."""
        states = self._copies()
        loaded = {name: each.synchronizer.checkpoint.has_loaded() for name, each in self._exchanges().items()}
        try:
            yield
        except Exception:
            for name, kept in self._kept().items():
                if not isinstance(kept, CommittableOptimizer) or kept.has_whole(states[name]):
                    kept.restore(states[name])
            for name, each in self._exchanges().items():
                if not loaded[name]:
                    each.synchronizer.checkpoint.forget()
            raise

    def _commit(self, objects: Objects) -> Commit:
        """Return a copy of everything."""
        mirrors = {
            name: mirrored(each.synchronizer, each.share())
            for name, each in self._exchanges().items()
            if each.has_shares
        }
        return Commit(copy.deepcopy(objects), self._copies(), mirrors)

    def _copies(self) -> dict[str, Any]:
        return {name: kept.copied() for name, kept in self._kept().items()}

    def _put_back(self, commit: Commit, wholes: Mapping[str, FullCenter]) -> Objects:
        """Set everything that has a state to what it was, but for centers that are missing; return the objects."""
        for name, kept in self._kept().items():
            copied = commit.states[name]
            if not (isinstance(kept, CommittableOptimizer) and kept.divided):
                kept.restore(copied)
            elif name in wholes:
                kept.restore(kept.completed(copied, wholes[name]))
        return copy.deepcopy(commit.objects)

    def _rejoin(self, generation: int) -> None:
        """Let everything that exchanges be of the ranks that there are now, under the same names on all."""
        self._generation = generation
        for number, each in enumerate(self._exchanges().values(), 1):
            each.rejoin(f"hvd_periodic.elastic.{generation}.{number}")

    def _exchanges(self) -> dict[str, CommittableOptimizer]:
        return {name: kept for name, kept in self._kept().items() if isinstance(kept, CommittableOptimizer)}


class CommittedState(ABC):
    """What the elastic states of all front ends do alike; Horovod's ``ObjectState`` is the next of their bases.

    Attributes:
        commits: what is kept.
    """

    commits: Commits
    _tracked: dict[str, Any]
    _saved_state: Objects
    _set_attrs: Callable[[], None]
    _reset_callbacks: list[Callable[[], None]]
    _due: Sequence[Callable[[], None]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_tracked", {}):
            self._tracked[name] = value
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of everything, beside the one before."""
        self.commits.require_outside_center_block()
        super().save()  # type: ignore[misc]
        self.commits.keep(self._saved_state)

    def check_host_updates(self) -> None:
        """Where hosts were added or removed, copy divided centers to every rank, and interrupt training on all ranks.

        Raises:
            HostsUpdatedInterrupt: they were; on all ranks. They always meet in :meth:`sync` then; Horovod would let
                them go on at once where hosts were only removed.
        """
        try:
            super().check_host_updates()  # type: ignore[misc]
        except RuntimeError as interrupt:
            if hasattr(interrupt, "skip_sync"):
                interrupt.skip_sync = False
                self.commits.share_centers(self._communicator())
            raise

    def on_reset(self) -> None:
        """Take notice of new ranks; reset callbacks are for :meth:`sync`, which puts back what was committed."""
        callbacks, self._reset_callbacks = self._reset_callbacks, []
        super().on_reset()  # type: ignore[misc]
        self._reset_callbacks, self._due = callbacks, callbacks

    def restore(self) -> None:
        """Do nothing yet: :meth:`sync` puts back what was committed last by all that are left."""

    def reset(self) -> None:
        """Take notice of new ranks, and put back what was committed last; communicates nothing."""
        self._saved_state = self.commits.reset(self._saved_state)
        self._set_attrs()

    def sync(self) -> None:
        """Let all ranks go on from the newest commit of those that have one; the others join them.

        Raises:
            RuntimeError: no commit is held by all of them; on all ranks.
            ValueError: hyper-parameters that make no sense for so many ranks, or ranks that disagree; on all ranks.
        """
        self._saved_state = self.commits.sync(self._communicator(), self._saved_state, self._call_back)
        self._due = ()
        self._set_attrs()

    def _call_back(self) -> None:
        for callback in self._due:
            callback()

    @abstractmethod
    def _communicator(self) -> Communicator:
        """Return the ranks that there are now."""


def refuse_fixed(name: str, synchronizer: ReplicaSynchronizer[Any], averages: bool) -> None:
    """Raise a ValueError where the ranks of an optimizer cannot change.

    Args:
        name: of the optimizer, as an argument.
        synchronizer: its exchanges.
        averages: it is around an ``hvd.DistributedOptimizer``.
    """
    communicator = synchronizer.membership.communicator.handshake_group
    within = getattr(getattr(communicator, "process_set", None), "process_set_id", type(communicator).__name__)
    refused = {
        "exchanges asynchronously, by an MPI that ends with the first rank": synchronizer.exchanger.worker is not None,
        "is around an hvd.DistributedOptimizer, whose ranks have to agree at every step": averages,
        f"exchanges within process set {within}, and where there is one, Horovod ends all with the first that is lost; "
        "process_set=hvdp.node_ranks does without": within != 0,
    }
    for why, found in refused.items():
        if found:
            raise ValueError(
                f"`{name}` {why}: under elastic Horovod, ranks exchange synchronously, all of them in one set"
            )
