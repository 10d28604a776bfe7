"""Elastic training: the state that is kept while ranks join and leave."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set
from typing import Any, Literal

import torch

from hvd_periodic.comm.base import Communicator
from hvd_periodic.elastic.commits import Committable, CommittableOptimizer
from hvd_periodic.elastic.shards import FullCenter, Share
from hvd_periodic.elastic.state import CommittedState, refuse_between_islands, refuse_fixed, run
from hvd_periodic.torch.checkpoints import has_state
from hvd_periodic.torch.communicator import FRONT_END, communicator_of
from hvd_periodic.torch.copies import settings_of
from hvd_periodic.torch.gradient_averaging import innermost
from hvd_periodic.torch.neutral import neutrally
from hvd_periodic.torch.optimizer import STATE_KEY, PeriodicOptimizer, levels_of
from hvd_periodic.torch.resharding import resharded
from hvd_periodic.torch.sampler import ElasticSampler, loads_by_elastic_sampler
from hvd_periodic.torch.saved import map_tensors
from hvd_periodic.torch.sharded_parameters import shard_of
from hvd_periodic.torch.synchronizer import Synchronizer
from hvd_periodic.torch.trained_set import TrainedSet

__all__ = ["ElasticSampler", "State", "run"]

_SETS_KEY = "trained_sets"
"""Key, in copies of an optimizer's state, of the sets of parameters that ranks exchange, and that it trains."""


