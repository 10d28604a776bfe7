"""The explicit synchronizer of TensorFlow variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Unpack

import keras
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import as_typed
from hvd_periodic.centers import placement_of
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.subset import require_possible
from hvd_periodic.keras.model import check_policy, described
from hvd_periodic.keras.options import ModelOptions
from hvd_periodic.options import of_exchange, takes
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from hvd_periodic.tensorflow.communicator import communicator_of
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import outside
from hvd_periodic.tensorflow.model import named_variables, untracked
from hvd_periodic.tensorflow.optimizer_state import KerasOptimizerState
from hvd_periodic.tensorflow.outer import KerasLearningRate, VariableOuterOptimizer
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.stage import Stage


class Synchronizer(VariableSynchronizer):
    """Exchanges variables with any algorithm and schedule, in any training loop.

    The optimizers of this package use one; it also works alone, eagerly and inside a ``tf.function``::

        synchronizer = Synchronizer(model, EASGD(beta=0.9), period=10)

        @tf.function
        def train_step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = synchronizer.prepare_gradients(gradients)   # needed for AGN, and for EASGD with rho > 0
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            synchronizer.step()                                     # once per iteration, on all ranks

        for images, labels in batches:
            train_step(images, labels)
        synchronizer.finalize()

    ``tf.train.Checkpoint(model=model, optimizer=optimizer, exchange=synchronizer.variables)`` saves all state that
    resuming bit for bit needs.

    Args:
        model: a built Keras model, to exchange all its trainable variables; or variables.
        algorithm: an :class:`~hvd_periodic.Algorithm`, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        optimizer: the local optimizer, for algorithms that read its learning rate.
        outer_optimizer: a Keras optimizer that nothing else uses, for algorithms that optimize the center.
        asynchronous: exchange with one center without waiting for other ranks; under MPI. Then, and with a ``quorum``,
            ``variables`` do not include the center: save :meth:`state_dict`.
        options: those of :class:`~hvd_periodic.options.Options` and
            :class:`~hvd_periodic.keras.options.ModelOptions`; the signature has their defaults.
            With ``center="root"`` or ``"sharded"``, ``variables`` hold this rank's shard: save one checkpoint per rank.

    Attributes:
        variables: counters, center and all other state, for checkpoints.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, or ranks that disagree. On every rank: if
            an argument was refused on one rank, the others raise a RuntimeError that cites its error.
        RuntimeError: Horovod is not initialized.
    """

    @takes(ModelOptions)
    def __init__(
        self,
        model: keras.Model | Iterable[Any],
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        asynchronous: bool = False,
        **options: Unpack[ModelOptions],
    ) -> None:
        communicator = communicator_of(options["process_set"])
        name = "alone" if communicator.elastic else communicator.unique_name(options["timeout_seconds"])
        self.variables: list[tf.Variable] = []
        self._stage = Stage.CREATED

        def build() -> None:
            owner = model if isinstance(model, keras.Model) else None
            check_policy(options["buffers"], owner)
            placement_of(options["center"])
            if owner is None and not isinstance(model, Iterable):
                raise TypeError(f"`model` must be a keras.Model, or variables. Received: {described(model)}")
            if owner is not None and not owner.built:
                raise ValueError("The model is not built: give it an input shape, or call it once")
            trained = model if owner is None else owner.trainable_variables
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            require_possible(communicator, options["center"], options["nonfinite"], asynchronous, options["overlap"])
            moving = made.outer_optimizer(None, outer_optimizer)
            moved = None if moving is None else CenterOptimizer(None, moving)
            named = named_variables(trained, owner, options["buffers"], options["parameters"])
            replica = VariableReplica(named, untracked)
            root = communicator.rank_of(options["root_rank"])
            super(Synchronizer, self).__init__(
                untracked,
                replica,
                made,
                as_schedule(period, as_typed("period")),
                communicator,
                root,
                name,
                asynchronous=asynchronous,
                outer=None if moved is None else VariableOuterOptimizer(moved, named.parameters, replica.values),
                rates=None if optimizer is None else KerasLearningRate(optimizer),
                local_optimizer=None if optimizer is None else KerasOptimizerState(optimizer, replica),
                **of_exchange(options),
            )
            self._moved = None if self.exchanger.worker is not None else moved
            self._list_variables()

        if communicator.elastic:  # Others may exist already: all ranks meet at the first step.
            build()
            return
        build_on_all(communicator, name, build)
        self._stage = Stage.STARTED
        self.start()

    def begin(self, call_point: CallPoint = CallPoint.BEFORE_UPDATE) -> bool:
        """Begin training, as every synchronizer does; under elastic Horovod, also meet the other ranks."""
        with outside():
            if self._stage < Stage.STARTED:
                communicator = self.membership.communicator
                self.join(communicator, self.membership.requested_root, communicator.unique_name())
                self.start()
        return super().begin(call_point)

    def on_joined(self) -> None:
        """List the present variables, after ranks have joined and start together."""
        self._stage = Stage.STARTED
        self._list_variables()

    def _list_variables(self) -> None:
        """Update ``variables`` in place, in an order that does not depend on which ranks there were before.

        The list stays the same object: a ``tf.train.Checkpoint`` of deleted variables refuses to save.
        """
        moving = [] if self._moved is None else [variable.value for variable in self._moved.variables]
        held, notes = self.held(), len(self.progress.note_variables)
        kept = len(held) - notes
        self.variables[:] = [*held[:kept], *moving, *held[kept:]]  # Notes last: checkpoints of version 0.1 have none.
