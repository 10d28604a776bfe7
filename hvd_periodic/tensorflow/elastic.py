"""Elastic training: the state that is kept while ranks join and leave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import ElasticHorovod
from hvd_periodic.elastic.commits import Committable, CommittableOptimizer
from hvd_periodic.elastic.shards import FullCenter
from hvd_periodic.elastic.state import CommittedState, refuse_fixed, run
from hvd_periodic.tensorflow.center_optimizer import is_scheduled
from hvd_periodic.tensorflow.communicator import FRONT_END, communicator_of
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.hosted import original_errors
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer, levels_of
from hvd_periodic.tensorflow.optimizer_state import state_of
from hvd_periodic.tensorflow.resharding import first_outer, require_divisible, resharded
from hvd_periodic.tensorflow.settings import innermost
from hvd_periodic.tensorflow.stage import Stage
from hvd_periodic.tensorflow.synchronizer import Synchronizer

__all__ = ["State", "run"]


class State(CommittedState):
    """State of a job whose ranks change; under elastic Horovod, use it in place of ``hvd.elastic.KerasState``.

    When a rank is lost, its steps since its last commit are lost with it, but nothing of the center. The other ranks
    return to the newest commit that all of them hold, each with its own replica. A joining rank starts from the center,
    with the state of the center's optimizer, the counters, and the state of another rank's local optimizer, in which
    Keras counts the iterations of schedules. Everything that depends on the number of ranks is recomputed; compiled
    steps stay valid.

    ``"local"`` parameters, of the same names on all ranks, stay with their process, whose commits hold them, and so
    does the local optimizer's state of them; those of a rank that joins are what its model has.

    A commit is an in-memory copy of the whole state on every rank; each rank holds two. If the center lives on the root
    or in shards, every rank copies its shard with the state of the center's optimizer, and sends a backup to a rank on
    another host. Only if both are killed at once, the job cannot continue. Before ranks are removed, every rank gets
    the full center. When ranks change, shards get new variables, listed among the optimizer's. With
    ``commit="exchange"`` every exchange commits, in ``fit``, in compiled and in eager steps, and ``commit()`` need not
    be called: a lost rank loses at most one period.

        def train(state):
            model.fit(dataset, epochs=30 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

        model.compile(hvdp.ElasticAverageOptimizer(optimizer, model, 10), loss="mse", jit_compile=False)
        hvdp.elastic.run(train)(State(model, commit="exchange", epoch=0))

    Args:
        model: a built model.
        optimizer: an optimizer of this package over all ranks, which may wrap another one over groups of ranks given by
            a function; or any other optimizer, as in Horovod. Default: the optimizer with which the model is compiled.
        commit: ``"call"`` commits only when :meth:`commit` is called, the same number of times on all ranks;
            ``"exchange"`` also after every exchange of the first optimizer of this package, until a rank has finished.
        min_ranks: number of ranks below which nobody trains; for a rendezvous, as ``HVD_PERIODIC_RANKS``. Default: as
            there, else 1.
        max_ranks: number of ranks above which further workers wait until one leaves. Default: as there, else no limit.
        more: further state, available as attributes: models, optimizers, variables, synchronizers of this package,
            objects with ``state_dict()`` and ``load_state_dict()``, and plain objects, which all ranks take from one.

    Raises:
        TypeError: ``min_ranks`` or ``max_ranks`` is no int.
        ValueError: the model is not built; or the ranks of an optimizer cannot change, because it is asynchronous,
            wraps an ``hvd.DistributedOptimizer``, has a process set, or has ``center="sharded"`` with a center
            optimizer whose state per variable differs from it in shape; the environment has invalid settings of a
            rendezvous, or other numbers of ranks than the arguments; or these are given without a rendezvous.
        ImportError: there is neither a rendezvous nor Horovod; or a rendezvous and no PyTorch.

    References:
        Horovod's documentation, "Elastic Horovod". PyTorch's documentation, "Rendezvous".
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        commit: Literal["call", "exchange"] = "call",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **more: Any,
    ) -> None:
        if commit not in ("call", "exchange"):
            raise ValueError(f"`commit` must be 'call' or 'exchange'. Received: {commit!r}")
        if model is not None:
            optimizer = _built(model, optimizer)
        given = {"model": model, "optimizer": optimizer} | more
        self._tracked = {name: value for name, value in given.items() if _kept(value, set)}
        objects = {name: value for name, value in given.items() if name not in self._tracked}
        for name, value in self._tracked.items():
            for level in levels_of(value):
                _connect(level)
            averages = getattr(value, "gradient_group", None) is not None
            for kept in _kept(value, set):
                if isinstance(kept, CommittableOptimizer):
                    refuse_fixed(name, kept.synchronizer, averages)
        for each in self._exchanging().values():
            require_divisible(each.synchronizer)
        super().__init__(self._tracked, objects, FRONT_END.elastic_job(min_ranks, max_ranks), commit)
        if commit == "exchange":
            if not self._exchanging():
                raise ValueError("commit='exchange' needs an optimizer of hvd_periodic.tensorflow. Received none")
            self._commit_after_exchanges(next(iter(self._exchanging().values())).synchronizer)

    def _communicator(self) -> Communicator:
        """Return the current ranks."""
        return communicator_of(None)

    def sync(self) -> None:
        """Resume all ranks from the newest commit that all survivors hold, as in :class:`CommittedState`."""
        with self._lost_ranks():
            super().sync()

    def commit(self) -> None:
        """Commit everything; then interrupt training on all ranks if these are about to change."""
        with self._lost_ranks():
            super().commit()

    def check_host_updates(self) -> None:
        """Interrupt training on all ranks if these are about to change, as in :class:`CommittedState`."""
        with self._lost_ranks():
            super().check_host_updates()

    def original_errors(self) -> AbstractContextManager[None]:
        """Return a block in which errors of exchanges in compiled steps have their type."""
        return original_errors()

    @contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        """Raise failures of Horovod's collectives as the error that its ``run`` handles."""
        try:
            yield
        except tf.errors.UnknownError as error:
            if not isinstance(self.job, ElasticHorovod):
                raise
            from horovod.common.exceptions import HorovodInternalError

            raise HorovodInternalError(str(error)) from error

    def _commit_after_exchanges(self, synchronizer: VariableSynchronizer) -> None:
        """Commit after every exchange until a rank has finished, since it would not take part in the commit."""

        def commit() -> None:
            if synchronizer.handshake.everyone_trains:
                self.commit()

        synchronizer.after_exchange = commit
        variables = [kept for kept in self._all_kept().values() if isinstance(kept, _KeptVariables)]
        others = [kept.synchronizer for kept in self._exchanging().values() if kept.synchronizer is not synchronizer]
        synchronizer.read_by_callback = [variable for kept in variables for variable in kept.variables()]
        synchronizer.read_by_callback += [variable for other in others for variable in other.step_variables()]

    def _all_kept(self) -> dict[str, Committable]:
        """Return the committable object of everything, by name; of nested optimizers, the outermost first."""
        kept = {name: _kept(value, self._own) for name, value in self._tracked.items()}
        return {name + depth * ".inner": each for name, found in kept.items() for depth, each in enumerate(found)}

    def _own(self) -> set[int]:
        """Return the identities of the variables that optimizers of this package leave to each worker."""
        exchanging = [level.synchronizer for value in self._tracked.values() for level in levels_of(value)]
        exchanging += [value for value in self._tracked.values() if isinstance(value, Synchronizer)]
        return {id(variable) for each in exchanging for _, variable in each.replica.named.own}

    def _exchanging(self) -> dict[str, CommittableOptimizer]:
        return {name: kept for name, kept in self._all_kept().items() if isinstance(kept, CommittableOptimizer)}


