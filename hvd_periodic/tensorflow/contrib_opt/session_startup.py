"""The first step of a session that no hook has started: ranks compare their values and agree on a common start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.participation.rows import UntouchedRows
from hvd_periodic.sync.startup import LoadStatus, Start, decide, parameters_replaced
from hvd_periodic.tensorflow.contrib_opt.branches import (
    Assigned,
    TensorStore,
    branch,
    control_flow_v1,
    is_resource,
    nothing,
    value_of,
)
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter, can_be_sent
from hvd_periodic.tensorflow.contrib_opt.python_call import python_call, sent_from_root
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.tensorflow.contrib_opt.unexchanged import compared
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import on_host
from hvd_periodic.tensorflow.store import layout_of

logger = logging.getLogger("hvd_periodic")

ROOT = 0
"""The rank from whose values all ranks start."""

_WHAT_TO_MOVE = (
    "move the lines of tf.global_variables_initializer() and tf.local_variables_initializer(), and of "
    "hvd.broadcast_global_variables(), below minimize() or apply_gradients()"
)


def require_initialized(variable: Any, cls: str) -> tf.Operation:
    """Return the operation that fails if ``variable``, and so all variables of the optimizer, are not initialized."""
    message = (
        f"The variables that `{cls}` creates in minimize() or apply_gradients() are not initialized. An initializer "
        f"initializes what exists when it is built: {_WHAT_TO_MOVE}"
    )
    return tf.debugging.Assert(tf.compat.v1.is_variable_initialized(variable), [message])


def read_after(check: tf.Operation, variables: Iterable[Any]) -> None:
    """Make the existing read operation of each reference variable wait for a check.

    Otherwise TensorFlow's own error about an uninitialized variable would come first.
    """
    for variable in variables:
        if not is_resource(variable):
            variable.value().op._add_control_input(check)


def initialize_with(variables: Iterable[Any], made: Iterable[Any]) -> None:
    """Make earlier initializers of all ``variables`` also initialize the variables ``made`` after them.

    Scripts build their initializer before ``minimize()`` if the optimizer makes no variables there, such as gradient
    descent in Horovod's benchmark. An operation accepts control inputs until a session has run it; then this has no
    effect.
    """
    wanted, more = ({variable.initializer for variable in of} for of in (variables, made))
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if wanted and operation.type == "NoOp" and wanted <= (grouped := _grouped(operation)):
            operation._add_control_inputs(more - grouped)


def _grouped(operation: Any) -> set[Any]:
    """Return the operations that ``tf.group`` has grouped, by device if there are several."""
    inputs = set(operation.control_inputs)
    return inputs.union(*(one.control_inputs for one in inputs if one.type == "NoOp"))


class FirstStep:
    """Tells the graph whether a session has not begun training yet.

    Each session marks this itself, whatever checkpoint it has restored: the mark is in no collection, so that nothing
    saves, restores or initializes it.

    Args:
        local_steps: the counter of local steps; a session that initializes it again begins again.
    """

    def __init__(self, local_steps: tf.Variable) -> None:
        self._local_steps = local_steps
        self._steps: tf.Tensor | None = None
        with tf.compat.v1.name_scope(None), tf.device(None):
            self._mark = tf.compat.v1.Variable(
                True, trainable=False, collections=[], name=f"{local_steps.op.name}_begun", use_resource=True
            )

    def __call__(self) -> tf.Tensor:
        """Return whether this step is the first of the session."""
        initialized = tf.compat.v1.is_variable_initialized(self._mark)
        return tf.logical_or(tf.logical_not(initialized), tf.equal(self._local_steps.read_value(), 0))

    def finish(self) -> tf.Operation:
        """Return the operation that marks the first step as done."""
        return self._mark.assign(True)

    def steps_of_all(self, synchronize: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Return the local steps before this one; the first step asks ``synchronize``, which communicates."""
        if self._steps is None:
            with control_flow_v1():
                steps = self._local_steps.read_value()
                self._steps = tf.cond(self(), lambda: synchronize(steps), lambda: tf.identity(steps))
        return self._steps


