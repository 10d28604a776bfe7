"""In-memory commits for elastic jobs; every surviving rank holds a copy."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.collective_tracker import forget_trackers
from hvd_periodic.elastic.backups import ShardBackup, back_up, restore_center
from hvd_periodic.elastic.shards import (
    FullCenter,
    Share,
    full_center,
    merge_group_centers,
    own_share,
    start_from_center,
)
from hvd_periodic.ranks import titled
from hvd_periodic.sync.exchanger import settings_of

_KEPT = 2
"""Number of commits to keep: when a rank is lost, the newest commits of two survivors differ by at most one."""

Objects = dict[str, Any]
"""Plain objects by name."""


class Committable(ABC):
    """An object whose state can be committed, as a front end provides it."""

    @abstractmethod
    def copied(self) -> Any:
        """Return a copy of the state."""

    def gather(self) -> None:
        """Learn what a copy has to hold of the other ranks; collective, before every commit."""

    @abstractmethod
    def restore(self, copied: Any) -> None:
        """Restore a state that :meth:`copied` returned; keep no reference to it."""

    @abstractmethod
    def begin(self, loaded: bool) -> None:
        """Start all ranks from the first rank's state, before any training.

        Args:
            loaded: whether a state of exchanges was loaded on some rank, so that exchanges compare what ranks loaded.
        """

    @abstractmethod
    def broadcast_from(self, source: int) -> None:
        """Broadcast the state of the rank ``source`` to all ranks."""

    def renew(self) -> None:
        """Forget what training has added to this rank alone, as in a new process; local."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What has to be equal on all ranks, by what it is."""
        return {}


class CommittableOptimizer(Committable):
    """A committable object that exchanges."""

    @property
    @abstractmethod
    def synchronizer(self) -> Any:
        """The :class:`~hvd_periodic.sync.synchronizer.ReplicaSynchronizer` that runs the exchanges."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Settings of exchanges and of the local optimizer, a digest of tensors, names of ``"local"`` parameters."""
        synchronizer = self.synchronizer
        specs = [spec for group in synchronizer.tensor_groups for spec in group.values.layout.specs]
        facts = dict(synchronizer.replica.facts())
        words = {name: facts.pop(name) for name in ("optimizer", "bucket_bytes", "center_device") if name in facts}
        tensors = [*((spec.name, tuple(spec.shape)) for spec in specs), *facts.items()]
        return {
            **settings_of(synchronizer.exchanger, synchronizer.policy),
            **words,
            "names, shapes and dtypes of tensors": f"{len(specs)} exchanged, digest {_digest(tensors)}",
            "the 'local' parameters": sorted(synchronizer.replica.local_names),
        }

    @abstractmethod
    def rejoin(self, name: str) -> None:
        """Switch to the current ranks, with a new prefix for the names of collectives; communicates nothing."""

    def take_set_of(self, source: int, copied: Any) -> None:
        """Train the same parameters as the rank ``source`` did when it committed; collective.

        Args:
            source: a rank that holds the commit.
            copied: the state in this rank's own commit; None if it has none.
        """

    def has_whole(self, copied: Any) -> bool:
        """Return whether a state that :meth:`copied` returned has the center; not if a shard was loaded from a file."""
        return all(vectors.get("center") for vectors in self.exchanges_in(copied)["vectors"].values())

    def share(self) -> Share:
        """Return copies of this rank's shard of the center, ready to send."""
        return own_share(self.synchronizer)

    @abstractmethod
    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the exchange state within a state that :meth:`copied` returned."""

    @abstractmethod
    def resharded(self, saved: Any) -> Any:
        """Return the state of the center's optimizer, saved by any number of ranks, resharded for the current ranks."""

    @abstractmethod
    def completed(self, copied: Any, whole: FullCenter) -> Any:
        """Return a state that :meth:`copied` returned without the center, completed with it."""

    def restore_center(self, communicator: Communicator, copied: Any, mirror: ShardBackup | None) -> FullCenter:
        """Return the center restored from commits, with its optimizer's state resharded for the current ranks."""
        has_whole = copied is not None and mirror is None
        whole = full_center(self.synchronizer, self.exchanges_in(copied)) if has_whole else None
        found = restore_center(communicator, self.synchronizer, mirror, whole)
        return replace(found, optimizer_state=self.resharded(found.optimizer_state))

    def own(self) -> dict[str, Any]:
        """Return copies of the exchange state that this rank holds by itself."""
        own: dict[str, Any] = (
            self.synchronizer.checkpoint.save_own() if self.has_shares else self.synchronizer.state_dict()
        )
        return own

    @property
    def divided(self) -> bool:
        """Whether the center is not on every rank, and so not in the copies of every rank."""
        return not self.synchronizer.exchanger.placement.everywhere

    @property
    def has_shares(self) -> bool:
        """Whether ranks now hold shards of the center; before training starts, each has or has loaded the whole."""
        checkpoint = self.synchronizer.checkpoint
        loaded = checkpoint.has_loaded() and checkpoint.state is None
        return self.divided and bool(self.synchronizer.begun or loaded)

    def ready(self) -> None:
        """Prepare for training once all ranks have their states; collective."""