class _KeptVariables(Committable):
    """Variables, as a committable object.

    Args:
        variables: returns the current variables, in the same order on all ranks.
        model: whether they are weights of a model, which every rank may have loaded on its own.
        own: returns the identities of those that stay with this worker.
    """

    def __init__(
        self,
        variables: Callable[[], Sequence[Any]],
        model: bool = False,
        own: Callable[[], Collection[int]] = set,
    ) -> None:
        self._variables, self._model, self._own = variables, model, own

    def variables(self) -> list[tf.Variable]:
        """Return the TensorFlow variables."""
        return [native(variable) for variable in self._variables()]

    def copied(self) -> Any:
        """Return copies as arrays."""
        return [np.array(variable.numpy()) for variable in self.variables()]

    def restore(self, copied: Any) -> None:
        """Assign the arrays."""
        for variable, value in zip(self.variables(), copied, strict=True):
            variable.assign(value)

    def begin(self, loaded: bool) -> None:
        """Take over the first rank's values, unless every rank may have loaded its own."""
        if not (loaded and self._model):
            self.broadcast_from(0)

    def broadcast_from(self, source: int) -> None:
        """Take over one rank's values, except those that stay with this worker."""
        own = self._own()
        shared = [variable for variable in self.variables() if id(variable) not in own]
        given = _of_rank([np.array(variable.numpy()) for variable in shared], source)
        for variable, value in zip(shared, given, strict=True):
            variable.assign(value)