class SessionStartup:
    """Starts all ranks together in the first step, when gradients exist already.

    It corresponds to :meth:`ReplicaSynchronizer.begin` in PyTorch and Keras. Like a broadcast of global variables, it
    covers all global variables, except the variables of other optimizers, which start separately.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        turn: Turn,
        getter: CustomGetter,
        own: Sequence[Any],
        first: FirstStep,
    ) -> None:
        self._synchronizer, self._turn = synchronizer, turn
        self._getter = getter
        self._first = first
        found = [variable for variable in getter.found() if not getter.is_anothers(variable)]
        trained = [variable for variable in found if variable.ref() in getter.centers]
        self._frozen = [v for v in found if can_be_sent(v) and v.trainable and v.ref() not in getter.centers]
        """Trainable, but not by this optimizer; by the time the session runs, another optimizer may train them."""
        others = {variable.ref() for variable in self._frozen}
        self._parameters = trained
        feedback = synchronizer.tensor_groups.parameters.error_feedback
        unsent = [store.tensors() for store in (feedback.residual, feedback.second_hop_residual) if store is not None]
        self._unsent = [variable for variables in unsent for variable in variables]
        """The error feedback of this rank, which no other rank takes over."""
        others |= {variable.ref() for variable in self._unsent}
        untouched = untouched_in(synchronizer)
        self._marks = [] if untouched is None else untouched.marks.tensors()
        """Of touched rows; a session does not know whose values since the last exchange a checkpoint has given it."""
        self._own = [v for v in (*own, *found) if can_be_sent(v) and v.ref() not in others]

    def replaced(self, start_centers: Callable[[], Assigned]) -> tf.Tensor:
        """Return whether the start makes this rank's gradients stale, so that it must skip the update.

        ``start_centers`` returns the operations that set the centers to the replicas.
        """

        def begin() -> tf.Tensor:
            getter = self._getter
            center = digest_of([value_of(center) for center in getter.centers.values()])
            replica = digest_of(
                [value_of(variable) for variable in (*self._parameters, *self._frozen)],
                lambda: [True] * len(self._parameters) + [not getter.is_anothers(v) for v in self._frozen],
            )
            from_root, from_parameters, replaced = self._compare(center, replica)
            given = tf.cond(from_root, branch(self._give), nothing)
            with tf.control_dependencies([given]):
                centered = tf.cond(from_parameters, branch(start_centers), nothing)
            with tf.control_dependencies([centered]):
                marked = [marks.assign(tf.ones_like(marks)) for marks in self._marks]
                finished = self._first.finish()
            with tf.control_dependencies([*marked, finished]):
                compare = compared(self._synchronizer, self._turn, Purpose.START)
            with tf.control_dependencies(compare):
                return tf.identity(replaced)

        with control_flow_v1():
            return tf.cond(self._first(), begin, nothing)

    def _compare(self, center: tf.Tensor, replica: tf.Tensor) -> list[tf.Tensor]:
        """Compare the digests of all ranks when the graph runs, as :meth:`ReplicaSynchronizer.begin` does.

        A rank has loaded a state if its local steps are not 0; it may have loaded the centers, too.

        Returns:
            Whether all ranks take over the root's values; whether the center is set to the parameters; whether the
            gradients of this rank belong to parameters that are replaced.
        """
        progress = self._synchronizer.progress

        def compare(center: np.ndarray, replica: np.ndarray) -> list[np.ndarray]:
            counters = progress.counters
            steps, exchanges = counters.local_steps, (counters.last_exchange, counters.next_exchange)
            status = LoadStatus(steps > 0, steps, exchanges, "", f"{center:014x}", f"{replica:014x}")
            with self._turn():
                self._synchronizer.handshake.meet(Purpose.START)
                return [np.array(self._decide(status))]

        values, stores = self._synchronizer.replica.values, [progress.store()]
        (decided,), _ = python_call(compare, values, stores, [center, replica], [tf.bool])
        return tf.unstack(tf.ensure_shape(decided, [3]))

    def _decide(self, own: LoadStatus) -> list[bool]:
        """Return the answers of :meth:`_compare`, given the status of this rank; collective."""
        membership = self._synchronizer.membership
        found = membership.all_ranks.gather((own, membership.in_groups), "start")
        statuses = {rank: status for rank, (status, _) in found.items()}
        root, rank = membership.global_root, membership.global_rank
        start = decide(statuses, root)  # The root also sends the state of the local optimizer.
        most = max(status.local_steps for status in statuses.values())
        averaged_until = self._synchronizer.warmup.until or 0
        averaging = any(in_groups for _, in_groups in found.values()) or most < averaged_until
        different = len({status.replica for status in statuses.values()}) > 1
        given = start is Start.FROM_ROOT or (start is Start.FROM_PARAMETERS and different)
        if given and rank == root:
            logger.warning("Ranks started with different values: all take over the values of rank %d", root)
        return [given, start is Start.FROM_PARAMETERS, parameters_replaced(start, statuses, rank, root, averaging)]

    def _give(self) -> Assigned:
        """Return the operations that give all ranks the root's values."""
        assigned = self._give_together(self._own, "start")
        given: list[Any] = assigned[-1:]
        assigned += [variable.assign(tf.zeros_like(variable)) for variable in self._unsent]
        free = on_host(lambda: [int(not self._getter.is_anothers(variable)) for variable in self._frozen])
        for i, variable in enumerate(self._frozen):

            def give(variable: Any = variable, name: str = f"start.{i}") -> Assigned:
                return self._give_together([variable], name)

            with tf.control_dependencies(given):  # Not all libraries match messages by their names.
                given = [tf.cond(free[i] > 0, branch(give), nothing)]
            assigned += given
        return assigned

    def _give_together(self, variables: Sequence[Any], name: str) -> Assigned:
        bucket_bytes = self._synchronizer.replica.bucket_bytes
        store = TensorStore(
            layout_of([(variable.op.name, variable) for variable in variables], bucket_bytes), variables
        )
        store.load_variables()
        values = [store.read(bucket) for bucket in store.layout.buckets]
        received = sent_from_root(values, name, self._synchronizer.membership.routes, self._turn)
        for bucket, value in zip(store.layout.buckets, received, strict=True):
            store.write(bucket, value)
        with tf.control_dependencies(store.tensors()):
            return store.assign()


def untouched_in(synchronizer: VariableSynchronizer) -> UntouchedRows[Any] | None:
    """Return what is known of the rows of tables that no gradient has reached; None except in elastic averaging."""
    return synchronizer.tensor_groups.parameters.error_feedback.untouched


def digest_of(tensors: Sequence[Any], chosen: Callable[[], Sequence[bool]] | None = None) -> tf.Tensor:
    """Return a digest of values, computed when the graph runs; equal values have equal digests.

    ``chosen`` returns which of the values to include; None: all.
    """

    def digest(*values: tf.Tensor) -> tf.Tensor:
        total = hashlib.sha256()
        for value, counts in zip(values, [True] * len(values) if chosen is None else chosen(), strict=True):
            total.update(value.numpy().tobytes() if counts else b"")
        return tf.constant(int.from_bytes(total.digest()[:7], "big"), tf.int64)

    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(digest, list(tensors), tf.int64), [])
