"""Training that outlives its workers: what ``hvd.elastic.run`` keeps while ranks come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError

from hvd_periodic.comm.base import Communicator
from hvd_periodic.elastic.commits import Commits, Committable, CommittableOptimizer, CommittedState, refuse_fixed
from hvd_periodic.elastic.shards import FullCenter
from hvd_periodic.tensorflow.center_optimizer import is_scheduled
from hvd_periodic.tensorflow.communicator import communicator_of
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer
from hvd_periodic.tensorflow.resharding import require_divisible, resharded
from hvd_periodic.tensorflow.settings import innermost
from hvd_periodic.tensorflow.stage import Stage
from hvd_periodic.tensorflow.synchronizer import Synchronizer


class State(CommittedState, ObjectState):
    """What is kept of a job whose ranks change, in place of ``hvd.elastic.KerasState`` and ``TensorFlowKerasState``.

    A rank that was lost takes the steps since its last commit with it, and nothing of the center's. The others go back
    to the newest commit that all of them hold: replicas stay what they were, each its own. A rank that joins starts
    from the center, with the state of its optimizer and the counters, and with the state of one of the other local
    optimizers, in which Keras counts the iterations of schedules. Everything that depends on the number of ranks is
    computed anew; steps that were compiled stay.

    A commit is a copy in memory of all that is kept, on every rank; each rank holds two. Of a center that lives on the
    root or in shards, every rank copies its share, with the state of the center's optimizer, and gives a copy of it to
    a rank of another host; only if both are killed at once, the job cannot go on. Before ranks are removed, every rank
    gets the whole center.
    Where ranks change, shares have new variables, among those of the optimizer. With ``commit="exchange"``
    every exchange is one, in ``fit``, in compiled and in eager steps, and ``commit()`` need not be called: what a lost
    rank takes with it is one period.

        def train(state):
            model.fit(dataset, epochs=30 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

        model.compile(hvdp.ElasticAverageOptimizer(optimizer, model, 10), loss="mse", jit_compile=False)
        hvd.elastic.run(train)(State(model, commit="exchange", epoch=0))

    Args:
        model: a built model.
        optimizer: of this package, over all ranks, perhaps around another one of groups of ranks that a function
            returns; or any other, as in Horovod. Default: the one that the model is compiled with.
        commit: ``"call"``: when :meth:`commit` is called, the same number of times on all ranks; ``"exchange"``: after
            every exchange of the first optimizer of this package as well, until the first rank is at its end.
        more: what else is kept: models, optimizers, variables, synchronizers of this package, all that has
            ``state_dict()`` and ``load_state_dict()``, and plain objects, which all ranks take from one of them. They
            become attributes.

    Raises:
        ValueError: a model that is not built; or an optimizer whose ranks cannot change: asynchronous, around an
            ``hvd.DistributedOptimizer``, or with a process set; or with ``center="sharded"``, if its center's optimizer
            keeps anything of variables in another shape than theirs.

    References:
        Horovod's documentation, "Elastic Horovod".
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        commit: Literal["call", "exchange"] = "call",
        **more: Any,
    ) -> None:
        if commit not in ("call", "exchange"):
            raise ValueError(f"`commit` must be 'call' or 'exchange'. Received: {commit!r}")
        if model is not None:
            optimizer = _built(model, optimizer)
        given = {"model": model, "optimizer": optimizer} | more
        self._tracked = {name: value for name, value in given.items() if _kept(value)}
        objects = {name: value for name, value in given.items() if name not in self._tracked}
        for name, value in self._tracked.items():
            for level in _levels(value):
                _connect(level)
            averages = getattr(value, "gradient_group", None) is not None
            for kept in _kept(value):
                if isinstance(kept, CommittableOptimizer):
                    refuse_fixed(name, kept.synchronizer, averages)
        for each in self._exchanging().values():
            require_divisible(each.synchronizer)
        for name, value in self._tracked.items():
            setattr(self, name, value)
        super().__init__(bcast_object=_of_rank, get_rank=hvd.rank, **objects)
        self.commits = Commits(self._all_kept)
        if commit == "exchange":
            if not self._exchanging():
                raise ValueError("commit='exchange' needs an optimizer of hvd_periodic.tensorflow. Received none")
            self._commit_after_exchanges(next(iter(self._exchanging().values())).synchronizer)

    def _communicator(self) -> Communicator:
        """Return the ranks that there are now."""
        return communicator_of(None)

    def sync(self) -> None:
        """Let all ranks go on from the newest commit of those that have one, as every such state does."""
        with _lost_ranks():
            super().sync()

    def commit(self) -> None:
        """Keep a copy of everything; let all ranks begin anew where hosts were added or removed."""
        with _lost_ranks():
            super().commit()

    def check_host_updates(self) -> None:
        """Interrupt training on all ranks where hosts were added or removed, as every such state does."""
        with _lost_ranks():
            super().check_host_updates()

    def _commit_after_exchanges(self, synchronizer: VariableSynchronizer) -> None:
        """Commit after every exchange, as long as nobody is at the end, where not all ranks come by here."""

        def commit() -> None:
            if synchronizer.handshake.everyone_trains:
                self.commit()

        synchronizer.after_exchange = commit
        variables = [kept for kept in self._all_kept().values() if isinstance(kept, _KeptVariables)]
        others = [kept.synchronizer for kept in self._exchanging().values() if kept.synchronizer is not synchronizer]
        synchronizer.watched = [variable for kept in variables for variable in kept.variables()]
        synchronizer.watched += [variable for other in others for variable in other.seen()]

    def _all_kept(self) -> dict[str, Committable]:
        """Return how everything is kept; of optimizers in one another, the outermost first."""
        kept = {name: _kept(value) for name, value in self._tracked.items()}
        return {name + depth * ".inner": each for name, found in kept.items() for depth, each in enumerate(found)}

    def _exchanging(self) -> dict[str, CommittableOptimizer]:
        return {name: kept for name, kept in self._all_kept().items() if isinstance(kept, CommittableOptimizer)}