class State(CommittedState):
    """The state of a job whose ranks change; under elastic Horovod, use it in place of ``hvd.elastic.TorchState``.

    If a rank is lost, its steps since its last commit are lost, but nothing of the center. The other ranks go back to
    the newest commit that all of them hold, and each keeps its own replica. A rank that joins starts from the center,
    with the counters and the state of the center's optimizer; its local optimizer takes over the hyper-parameters and
    is otherwise new. Everything that depends on the number of ranks is computed again.

    ``"local"`` parameters, of the same names on all ranks, stay with their process, whose commits hold them; those of a
    rank that joins are what its model has.

    A commit is an in-memory copy of the whole state on every rank; each rank holds two. If the center lives on the root
    or in shards, every rank copies its shard with the state of the center's optimizer, and sends a backup to a rank on
    another host; the job ends only if both are killed at once. Before ranks are removed, every rank gets the full
    center.

    At a rendezvous, a worker may be an island: ranks with which the program has initialized torch.distributed, and
    which train one model together. They leave and join as one, and each exchanges with the ranks at its position in
    the other islands.

    With ``commit="exchange"``, every exchange commits, and ``commit()`` need not be called: a lost rank loses one
    period. The commit takes place at the end of ``optimizer.step()``, so count batches before it. If the loop does more
    work for a batch after it, such as a scheduler's ``step()``, call ``commit()`` at the end of that work instead::

        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for inputs, targets in batches:
                    ...
                    state.optimizer.step()

        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 10)
        hvdp.elastic.run(train)(State(model, optimizer, commit="exchange", epoch=0))

    Args:
        model: the model.
        optimizer: an optimizer of this package over all ranks, which may wrap another one over groups of ranks that a
            function returns; or any other optimizer, as in Horovod.
        commit: ``"call"``: commit when :meth:`commit` is called, equally often on all ranks; ``"exchange"``: also after
            every exchange of the first optimizer of this package, until the first rank has finished training.
        min_ranks: number of ranks below which nobody trains; for a rendezvous, as ``HVD_PERIODIC_RANKS``. Default: as
            there, else 1.
        max_ranks: number of ranks above which further workers wait until one leaves. Default: as there, else no limit.
        more: other state to keep: any object with ``state_dict()`` and ``load_state_dict()`` (models, optimizers,
            schedulers, an ``ElasticSampler``), and plain objects, which all ranks take from one rank. They become
            attributes.

    Raises:
        TypeError: ``min_ranks`` or ``max_ranks`` is no int.
        ValueError: an optimizer whose ranks cannot change: asynchronous, around an ``hvd.DistributedOptimizer``, or
            with a process set; or what islands do not support. A loader of an ``ElasticSampler`` is given in place of
            the sampler. The environment has invalid settings of a rendezvous, or other numbers of ranks than the
            arguments; or these are given without a rendezvous.
        ImportError: there is neither a rendezvous nor Horovod.

    References:
        Horovod's documentation, "Elastic Horovod". PyTorch's documentation, "Rendezvous".
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        commit: Literal["call", "exchange"] = "call",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **more: Any,
    ) -> None:
        if commit not in ("call", "exchange"):
            raise ValueError(f"`commit` must be 'call' or 'exchange'. Received: {commit!r}")
        given = {"model": model, "optimizer": optimizer} | more
        self._tracked = {name: value for name, value in given.items() if has_state(value)}
        objects = {name: value for name, value in given.items() if name not in self._tracked}
        for name, periodic in self._periodic().items():
            levels = levels_of(periodic)
            for level in levels:
                refuse_fixed(name, level.synchronizer, level.synchronizer.gradient_group is not None)
                refuse_between_islands(name, level.synchronizer, len(levels))
        samplers = [name for name, value in given.items() if isinstance(value, ElasticSampler)]
        if samplers and self._communicator().between_islands:
            raise ValueError(
                f"`{samplers[0]}` is an ElasticSampler, which divides examples between single ranks, and these are the "
                "ranks of an island: divide them by State.place() and torch.distributed.get_rank()"
            )
        loaders = [name for name, value in given.items() if loads_by_elastic_sampler(value)]
        if loaders:
            raise ValueError(
                f"`{loaders[0]}` is a loader whose sampler is an ElasticSampler, and its own state counts what it has "
                "loaded, not what was trained on: put the sampler into the State instead, and leave the loader out"
            )
        super().__init__(self._tracked, objects, FRONT_END.elastic_job(min_ranks, max_ranks), commit)
        for periodic in self._periodic().values():
            periodic.after_adoption = self._after_adoption
        if commit == "exchange":
            if not self._periodic():
                raise ValueError("commit='exchange' needs an optimizer of hvd_periodic.torch. Received none")
            self._optimizer = next(iter(self._periodic().values()))
            self._optimizer.after_exchange = self._after_exchange

    @neutrally
    def save(self) -> None:
        """Commit everything, and keep the previous commit too.

        Raises:
            RuntimeError: the parameters of an optimizer have changed, and :meth:`PeriodicOptimizer.adopt` has not been
                called since; ranks could not go on from such a commit.
        """
        if (changed := self._not_adopted()) is not None:
            raise RuntimeError(changed)
        super().save()

    check_host_updates = neutrally(CommittedState.check_host_updates)
    reset = neutrally(CommittedState.reset)
    sync = neutrally(CommittedState.sync)

    def _communicator(self) -> Communicator:
        """Return the current ranks."""
        return communicator_of(None)

    def _all_kept(self) -> dict[str, Committable]:
        """Return a keeper for every object with a state; for nested optimizers, the outermost first."""
        found: dict[str, Committable] = {}
        for name, value in self._tracked.items():
            levels = levels_of(value)
            found |= {name + depth * ".inner": _KeptOptimizer(level) for depth, level in enumerate(levels)}
            if isinstance(value, torch.nn.Module):
                found[name] = _KeptModel(value, self._local_parameters())
            elif not levels:
                found[name] = _KeptSampler(value) if isinstance(value, ElasticSampler) else _KeptState(value)
        return found

    def _local_parameters(self) -> set[int]:
        """Return the identities of the parameters that no optimizer of this package exchanges: they stay here."""
        replicas = [level.synchronizer.replica for each in self._periodic().values() for level in levels_of(each)]
        local = [dict(replica.named.parameters)[name] for replica in replicas for name in replica.local_names]
        return {id(parameter) for parameter in local}

    def _after_exchange(self) -> None:
        """Commit, unless some rank has finished training: then not all ranks make this call."""
        if self._optimizer.synchronizer.handshake.everyone_trains:
            self.commit()

    def _after_adoption(self) -> None:
        """Commit, unless another optimizer has yet to adopt what has changed."""
        if self._not_adopted() is None:
            self.save()

    def _not_adopted(self) -> str | None:
        """Return which parameters have changed and are not adopted, or None."""
        found = (each.synchronizer.replica.changes() for each in self._periodic().values())
        return next(filter(None, found), None)

    def _periodic(self) -> dict[str, PeriodicOptimizer]:
        return {name: value for name, value in self._tracked.items() if isinstance(value, PeriodicOptimizer)}


class _KeptState(Committable):
    """An object with ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def copied(self) -> Any:
        """Return a copy of its state."""
        return copy.deepcopy(self.value.state_dict())

    def restore(self, copied: Any) -> None:
        """Load a copy of the state."""
        self.value.load_state_dict(copy.deepcopy(copied))

    def begin(self, loaded: bool) -> None:
        """Take over the first rank's state."""
        self.broadcast_from(0)

    def broadcast_from(self, source: int) -> None:
        """Take over one rank's state."""
        self.value.load_state_dict(_of_rank(self.value.state_dict(), source))

    def renew(self) -> None:
        """Forget the state of an optimizer, as where it is new."""
        if isinstance(self.value, torch.optim.Optimizer):
            self.value.state.clear()