class _KeptState(Committable):
    """An object with ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def copied(self) -> Any:
        """Return a copy of the state."""
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


class _KeptSynchronizer(CommittableOptimizer):
    """A synchronizer, with the local variables of the optimizer that it belongs to, if it does.

    Args:
        rates: returns the learning rates on which ranks must agree before they exchange.
        local: returns the other variables.
        own: returns the identities of those that stay with this worker.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        rates: Callable[[], Sequence[Any]],
        local: Callable[[], Sequence[Any]] = list,
        own: Callable[[], Collection[int]] = set,
    ) -> None:
        self._synchronizer, self._rates = synchronizer, _KeptVariables(rates)
        self._local = _KeptVariables(lambda: [*local(), *rates()], own=own)

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """The synchronizer that runs the exchanges."""
        return self._synchronizer

    def copied(self) -> Any:
        """Return the local state, and the part of the exchange state that this rank holds."""
        return self._local.copied(), self.own()

    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the exchange state."""
        exchanges: Mapping[str, Any] = copied[1]
        return exchanges

    def resharded(self, saved: Any) -> Any:
        """Return the state of the center's optimizer, resharded for the current ranks."""
        return resharded(saved, self.synchronizer)

    def completed(self, copied: Any, whole: FullCenter) -> Any:
        """Return the states, completed with the center."""
        local, exchanges = copied
        return local, whole.within(exchanges)

    def restore(self, copied: Any) -> None:
        """Load both states."""
        local, exchanges = copied
        self._local.restore(local)
        self.synchronizer.startup.begun = False  # Keeps loading local; ready() then compares what ranks have loaded.
        self.synchronizer.load_state_dict(exchanges)

    def begin(self, loaded: bool) -> None:
        """Start training; if a state was loaded, first take over the first rank's learning rates."""
        if loaded:
            self._rates.broadcast_from(0)
        self.synchronizer.start()

    def broadcast_from(self, source: int) -> None:
        """Take over the replica, center, counters and local optimizer of one rank."""
        self._rates.broadcast_from(source)
        self._local.broadcast_from(source)
        self.synchronizer.check_agreement()
        self.synchronizer.broadcast_from(source)

    def rejoin(self, name: str) -> None:
        """Switch to the current ranks with the same variables, except for those of a center shard."""
        self.synchronizer.rejoin(name)

    def ready(self) -> None:
        """Start training now, since a compiled step does not check."""
        self.synchronizer.begin()


def _of_rank(value: Any, rank: int = 0) -> Any:
    """Return one rank's value on all ranks."""
    return communicator_of(None).broadcast_object(value, "hvd_periodic.elastic", rank)


def _kept(value: Any, own: Callable[[], Collection[int]]) -> list[Committable]:
    """Return the committable objects of a value: one per nested optimizer, the outermost first; none for plain objects.

    They read variables and settings only when a copy is made, since these may have been replaced by then. ``own``
    returns the identities of parameters that stay with this worker.
    """
    levels = levels_of(value)
    if levels:
        return [_kept_level(level, own) for level in levels]
    if isinstance(value, Synchronizer):
        return [_KeptSynchronizer(value, lambda: _given_rates(value))]
    if isinstance(value, keras.Model):
        return [_KeptVariables(lambda: value.weights, model=True, own=own)]
    if isinstance(value, keras.optimizers.Optimizer):
        return [_KeptVariables(lambda: value.variables, own=lambda: _state_ids(value, own()))]
    if isinstance(value, (keras.Variable, tf.Variable)):
        return [_KeptVariables(lambda: [value], own=own)]
    if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return [_KeptState(value)]
    return []


def _kept_level(level: PeriodicOptimizer, own: Callable[[], Collection[int]]) -> Committable:
    """Return the committable object of an optimizer of this package; the innermost keeps the local optimizer."""
    synchronizer, inner = level.synchronizer, level.inner_optimizer

    def rates() -> list[Any]:
        local = innermost(inner)
        return [*([] if is_scheduled(local) else [local.learning_rate]), *_given_rates(synchronizer)]

    local: Callable[[], Sequence[Any]] = list if levels_of(inner) else lambda: inner.variables
    return _KeptSynchronizer(synchronizer, rates, local, lambda: _state_ids(inner, own()))


def _state_ids(optimizer: Any, owners: Collection[int]) -> set[int]:
    """Return the identities of what the local optimizer keeps of some variables, given by theirs."""
    return {id(variable) for variable in state_of(innermost(optimizer), owners)}


def _given_rates(synchronizer: VariableSynchronizer) -> list[Any]:
    """Return the learning rate of the center's optimizer if users may set it: joining ranks take it over."""
    outer = first_outer(synchronizer)
    rate = None if outer is None else outer.given_rate
    return [] if rate is None else [rate]


def _connect(optimizer: PeriodicOptimizer) -> None:
    """Connect a loaded optimizer to the ranks; communicates nothing.

    Raises:
        ValueError: it had other ranks when it was saved, or its rates do not allow so many ranks.
    """
    if optimizer.stage < Stage.STARTED:
        binding, synchronizer = optimizer._lifecycle.binding, optimizer.synchronizer
        binding.communicator = binding.ranks()
        optimizer._lifecycle.spec.check(binding, optimizer.gradient_group)
        synchronizer.join(binding.communicator, synchronizer.membership.requested_root, binding.name)


def _built(model: keras.Model, optimizer: Any) -> Any:
    """Return the optimizer, or the model's, after building it; raise a ValueError if the model is not built."""
    if not model.built:
        raise ValueError("The model is not built: give it its input shape with keras.Input, or call model.build()")
    found = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if found is not None and not found.built:
        found.build(model.trainable_variables)
    return found