class _KeptVariables(Committable):
    """Variables.

    Args:
        variables: returns those that there are, in the same order on all ranks.
        model: they are weights of a model, of which every rank may have loaded its own.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]], model: bool = False) -> None:
        self._variables, self._model = variables, model

    def variables(self) -> list[tf.Variable]:
        """Return them as TensorFlow knows them."""
        return [native(variable) for variable in self._variables()]

    def copied(self) -> Any:
        """Return arrays."""
        return [np.array(variable.numpy()) for variable in self.variables()]

    def restore(self, copied: Any) -> None:
        """Assign them."""
        for variable, value in zip(self.variables(), copied, strict=True):
            variable.assign(value)

    def begin(self, loaded: bool) -> None:
        """Take those of the first rank, where not every rank has its own."""
        if not (loaded and self._model):
            self.take_from(0)

    def take_from(self, giver: int) -> None:
        """Take those of one rank."""
        self.restore(_of_rank(self.copied(), giver))


class _KeptState(Committable):
    """What has ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def copied(self) -> Any:
        """Return a copy of its state."""
        return copy.deepcopy(self.value.state_dict())

    def restore(self, copied: Any) -> None:
        """Load a copy of the copy."""
        self.value.load_state_dict(copy.deepcopy(copied))

    def begin(self, loaded: bool) -> None:
        """Take what the first rank has."""
        self.take_from(0)

    def take_from(self, giver: int) -> None:
        """Take what one rank has."""
        self.value.load_state_dict(_of_rank(self.value.state_dict(), giver))


