"""A synchronizer whose steps and exchanges work inside compiled functions and TensorFlow 1 graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.adoption import Successor
from hvd_periodic.sync.handshake import Weight
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.sync.synchronizer import Exchangers, ReplicaSynchronizer
from hvd_periodic.tensorflow.communicator import as_elastic_jobs_heed, communicator_of
from hvd_periodic.tensorflow.host import in_session, outside
from hvd_periodic.tensorflow.hosted import hosted
from hvd_periodic.tensorflow.optimizer_state import KerasOptimizerState
from hvd_periodic.tensorflow.outer import FollowsRate
from hvd_periodic.tensorflow.private import compiles_with_xla
from hvd_periodic.tensorflow.progress import NewVariable, VariableProgress
from hvd_periodic.tensorflow.reading import GraphGradients, VariableCenterReader, VariableCheckpoint
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.resharding import resharded
from hvd_periodic.vectors.store import Store


class VariableSynchronizer(ReplicaSynchronizer[Any]):
    """The synchronizer of the core, with its counters in variables.

    Outside graphs it behaves like the core's. In a compiled function, :meth:`step` counts and compares, and waits for
    Python when an exchange is due. In a TensorFlow 1 graph, a branch of the graph waits for Python, which exchanges.

    Args:
        new_variable: creates the variables of the counters.
        replica: the variables of this rank.
        arguments, options: those of :class:`~hvd_periodic.sync.synchronizer.ReplicaSynchronizer`.
        learning_rate: returns the learning rate of the local optimizer, as a number or a tensor of the current graph.

    Attributes:
        after_exchange: called at the end of every step with an exchange.
        read_by_callback: variables that ``after_exchange`` reads.
    """

    replica: Any
    progress: VariableProgress
    center_reader: VariableCenterReader
    checkpoint: VariableCheckpoint
    gradients_type = GraphGradients
    checkpoint_type = VariableCheckpoint
    center_reader_type = VariableCenterReader
    cuts_tensors = False
    after_exchange: Callable[[], object] | None = None

    def __init__(
        self,
        new_variable: NewVariable,
        replica: VariableReplica,
        *arguments: Any,
        learning_rate: Callable[[], Any] | None = None,
        exchangers: Exchangers = Exchangers(),  # noqa: B008
        **options: Any,
    ) -> None:
        self.exchangers = exchangers
        self._new_variable, self._rate, self._lands = new_variable, learning_rate, options.get("overlap", 0) != 0
        self._weighs_work = Weight(options.get("weight")).by_work
        self._values = replica.values
        super().__init__(replica, *arguments, **options)
        self.read_by_callback: list[tf.Variable] = []
        self._local: KerasOptimizerState | None = options.get("local_optimizer")
        alone = self.exchanger.worker is not None
        self.replica.refuse_constraints(self.tensor_groups.parameters.center.layout, alone)
        follower, self._share = self.exchanged.hyperparameters, None
        for each in follower.parts if isinstance(follower, PerFragmentOptimizer) else [follower]:
            if isinstance(each, FollowsRate) and not alone:
                each.maximum = self._maximum
        if self.exchanger.reads_together and not in_session():  # In a session, a rank has the whole center or none.
            self._share = new_variable("share", (2,), tf.int64, np.array(self.place))
            self.handshake.checks.append(self._share_problem)
            self.center_reader.share_problem = self._share_problem
        self.progress.make_notes()

    def new_progress(self, schedule: Schedule) -> VariableProgress:
        """Return counters in variables."""
        of_replica = self._values, self._lands, self.replica.present
        return VariableProgress(self._new_variable, schedule, self._rate, *of_replica, self._weighs_work)

    def construct(self, replica: Any, **arguments: Any) -> None:
        """Construct this object again, for another replica, with other variables."""
        read = self.read_by_callback
        options = {"learning_rate": self._rate, "exchangers": self.exchangers, **arguments}
        VariableSynchronizer.__init__(self, self._new_variable, replica, **options)
        self.read_by_callback = read

    def adopt(self, successor: Callable[[], Successor[Any]]) -> None:
        """Go on with another set of variables, as in the core; steps compiled before raise an error from now on."""
        former = self.center_reader
        super().adopt(successor)
        former.retire()

    def join(self, communicator: Communicator, root: int, name: str) -> None:
        """Join these ranks in place of the previous ones, under this prefix of names; does not communicate."""
        communicator.tracker.limit(self.membership.communicator.tracker.timeout)
        self.membership.join(communicator, root, name)
        self.exchanger.join()
        self.on_joined()

    def on_joined(self) -> None:
        """React to variables that may have been replaced; for subclasses."""

    def on_arrival(self) -> None:
        """Start training on a rank that has not taken a step; for subclasses."""

    def held(self) -> list[tf.Variable]:
        """Return the present variables in the order of construction, notes last."""
        groups, progress = self.tensor_groups, self.progress
        stores = [
            store
            for group in groups
            for store in (*group.vectors.values(), *group.error_feedback.stores().values(), group.total)
        ]
        found = [*progress.variables.values(), *(v for store in stores if store is not None for v in store.tensors())]
        found += [*([] if self._share is None else [self._share]), *progress.note_variables.values()]
        return list({id(variable): variable for variable in found}.values())

    def rejoin(self, name: str) -> None:
        """Join the present ranks of an elastic job, keeping the present variables; does not communicate.

        Compiled steps remain valid: Python runs their exchanges, with the present variables. If this rank now holds
        another shard of the center, the shard gets new variables, which are zeros until their values are set, unless a
        state was loaded before training began.

        Raises:
            ValueError: hyper-parameters that are invalid for this number of ranks.
        """
        communicator = self.membership.communicator.rebuild(communicator_of(None))
        self.algorithm.check(communicator.size)
        loaded, checkpoint = self.checkpoint.state, self.checkpoint
        cut_for_others = not self.begun and checkpoint.has_loaded() and loaded is None
        self.join(communicator, self.membership.requested_root, name)
        self.replica.refuse_constraints(self.tensor_groups.parameters.center.layout, asynchronous=False)
        self.handshake.rejoin()
        self.startup.begun = False
        if self._share is not None and not cut_for_others:
            self._share.assign(self.place)
        if loaded is not None:
            self.load_state_dict({**loaded, "center_optimizer": resharded(loaded["center_optimizer"], self)})

    def broadcast_from(self, source: int) -> None:
        """Take over the state of one rank, as :meth:`broadcast` does from the root; call :meth:`begin` afterwards."""
        self.startup.broadcast_from(source)
        self.startup.begun = False

    def begin(self, call_point: CallPoint = CallPoint.BEFORE_UPDATE) -> bool:
        """Begin training, as in the core; in a TensorFlow 1 graph, an operation of the session does."""
        if self.begun or in_session():
            return False
        with outside():
            self.checkpoint.adopt()
            return super().begin(call_point)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict()``, as in the core.

        Once training has begun, all ranks have to load, and compare their states now: compiled steps do not.
        """
        begun = self.begun
        super().load_state_dict(state)
        if self._share is not None:
            self._share.assign(self.place)
        if begun:
            self.begin()

    def sync(self) -> None:
        """Exchange now, on all ranks, whatever the schedule says; as in the core."""
        self.on_arrival()
        if tf.executing_eagerly():
            super().sync()
            return
        refuse_xla()
        self.center_reader.require_outside_center_block("sync")
        self.begin(CallPoint.AFTER_UPDATE)
        self._in_python(self._exchange_now)()

    def leave(self) -> None:
        """Leave training: exchange what is left, so that all ranks end with the same center; as in the core."""
        self.on_arrival()
        super().leave()

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center in the variables inside the block, where steps raise, including steps compiled before.

        Raises:
            RuntimeError: blocks are nested; or another rank's shard of the center was loaded, on all ranks.
        """
        with super().center():
            yield

    @tf.autograph.experimental.do_not_convert
    def prepare_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Pass local gradients to the algorithm; return the gradients to apply. Call it before every local update.

        EASGD with ρ > 0 adds its elastic term, AGN accumulates the gradients, other algorithms do nothing. Gradients
        may be ``tf.IndexedSlices``; the elastic term is dense.

        Args:
            gradients: one per parameter, in the order of parameters; None for no gradient.

        Raises:
            RuntimeError: called inside ``center()``.
            ValueError: the numbers of gradients and parameters differ.
        """
        trained = self.replica.trained
        if len(gradients) != trained:
            raise ValueError(f"{trained} parameters take as many gradients. Received: {len(gradients)}")
        self.replica.gradients = list(gradients)
        self.replica.with_gradients.update(i for i, gradient in enumerate(gradients) if gradient is not None)
        super().prepare_gradients()
        prepared: list[Any] = self.replica.gradients
        self.replica.gradients = [None] * trained
        return prepared

    @tf.autograph.experimental.do_not_convert
    def step(self, updated: Any = True, examples: Any = None) -> Any:
        """Count one iteration and exchange if one is due; call it after every iteration, on all ranks.

        Args:
            updated: whether the local update ran; a bool or a boolean scalar.
            examples: the number of examples of the update, or tokens, for ``weight="examples"``; a number or a scalar.
                Ignored without update.

        Returns:
            Whether an exchange took place: a bool; in a graph, a boolean scalar.

        Raises:
            RuntimeError: as in the core; in a graph, a ``tf.errors.OpError`` that cites it.
            TypeError, ValueError: ``examples`` is not a number of at least 0, which in a graph is an error at the next
                exchange; or XLA compilation.
        """
        if tf.executing_eagerly():
            self.membership.require_same_ranks()
            exchanged = super().step(updated, examples)
            if exchanged and self.after_exchange is not None:
                self.after_exchange()
            return exchanged
        refuse_xla()
        self.center_reader.require_outside_center_block("step")
        self.gradients.check(updated is not False)
        self.begin()  # The step being compiled has not run yet.
        if examples is not None:
            self.progress.work(examples, updated)
        due = self.count(updated)
        if self.warmup.until is not None:
            self._in_python(self.restart_center)(tf.equal(self.steps_to_switch(), 0))
        exchange, is_landing_due = self._in_python(self._exchange_or_land), self.progress.is_landing_due
        if is_landing_due is False:
            return exchange(due)
        with tf.control_dependencies([exchange(tf.logical_or(due, is_landing_due))]):
            return tf.identity(due)

    def count(self, updated: Any = True) -> Any:
        """Count one iteration in a graph; return whether an exchange is due then, as a boolean scalar."""
        with tf.control_dependencies(self.center_reader.checks()):
            return self.progress.count(updated)

    def steps_to_switch(self) -> tf.Tensor:
        """Return, in a graph, for how many more local steps gradients are averaged over the ranks that exchange."""
        return self.progress.steps_to(self.warmup.until or 0)

    def _in_python(self, run: Callable[[], object]) -> Callable[..., tf.Tensor]:
        """Return a function with which a graph runs Python code and waits for it, as :func:`hosted` does."""
        if self.membership.communicator.elastic:
            run = as_elastic_jobs_heed(run)
        return hosted(run, self.replica.values, *self._hosted_variables())

    def _exchange_or_land(self) -> None:
        """Exchange, or apply the exchange in flight to the replica, for a compiled step."""
        if self.progress.is_due:
            self._exchange_now()
        else:
            self.land()

    def _exchange_now(self) -> None:
        """Exchange with the present ranks, for a compiled step."""
        self.membership.require_same_ranks()
        self.center_reader.require_outside_center_block("step")
        self.exchanger.exchange()
        if self.after_exchange is not None:
            self.replica.values.release()
            self.after_exchange()

    def step_variables(self) -> list[tf.Variable]:
        """Return the variables of steps that exchanges or :attr:`after_exchange` may read or assign."""
        stores, others = self._hosted_variables()
        found = [*(variable for store in stores for variable in store.tensors()), *others]
        return list({id(variable): variable for variable in found}.values())

    def stores(self, of_center: bool = True) -> list[Store[Any]]:
        """Return all variables that exchanges read or write, except the variables of local and outer optimizers.

        Without ``of_center``, leave out the center and others that depend on the number of ranks.
        """
        found = [self.progress.store()]
        for group in self.tensor_groups:
            found += [group.values, *group.worker.values()]
            if of_center:
                more = [] if group.total is None else [group.total]
                found += [*group.center_state.values(), *more, *group.error_feedback.stores().values()]
        return list({id(store): store for store in found}.values())

    def _hosted_variables(self) -> tuple[list[Store[Any]], list[tf.Variable]]:
        """Return ``stores`` and ``others`` of :func:`hosted` for an exchange of a compiled step.

        In an elastic job, the variables of the center may be replaced later, so Python reads and assigns them directly.
        """
        replica = self.replica
        counters, *stores = self.stores(of_center=not self.membership.communicator.elastic)
        others = [*([] if replica.constants is None else replica.constants.tensors()), *self.read_by_callback]
        if self._local is not None:
            if self.exchanger.context.optimizer_state is not None or self.exchanger.finite.skips:
                stores += self._local.stores()
            state = self._local.variables()
            others += state if self.after_exchange is not None else [v for v in state if v.shape.rank == 0]
        if not replica.in_host_memory:
            others += [variable for store in stores for variable in store.tensors()]
            stores = []
        return [counters, *{id(store): store for store in stores}.values()], others

    def _maximum(self, value: Any) -> Any:
        """Return the maximum of a scalar over all ranks."""
        array = np.array(value).reshape(1)
        name = f"{self.membership.name}.maximum.{array.dtype.name}"
        return tf.constant(self.membership.communicator.allreduce(array, name, op="max")()[0])

    @property
    def place(self) -> list[int]:
        """This rank's number, and the number of ranks that exchange."""
        return [self.membership.communicator.rank, self.membership.communicator.size]

    def _share_problem(self) -> str | None:
        """Return an error text if another rank's shard of the center was loaded, which may have the same shape."""
        if self._share is None or (saved := self._share.numpy().tolist()) == self.place:
            return None
        return (
            f"The state loaded on rank {self.place[0]} of {self.place[1]} was saved by rank {saved[0]} of "
            f"{saved[1]}, which held another part of the center: save and load a file per rank, on as many ranks"
        )


def refuse_xla() -> None:
    """Raise a ValueError if XLA compiles, since it has no Horovod collectives."""
    if compiles_with_xla():
        raise ValueError(
            "Exchanges cannot be compiled by XLA, which has no Horovod collectives: pass jit_compile=False to "
            "model.compile(), or to the tf.function that applies the gradients"
        )
