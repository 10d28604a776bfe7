"""Training that outlives its workers: what ``hvd.elastic.run`` keeps while ranks come and go."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Literal

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState

from hvd_periodic.comm.agreement import join
from hvd_periodic.comm.attendance import forget_all
from hvd_periodic.torch.optimizer import STATE_KEY, PeriodicOptimizer
from hvd_periodic.torch.synchronizer import communicator_of

logger = logging.getLogger("hvd_periodic")

_KEPT = 2
"""Commits: a rank may be lost between those of two others, which are never further apart."""


@dataclass(frozen=True)
class Commit:
    """What training can go on from.

    Attributes:
        objects: plain attributes, by name.
        states: of models, optimizers, samplers and all else that has one, by name.
    """

    objects: dict[str, Any]
    states: dict[str, Any]


class State(ObjectState):  # type: ignore[misc]
    """What is kept of a job whose ranks change, in place of ``hvd.elastic.TorchState``.

    A rank that was lost takes the steps since its last commit with it, and nothing of the center's. The others go back
    to the newest commit that all of them hold: replicas stay what they were, each its own. A rank that joins starts
    from the center, with the state of its optimizer and the counters, and with a local optimizer that is new but for
    its hyper-parameters. Everything that depends on the number of ranks is computed anew.

    A commit is a copy in memory of all that is kept, on every rank; each rank holds two. With ``commit="exchange"``
    every exchange is one, and ``commit()`` need not be called: what a lost rank takes with it is one period.

        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for inputs, targets in batches:
                    ...
                    state.optimizer.step()

        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 10)
        hvd.elastic.run(train)(State(model, optimizer, commit="exchange", epoch=0))

    Args:
        model: the model.
        optimizer: of this package, over all ranks, with the center on every rank; or any other, as in Horovod.
        commit: ``"call"``: when :meth:`commit` is called, the same number of times on all ranks; ``"exchange"``: after
            every exchange of the first optimizer of this package as well, until the first rank is at its end.
        more: what else is kept: all that has ``state_dict()`` and ``load_state_dict()`` (models, optimizers, samplers,
            schedulers), and plain objects, which all ranks take from one of them. They become attributes.

    Raises:
        ValueError: an optimizer whose ranks cannot change: asynchronous, around an
            ``hvd.DistributedOptimizer`` or another of this package, with a process set, or with its center elsewhere.

    References:
        Horovod's documentation, "Elastic Horovod".
    """

    _tracked: dict[str, Any]
    _saved_state: dict[str, Any]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        commit: Literal["call", "exchange"] = "call",
        **more: Any,
    ) -> None:
        if commit not in ("call", "exchange"):
            raise ValueError(f"`commit` must be 'call' or 'exchange'. Received: {commit!r}")
        given = {"model": model, "optimizer": optimizer} | more
        self._tracked = {name: value for name, value in given.items() if _has_state(value)}
        objects = {name: value for name, value in given.items() if name not in self._tracked}
        for name, periodic in self._periodic().items():
            _check(name, periodic)
        for name, value in self._tracked.items():
            setattr(self, name, value)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **objects)
        self._commits: dict[int, Commit] = {}
        self._generation = 0
        if commit == "exchange":
            if not self._periodic():
                raise ValueError("commit='exchange' needs an optimizer of hvd_periodic.torch. Received none")
            self._optimizer = next(iter(self._periodic().values()))
            self._optimizer.after_exchange = self._after_exchange

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_tracked", {}):
            self._tracked[name] = value
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of everything, beside the one before."""
        super().save()
        self._keep(max(self._commits, default=-1) + 1)

    def restore(self) -> None:
        """Do nothing yet: :meth:`sync` puts back what was committed last by all that are left."""

    def reset(self) -> None:
        """Take notice of new ranks, and put back what was committed last; communicates nothing."""
        forget_all()
        self._rejoin(self._generation + 1)
        if self._commits:
            newest = self._commits[max(self._commits)]
            self._put_back(newest)
            self._saved_state = copy.deepcopy(newest.objects)
            self._set_attrs()

    def sync(self) -> None:
        """Let all ranks go on from the newest commit of those that have one; the others join them.

        Raises:
            RuntimeError: no commit is held by all of them; on all ranks.
            ValueError: hyper-parameters that make no sense for so many ranks, or ranks that disagree; on all ranks.
        """
        loaded = any(periodic.synchronizer.checkpoint.has_loaded() for periodic in self._periodic().values())
        communicator = communicator_of(None)
        introduction, _ = communicator.introduction()
        mine = self._generation, set(self._commits), loaded, introduction
        with communicator.attendance.at("State.sync()"):
            told = communicator.allgather_object(mine, "hvd_periodic.commits")
        communicator.attendance.met([() if found is None else found for *_, found in told])
        self._rejoin(1 + max(generation for generation, *_ in told))
        holders = {rank: numbers for rank, (_, numbers, *_) in enumerate(told) if numbers}
        if not holders:
            self._begin(loaded=any(loaded for _, _, loaded, _ in told))
            self._keep(0)
            return
        common = set.intersection(*holders.values())
        if not common:
            raise RuntimeError(
                f"Ranks {join(sorted(holders))} hold no commit in common: commit() was not called equally often on all "
                "ranks. Start the job anew from a checkpoint"
            )
        self._go_on(max(common), giver=min(holders))

    def _after_exchange(self) -> None:
        """Commit, as long as nobody is at the end, where not all ranks come by here."""
        if self._optimizer.synchronizer.meeting.everyone_trains:
            self.commit()

    def _begin(self, loaded: bool) -> None:
        """Let all ranks start from what the first one has: nobody has trained.

        Where states of exchanges were loaded, optimizers find out who has what; every rank may have loaded a model of
        its own with them.
        """
        for value in self._tracked.values():
            if isinstance(value, PeriodicOptimizer):
                value.synchronizer.start()
            elif not (loaded and isinstance(value, torch.nn.Module)):
                _give(value, 0)
        super().sync()

    def _go_on(self, number: int, giver: int) -> None:
        """Go on from a commit that the ranks hold, of which one gives it to those that join."""
        communicator, own = communicator_of(None), self._commits.get(number)
        if own is not None and communicator.rank == giver:
            self._put_back(own)
            self._saved_state = copy.deepcopy(own.objects)
        for value in self._tracked.values():
            if isinstance(value, PeriodicOptimizer):
                value.synchronizer.check_agreement()
                value.synchronizer.take_from(giver)
                hyperparameters = [_without_parameters(group) for group in value.param_groups]
                given = hvd.broadcast_object(hyperparameters, giver)
                for group, settings in zip(value.param_groups, given, strict=True):
                    group.update(settings)
            else:
                _give(value, giver)
        self._saved_state = hvd.broadcast_object(self._saved_state, giver)
        self._set_attrs()
        if own is not None:
            self._put_back(own)
        else:
            for periodic in self._periodic().values():
                periodic.synchronizer.start_from_center()
                logger.warning(
                    "Rank %d has joined at local step %d, and starts from the center",
                    communicator.rank,
                    periodic.synchronizer.local_steps,
                )
        self._commits = {}
        self._keep(number)

    def _keep(self, number: int) -> None:
        """Keep a copy of everything under a number."""
        states = {name: _copied(value) for name, value in self._tracked.items()}
        self._commits[number] = Commit(copy.deepcopy(self._saved_state), states)
        for old in sorted(self._commits)[:-_KEPT]:
            del self._commits[old]

    def _put_back(self, commit: Commit) -> None:
        """Set everything that has a state to what it was."""
        for name, value in self._tracked.items():
            value.load_state_dict(copy.deepcopy(commit.states[name]))

    def _rejoin(self, generation: int) -> None:
        """Let all optimizers be of the ranks that there are now, under the same names on all."""
        self._generation = generation
        for number, periodic in enumerate(self._periodic().values(), 1):
            periodic.rejoin(f"hvd_periodic.elastic.{generation}.{number}")

    def _periodic(self) -> dict[str, PeriodicOptimizer]:
        return {name: value for name, value in self._tracked.items() if isinstance(value, PeriodicOptimizer)}


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _check(name: str, optimizer: PeriodicOptimizer) -> None:
    """Raise a ValueError where the ranks of an optimizer cannot change."""
    synchronizer = optimizer.synchronizer
    communicator, placement = synchronizer.membership.communicator, synchronizer.course.placement
    within = getattr(getattr(communicator, "process_set", None), "process_set_id", type(communicator).__name__)
    asynchronous, nested = synchronizer.course.worker is not None, isinstance(optimizer.inner, PeriodicOptimizer)
    averages = synchronizer.gradient_group is not None
    refused = {
        "exchanges asynchronously, by an MPI that ends with the first rank": asynchronous,
        "is around an optimizer of this package, between groups of ranks": nested,
        "is around an hvd.DistributedOptimizer, whose ranks have to agree at every step": averages,
        f"has center={placement.name!r}, a part of which would be lost with a rank": not placement.everywhere,
        f"exchanges within process set {within}, which elastic Horovod does not keep": within != 0,
    }
    for why, found in refused.items():
        if found:
            raise ValueError(
                f"`{name}` {why}: under elastic Horovod, ranks exchange synchronously, all of them in one set, with "
                "center='replicated'"
            )


def _give(value: Any, giver: int) -> None:
    """Give all ranks what one of them has."""
    if isinstance(value, torch.nn.Module):
        hvd.broadcast_parameters(value.state_dict(), root_rank=giver)
    elif isinstance(value, torch.optim.Optimizer):
        hvd.broadcast_optimizer_state(value, root_rank=giver)
    else:
        value.load_state_dict(hvd.broadcast_object(value.state_dict(), giver))


def _copied(value: Any) -> dict[str, Any]:
    """Return a copy of a state; that of exchanges is one already."""
    state = dict(value.state_dict())
    of_exchanges = {STATE_KEY: state.pop(STATE_KEY)} if isinstance(value, PeriodicOptimizer) else {}
    return copy.deepcopy(state) | of_exchanges


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