class _KeptSynchronizer(CommittableOptimizer):
    """Exchanges, with variables of optimizers where these are part of one of this package.

    Args:
        synchronizer: runs the exchanges.
        rates: the learning rates on which ranks have to agree before they exchange.
        local: returns the other variables.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        rates: Callable[[], Sequence[Any]],
        local: Callable[[], Sequence[Any]] = list,
    ) -> None:
        self._synchronizer, self._rates = synchronizer, _KeptVariables(rates)
        self._local = _KeptVariables(lambda: [*local(), *rates()])

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """What runs the exchanges."""
        return self._synchronizer

    def copied(self) -> Any:
        """Return both states; of that of exchanges, what this rank has of it by itself."""
        return self._local.copied(), self.own()

    def exchanges_in(self, copied: Any) -> Mapping[str, Any]:
        """Return the state of the exchanges."""
        exchanges: Mapping[str, Any] = copied[1]
        return exchanges

    def resharded(self, saved: Any) -> Any:
        """Return the state of the center's optimizer, cut for the ranks that there are now."""
        return resharded(saved, self.synchronizer)

    def completed(self, copied: Any, whole: FullCenter) -> Any:
        """Return the states with the center."""
        local, exchanges = copied
        return local, whole.within(exchanges)

    def restore(self, copied: Any) -> None:
        """Load both."""
        local, exchanges = copied
        self._local.restore(local)
        self.synchronizer.startup.begun = False  # Who has what comes out in ready(): loading is local then.
        self.synchronizer.load_state_dict(exchanges)

    def begin(self, loaded: bool) -> None:
        """Start, or find out who has loaded what: of the root alone, all take the learning rates before."""
        if loaded:
            self._rates.take_from(0)
        self.synchronizer.start()

    def take_from(self, giver: int) -> None:
        """Take replica, center, counters and local optimizer of one rank."""
        self._rates.take_from(giver)
        self._local.take_from(giver)
        self.synchronizer.check_agreement()
        self.synchronizer.take_from(giver)

    def rejoin(self, name: str) -> None:
        """Go on with the same variables, but for those of a share of the center."""
        self.synchronizer.rejoin(name)

    def ready(self) -> None:
        """Begin now: a compiled step does not ask."""
        self.synchronizer.begin()


def _of_rank(value: Any, rank: int = 0) -> Any:
    """Return the value that one rank has, on all."""
    return communicator_of(None).broadcast_object(value, "hvd_periodic.elastic", rank)


def _kept(value: Any) -> list[Committable]:
    """Return how something is kept: of optimizers in one another each, the outermost first; of plain objects nothing.

    What is read when a copy is made may have been replaced since.
    """
    levels = _levels(value)
    if levels:
        return [_kept_level(level) for level in levels]
    if isinstance(value, Synchronizer):
        return [_KeptSynchronizer(value, lambda: _given_rates(value))]
    if isinstance(value, keras.Model):
        return [_KeptVariables(lambda: value.weights, model=True)]
    if isinstance(value, keras.optimizers.Optimizer):
        return [_KeptVariables(lambda: value.variables)]
    if isinstance(value, (keras.Variable, tf.Variable)):
        return [_KeptVariables(lambda: [value])]
    if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return [_KeptState(value)]
    return []


def _kept_level(level: PeriodicOptimizer) -> Committable:
    """Return how an optimizer of this package is kept; the local one is that of the innermost."""
    synchronizer, inner = level.synchronizer, level.inner_optimizer

    def rates() -> list[Any]:
        local = innermost(inner)
        return [*([] if is_scheduled(local) else [local.learning_rate]), *_given_rates(synchronizer)]

    local: Callable[[], Sequence[Any]] = list if _levels(inner) else lambda: inner.variables
    return _KeptSynchronizer(synchronizer, rates, local)


def _levels(value: Any) -> list[PeriodicOptimizer]:
    """Return an optimizer of this package, and those inside of it."""
    return [value, *_levels(value.inner_optimizer)] if isinstance(value, PeriodicOptimizer) else []


def _given_rates(synchronizer: VariableSynchronizer) -> list[Any]:
    """Return the learning rate of the center's optimizer, where users may set it: ranks that join take it over."""
    outer: Any = synchronizer.exchanged.outer
    rate = None if outer is None else outer.given_rate
    return [] if rate is None else [rate]


def _connect(optimizer: PeriodicOptimizer) -> None:
    """Let an optimizer that was loaded know of the ranks; communicates nothing.

    Raises:
        ValueError: it had other ranks when it was saved, or too many for its rates.
    """
    if optimizer.stage < Stage.STARTED:
        binding, synchronizer = optimizer._lifecycle.binding, optimizer.synchronizer
        binding.communicator = binding.ranks()
        optimizer._lifecycle.spec.check(binding, optimizer.gradient_group)
        synchronizer.join(binding.communicator, synchronizer.membership.asked_root, binding.name)


def _built(model: keras.Model, optimizer: Any) -> Any:
    """Return the optimizer, or that of the model, with all its variables.

    Raises:
        ValueError: the model has no variables yet.
    """
    if not model.built:
        raise ValueError("The model is not built: give it its input shape by keras.Input, or call model.build()")
    found = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if found is not None and not found.built:
        found.build(model.trainable_variables)
    return found


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Say of collectives that fail what hvd.elastic.run waits for."""
    try:
        yield
    except tf.errors.UnknownError as error:
        raise HorovodInternalError(str(error)) from error