class _KeptModel(_KeptState):
    """A model.

    Args:
        value: the model.
        own: the identities of ``"local"`` parameters, which stay with this worker.
    """

    def __init__(self, value: torch.nn.Module, own: Set[int]) -> None:
        super().__init__(value)
        self._own = own

    def begin(self, loaded: bool) -> None:
        """Take over the first rank's state, unless states were loaded: each rank may have its own."""
        if not loaded:
            self.broadcast_from(0)

    def broadcast_from(self, source: int) -> None:
        """Take over one rank's state, without what stays with this worker."""
        state, communicator = self.value.state_dict(), communicator_of(None)
        named = self.value.named_parameters(remove_duplicate=False)
        local = {name: state[name] for name, parameter in named if id(parameter) in self._own and name in state}
        if not all(map(torch.is_tensor, state.values())):
            given = _of_rank(state, source)
            given.update(local)
            self.value.load_state_dict(given)
            return
        for name, tensor in state.items():
            if name not in local:
                own = shard_of(tensor).detach()
                given = communicator.broadcast(own.reshape(-1).clone(), f"hvd_periodic.elastic.{name}", source)
                own.copy_(given.view(own.shape))


class _KeptSampler(_KeptState):
    """A sampler, whose commits hold how far all ranks have come."""

    value: ElasticSampler

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The number of examples, and their order."""
        return {"the data": self.value.description}

    def gather(self) -> None:
        """Learn how far the other ranks have come."""
        self.value.gather()


class _KeptOptimizer(_KeptState, CommittableOptimizer):
    """An optimizer of this package; of nested ones, the innermost keeps the local optimizer."""

    value: PeriodicOptimizer

    @property
    def _local(self) -> torch.optim.Optimizer | None:
        return None if isinstance(self.value.inner, PeriodicOptimizer) else self.value.inner

    @property
    def synchronizer(self) -> Synchronizer:
        """The optimizer's synchronizer."""
        return self.value.synchronizer

    def copied(self) -> Any:
        """Return a copy of its state; of the exchange state, the part that this rank holds by itself."""
        local = {} if self._local is None else copy.deepcopy(self._local.state_dict())
        sets = self.synchronizer.replica.trained_set, self.synchronizer.trained_locally
        return local | {STATE_KEY: self.own(), _SETS_KEY: sets}

    def restore(self, copied: Any) -> None:
        """Load a copy of the state."""
        local = copy.deepcopy(copied)
        exchanges, sets = local.pop(STATE_KEY), local.pop(_SETS_KEY)
        self._take_sets(*sets)
        if self._local is not None:
            self._local.load_state_dict(local)
        self.synchronizer.load_state_dict(exchanges)

    def take_set_of(self, source: int, copied: Any) -> None:
        """Train the set of parameters of one rank's commit."""
        self._take_sets(*_of_rank(None if copied is None else copied[_SETS_KEY], source))

    def _take_sets(self, exchanged: TrainedSet, local: TrainedSet | None) -> None:
        """Exchange one set of parameters, in the parameter groups of another, which may divide it in another way."""
        self.value.take_set(exchanged)
        if local is not None:
            self.synchronizer.train_locally(local)

    def share(self) -> Share:
        """Return this rank's shard of the center in host memory, since other ranks may lack its device."""
        share = super().share()
        return Share(map_tensors(torch.Tensor.cpu, share.vectors), map_tensors(torch.Tensor.cpu, share.optimizer_state))

    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the state of the exchanges; of sharded tensors, the shards of this rank."""
        found: Mapping[str, Any] = map_tensors(shard_of, copied[STATE_KEY])
        return found

    def resharded(self, saved: Any) -> Any:
        """Return the state of the center's optimizer, resharded for the current ranks."""
        return resharded(saved, self.synchronizer)

    def completed(self, copied: Any, whole: FullCenter) -> Any:
        """Return the state with the center added."""
        return {**copied, STATE_KEY: whole.within(copied[STATE_KEY])}

    def begin(self, loaded: bool) -> None:
        """Start training; if a state was loaded, first take over the first rank's hyper-parameters."""
        if loaded:
            self._take_hyperparameters(0)
        self.synchronizer.start()

    def broadcast_from(self, source: int) -> None:
        """Take over one rank's local hyper-parameters, then its replica, center and counters."""
        self._take_hyperparameters(source)
        self.synchronizer.check_agreement()
        self.synchronizer.broadcast_from(source)

    def _take_hyperparameters(self, source: int) -> None:
        """Take over the hyper-parameters of one rank's local optimizer, and of the one that its center's follows.

        State that an optimizer keeps in its parameter groups is not among them: it belongs to the optimizer's state.
        """
        followed = self.synchronizer.followed
        optimizers = [innermost(self.value), *(() if followed is None else (followed,))]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        given = _of_rank([settings for optimizer in optimizers for settings in settings_of(optimizer)], source)
        for group, settings in zip(groups, given, strict=True):
            group.update(settings)

    def rejoin(self, name: str) -> None:
        """Reconstruct the optimizer for the current ranks."""
        self.value.rejoin(name)


def _of_rank(value: Any, rank: int = 0) -> Any:
    """Return one rank's value on all ranks."""
    return communicator_of(None).broadcast_object(value, "hvd_periodic.elastic", rank)
