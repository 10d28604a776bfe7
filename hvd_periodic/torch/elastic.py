"""Elastic training: the state that ``hvd.elastic.run`` keeps while ranks join and leave."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState

from hvd_periodic.comm.base import Communicator
from hvd_periodic.elastic.commits import Commits, Committable, CommittableOptimizer, CommittedState, refuse_fixed
from hvd_periodic.elastic.shards import FullCenter, Share
from hvd_periodic.torch.checkpoints import has_state
from hvd_periodic.torch.communicator import communicator_of
from hvd_periodic.torch.copies import settings_of
from hvd_periodic.torch.gradient_averaging import innermost
from hvd_periodic.torch.neutral import neutrally
from hvd_periodic.torch.optimizer import STATE_KEY, PeriodicOptimizer, levels_of
from hvd_periodic.torch.resharding import resharded
from hvd_periodic.torch.saved import map_tensors
from hvd_periodic.torch.synchronizer import Synchronizer


class State(CommittedState, ObjectState):  # type: ignore[misc]
    """The state of a job whose ranks change; use it in place of ``hvd.elastic.TorchState``.

    If a rank is lost, its steps since its last commit are lost, but nothing of the center. The other ranks go back to
    the newest commit that all of them hold, and each keeps its own replica. A rank that joins starts from the center,
    with the counters and the state of the center's optimizer; its local optimizer takes over the hyper-parameters and
    is otherwise new. Everything that depends on the number of ranks is computed again.

    A commit is an in-memory copy of the whole state on every rank; each rank holds two. If the center lives on the root
    or in shards, every rank copies its shard with the state of the center's optimizer, and sends a backup to a rank on
    another host; the job ends only if both are killed at once. Before ranks are removed, every rank gets the full
    center.

    With ``commit="exchange"``, every exchange commits, and ``commit()`` need not be called: a lost rank loses one
    period. The commit takes place at the end of ``optimizer.step()``, so count batches before it. If the loop does more
    work for a batch after it, such as a scheduler's ``step()``, call ``commit()`` at the end of that work instead::

        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for inputs, targets in batches:
                    ...
                    state.optimizer.step()

        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 10)
        hvd.elastic.run(train)(State(model, optimizer, commit="exchange", epoch=0))

    Args:
        model: the model.
        optimizer: an optimizer of this package over all ranks, which may wrap another one over groups of ranks that a
            function returns; or any other optimizer, as in Horovod.
        commit: ``"call"``: commit when :meth:`commit` is called, equally often on all ranks; ``"exchange"``: also after
            every exchange of the first optimizer of this package, until the first rank has finished training.
        more: other state to keep: any object with ``state_dict()`` and ``load_state_dict()`` (models, optimizers,
            samplers, schedulers), and plain objects, which all ranks take from one rank. They become attributes.

    Raises:
        ValueError: an optimizer whose ranks cannot change: asynchronous, around an ``hvd.DistributedOptimizer``, or
            with a process set.

    References:
        Horovod's documentation, "Elastic Horovod".
    """

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
        self._tracked = {name: value for name, value in given.items() if has_state(value)}
        objects = {name: value for name, value in given.items() if name not in self._tracked}
        for name, periodic in self._periodic().items():
            for level in levels_of(periodic):
                refuse_fixed(name, level.synchronizer, level.synchronizer.gradient_group is not None)
        for name, value in self._tracked.items():
            setattr(self, name, value)
        super().__init__(bcast_object=_of_rank, get_rank=hvd.rank, **objects)
        self.commits = Commits(self._all_kept)
        if commit == "exchange":
            if not self._periodic():
                raise ValueError("commit='exchange' needs an optimizer of hvd_periodic.torch. Received none")
            self._optimizer = next(iter(self._periodic().values()))
            self._optimizer.after_exchange = self._after_exchange

    save = neutrally(CommittedState.save)
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
            if not levels:
                found[name] = _KeptState(value)
        return found

    def _after_exchange(self) -> None:
        """Commit, unless some rank has finished training: then not all ranks make this call."""
        if self._optimizer.synchronizer.handshake.everyone_trains:
            self.commit()

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
        """Take over the first rank's state, except into models if states were loaded: each rank may have its own."""
        if not (loaded and isinstance(self.value, torch.nn.Module)):
            self.broadcast_from(0)

    def broadcast_from(self, source: int) -> None:
        """Take over one rank's state."""
        if isinstance(self.value, torch.nn.Module):
            hvd.broadcast_parameters(self.value.state_dict(), root_rank=source)
        elif isinstance(self.value, torch.optim.Optimizer):
            hvd.broadcast_optimizer_state(self.value, root_rank=source)
        else:
            self.value.load_state_dict(_of_rank(self.value.state_dict(), source))


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
        return local | {STATE_KEY: self.own()}

    def restore(self, copied: Any) -> None:
        """Load a copy of the state."""
        local = copy.deepcopy(copied)
        exchanges = local.pop(STATE_KEY)
        if self._local is not None:
            self._local.load_state_dict(local)
        self.synchronizer.load_state_dict(exchanges)

    def share(self) -> Share:
        """Return this rank's shard of the center in host memory, since other ranks may lack its device."""
        share = super().share()
        return Share(map_tensors(torch.Tensor.cpu, share.vectors), map_tensors(torch.Tensor.cpu, share.optimizer_state))

    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the state of the exchanges."""
        found: Mapping[str, Any] = copied[STATE_KEY]
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