def _digest(values: Iterable[Any]) -> str:
    """Return a digest of some values."""
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Commit:
    """A copy of everything from which training can resume.

    Attributes:
        objects: plain objects, equal on all ranks.
        states: states of everything else, by name.
        mirrors: backups of centers that are not on every rank, which ``states`` lacks.
    """

    objects: Objects
    states: dict[str, Any]
    mirrors: dict[str, ShardBackup]

    def parts(self, name: str) -> tuple[Any, ShardBackup | None]:
        """Return the state under a name, with the backup of its center if the state lacks it."""
        return self.states[name], self.mirrors.get(name)


@dataclass(frozen=True)
class _CommitInfo:
    """A rank's message to all ranks at the start of :meth:`Commits.sync`.

    Attributes:
        generation: number of changes of the ranks that this rank has seen.
        numbers: numbers of the commits that it holds.
        loaded: whether a state of exchanges was loaded.
        prepared: number of the prepared commit, of which the rank does not know whether all ranks have prepared it.
        address: address at which other ranks can query this one when they wait for it.
    """

    generation: int
    numbers: set[int]
    loaded: bool
    prepared: set[int]
    address: np.ndarray | None


class Commits:
    """Keeps numbered commits; after a change of the ranks, all resume from one of them.

    Every surviving rank restores its own copy of the newest commit that all survivors hold. Ranks without a commit have
    joined: one of the survivors sends them its whole state, and they start from the center.

    The commit that :meth:`sync` makes is valid once a rank knows that all ranks have prepared it. If a rank is lost
    meanwhile, some may not learn this. In the next :meth:`sync`, the ranks that know it say so, and the others, all of
    which have prepared the commit, resume from it too. If no rank knows it, all resume from the commit before.

    Args:
        kept: returns the committable objects by name, in the same order on all ranks.

    Attributes:
        held: the commits of this rank, by number.
    """

    def __init__(self, kept: Callable[[], Mapping[str, Committable]]) -> None:
        self._kept = kept
        self._generation = 0
        self._prepared: dict[int, Commit] = {}
        self.held: dict[int, Commit] = {}

    def require_outside_center_block(self) -> None:
        """Raise a RuntimeError inside ``center()``, where models hold the center instead of their replicas."""
        for each in self._exchanges().values():
            each.synchronizer.center_reader.require_outside_center_block("commit")

    def keep(self, objects: Objects) -> None:
        """Commit everything, and keep the previous commit too."""
        self.held[max(self.held, default=-1) + 1] = self._commit(objects)
        for old in sorted(self.held)[:-_KEPT]:
            del self.held[old]

    def forget(self) -> None:
        """Forget all commits, as other ranks have gone on from later ones; this one joins them as a new one."""
        self.held, self._prepared = {}, {}
        for kept in self._kept().values():
            kept.renew()

    def reset(self, objects: Objects) -> Objects:
        """Switch to the new ranks, restore the newest commit, and return its objects; communicates nothing."""
        forget_trackers()
        self._rejoin(self._generation + 1)
        if not self.held:
            return objects
        return self._put_back(self.held[max(self.held)], {})

    def share_centers(self, communicator: Communicator) -> None:
        """Give every rank the full centers, in the newest commit that all ranks hold; collective.

        Horovod is about to remove some of these ranks, and tells which only after they are gone.
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
            whole = exchanges[name].restore_center(communicator, states[name], mirror)
            states[name] = exchanges[name].completed(states[name], whole)
        communicator.settle()
        self.held[max(common)] = replace(commit, states=states, mirrors={})

    def sync(self, communicator: Communicator, objects: Objects, change: Callable[[], None]) -> Objects:
        """Resume all ranks from the newest commit that all survivors hold; return its objects.

        Args:
            communicator: the current ranks.
            objects: the plain objects of this rank.
            change: called on surviving ranks after they have restored the commit; its changes are kept.

        Raises:
            RuntimeError: the survivors hold no commit in common; raised on all ranks.
            ValueError: hyper-parameters make no sense for the new number of ranks, or ranks disagree; on all ranks.
        """
        told = self._met(communicator)
        self._rejoin(1 + max(each.generation for each in told))
        holders = {rank: each.numbers for rank, each in enumerate(told) if each.numbers}
        common = set.intersection(*holders.values()) if holders else {-1}
        if not common:
            raise RuntimeError(
                f"{titled(holders)} hold no commit in common: commit() was not called equally often on all "
                "ranks. Start the job again from a checkpoint"
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
            communicator.allgather_object(None, "hvd_periodic.prepared")  # Its return proves that all have prepared.
            communicator.settle()
        self.held, self._prepared = self._prepared, {}
        return objects

    def _met(self, communicator: Communicator) -> list[_CommitInfo]:
        """Return the messages of all ranks; adopt the prepared commit if a rank knows that all had prepared it."""
        loaded = any(each.synchronizer.checkpoint.has_loaded() for each in self._exchanges().values())
        address, _ = communicator.address()
        mine = _CommitInfo(self._generation, set(self.held), loaded, set(self._prepared), address)
        with communicator.tracker.at("State.sync()"):
            told: list[_CommitInfo] = communicator.allgather_object(mine, "hvd_periodic.commits")
        # The ranks of an island have the same commits, before and after.
        communicator.settle(f"commits {sorted(self.held)}, with {'a' if loaded else 'no'} state loaded")
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
        """Resume from a commit that all ``holders`` have; the first sends it to joining ranks. Return its objects."""
        source = min(holders)
        for name, each in self._exchanges().items():
            each.take_set_of(source, None if own is None else own.states[name])
        wholes = {
            name: kept.restore_center(communicator, *(own.parts(name) if own is not None else (None, None)))
            for name, kept in self._exchanges().items()
            if kept.divided
        }
        if own is not None:
            objects = self._put_back(own, wholes)
            communicator.settle()  # Before functions of the user's, which may communicate within an island.
            change()
            own = replace(own, states=self._copies())
        for kept in self._kept().values():
            kept.broadcast_from(source)
        objects = communicator.broadcast_object(objects, "hvd_periodic.objects", source)
        if own is not None:
            self._put_back(own, wholes)
        for name, each in self._exchanges().items():
            steps = each.synchronizer.local_steps
            if each.synchronizer.membership.is_lockstep_group:
                merge_group_centers(each.synchronizer, holders)
            elif own is None:
                start_from_center(each.synchronizer, wholes.get(name))
                text = "Rank %d has joined at local step %d and starts from the center"
                if each.synchronizer.replica.local_names:
                    text += "; its 'local' parameters keep the values of its own model"
                each.synchronizer.membership.log.warning(text, communicator.rank, steps)
            if steps == 0:  # No rank has trained: values loaded into models before the first step count, as usual.
                each.synchronizer.checkpoint.forget()
        return objects

    @contextmanager
    def _loaded_still(self) -> Iterator[None]:
        """Restore this rank's states if the block fails, so that training then starts from the loaded states."""
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
        """Return a copy of everything; collective if something in it is."""
        for kept in self._kept().values():
            kept.gather()
        mirrors = {
            name: back_up(each.synchronizer, each.share())
            for name, each in self._exchanges().items()
            if each.has_shares
        }
        return Commit(copy.deepcopy(objects), self._copies(), mirrors)

    def _copies(self) -> dict[str, Any]:
        return {name: kept.copied() for name, kept in self._kept().items()}

    def _put_back(self, commit: Commit, wholes: Mapping[str, FullCenter]) -> Objects:
        """Restore all states of a commit, unless their center is missing; return its objects."""
        for name, kept in self._kept().items():
            copied = commit.states[name]
            if not (isinstance(kept, CommittableOptimizer) and kept.divided):
                kept.restore(copied)
            elif name in wholes:
                kept.restore(kept.completed(copied, wholes[name]))
        return copy.deepcopy(commit.objects)

    def _rejoin(self, generation: int) -> None:
        """Switch every exchanging object to the current ranks, under the same names on all ranks."""
        self._generation = generation
        for number, each in enumerate(self._exchanges().values(), 1):
            each.rejoin(f"hvd_periodic.elastic.{generation}.{number}")

    def _exchanges(self) -> dict[str, CommittableOptimizer]:
        return {name: kept for name, kept in self._kept().items() if isinstance(kept, CommittableOptimizer)}
