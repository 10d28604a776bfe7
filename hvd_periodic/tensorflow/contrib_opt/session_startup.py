"""The first step of a session that no hook has started: ranks compare their values and agree on a common start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.sync.startup import LoadStatus, Start, decide, parameters_replaced
from hvd_periodic.tensorflow.contrib_opt.branches import (
    Assigned,
    TensorStore,
    branch,
    control_flow_v1,
    is_resource,
    value_of,
)
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter, can_be_sent
from hvd_periodic.tensorflow.contrib_opt.python_call import python_call
from hvd_periodic.tensorflow.contrib_opt.turns import SessionTurn
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import on_host
from hvd_periodic.tensorflow.store import layout_of

logger = logging.getLogger("hvd_periodic")

ROOT = 0
"""The rank whose values all start from."""

_WHAT_TO_MOVE = (
    "move the lines of tf.global_variables_initializer() and tf.local_variables_initializer(), and of "
    "hvd.broadcast_global_variables(), below minimize() or apply_gradients()"
)


def require_initialized(variable: Any, cls: str) -> tf.Operation:
    """Return the operation that fails where the variables of an optimizer, this one among them, are not initialized."""
    message = (
        f"The variables that `{cls}` creates in minimize() or apply_gradients() are not initialized. An initializer "
        f"initializes what exists when it is built: {_WHAT_TO_MOVE}"
    )
    with tf.control_dependencies(None):  # An init op that waits for it must not need what a training step is fed.
        return tf.debugging.Assert(tf.compat.v1.is_variable_initialized(variable), [message])


def read_after(check: tf.Operation, variables: Iterable[Any]) -> None:
    """Let the values of reference variables, which one operation each that exists already reads, wait for a check.

    Where they have none, TensorFlow's own error would come first.
    """
    for variable in variables:
        if not is_resource(variable):
            variable.value().op._add_control_input(check)


def initialize_with(variables: Iterable[Any], made: Iterable[Any]) -> None:
    """Let the initializers of all of these variables, which were built before others were made, initialize those too.

    Scripts build theirs before ``minimize()`` where the optimizer makes nothing there, as gradient descent in Horovod's
    benchmark. An operation can wait for more until a session has run it; afterwards this changes nothing.
    """
    wanted, more = ({variable.initializer for variable in of} for of in (variables, made))
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if wanted and operation.type == "NoOp" and wanted <= (grouped := _grouped(operation)):
            operation._add_control_inputs(more - grouped)


def _grouped(operation: Any) -> set[Any]:
    """Return what ``tf.group`` has grouped: by device, if there are several."""
    inputs = set(operation.control_inputs)
    return inputs.union(*(one.control_inputs for one in inputs if one.type == "NoOp"))


class FirstStep:
    """Knows in the graph whether a session has yet to begin training.

    Each session has to find out by itself, whatever checkpoint it has restored: the mark is in no collection, so that
    nothing saves, restores or initializes it.

    Args:
        local_steps: counts them; a session that initializes it again begins again.
    """

    def __init__(self, local_steps: tf.Variable) -> None:
        self._local_steps = local_steps
        self._steps: tf.Tensor | None = None
        with tf.compat.v1.name_scope(None), tf.device(None):
            self._mark = tf.compat.v1.Variable(
                True, trainable=False, collections=[], name=f"{local_steps.op.name}_begun", use_resource=True
            )

    def __call__(self) -> tf.Tensor:
        """Return whether this step is the first."""
        initialized = tf.compat.v1.is_variable_initialized(self._mark)
        return tf.logical_or(tf.logical_not(initialized), tf.equal(self._local_steps.read_value(), 0))

    def finish(self) -> tf.Operation:
        """Remember that training has begun."""
        return self._mark.assign(True)

    def steps_of_all(self, synchronize: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Return the local steps before this one; at the first step what ``synchronize``, which communicates, says."""
        if self._steps is None:
            with control_flow_v1():
                steps = self._local_steps.read_value()
                self._steps = tf.cond(self(), lambda: synchronize(steps), lambda: tf.identity(steps))
        return self._steps


class SessionStartup:
    """Lets all ranks begin together, in the first step, with the gradients that they have by then.

    What :meth:`ReplicaSynchronizer.begin` is to PyTorch and Keras. The root's values are those of all global variables
    that there are, as a broadcast of them gives, but for what belongs to other optimizers, which begin by themselves.

    Args:
        synchronizer: knows the other ranks.
        turn: waits until all ranks begin with this optimizer.
        getter: knows the replicas, and what belongs to optimizers.
        own: the variables of this optimizer.
        first: whether it is the first step.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        turn: SessionTurn,
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
        """Trainable, but not by this optimizer; when the session runs, another may be known that trains them."""
        others = {variable.ref() for variable in self._frozen}
        self._parameters = trained
        feedback = synchronizer.tensor_groups.parameters.error_feedback
        unsent = [store.tensors() for store in (feedback.residual, feedback.second_hop_residual) if store is not None]
        self._unsent = [variable for variables in unsent for variable in variables]
        """What a rank has not sent, which is no other's."""
        others |= {variable.ref() for variable in self._unsent}
        self._own = [v for v in (*own, *found) if can_be_sent(v) and v.ref() not in others]

    def replaced(self, start_centers: Callable[[], Assigned]) -> tf.Tensor:
        """Return whether this rank has got other values than it has gradients of: its update has to be left out.

        Args:
            start_centers: lets the centers start from the replicas.
        """

        def begin() -> tf.Tensor:
            synchronizer, getter = self._synchronizer, self._getter
            center = digest_of([value_of(center) for center in getter.centers.values()])
            compared = [*self._parameters, *self._frozen]
            replica = digest_of(
                [value_of(variable) for variable in compared],
                lambda: [True] * len(self._parameters) + [not getter.is_anothers(v) for v in self._frozen],
            )
            found = begin_in_graph(synchronizer, self._turn, center, replica)
            given = tf.cond(found.given, branch(self._give), _nothing)
            with tf.control_dependencies([given]):
                centered = tf.cond(found.anew, branch(start_centers), _nothing)
            with tf.control_dependencies([centered]), tf.control_dependencies([self._first.finish()]):
                return tf.identity(found.replaced)

        with control_flow_v1():
            return tf.cond(self._first(), begin, _nothing)

    def _give(self) -> Assigned:
        """Give all ranks the root's values."""
        assigned = self._give_together(self._own, "start")
        assigned += [variable.assign(tf.zeros_like(variable)) for variable in self._unsent]
        free = on_host(lambda: [int(not self._getter.is_anothers(variable)) for variable in self._frozen], [])
        for i, variable in enumerate(self._frozen):

            def give(variable: Any = variable, name: str = f"start.{i}") -> Assigned:
                return self._give_together([variable], name)

            assigned.append(tf.cond(free[i] > 0, branch(give), _nothing))
        return assigned

    def _give_together(self, variables: Sequence[Any], name: str) -> Assigned:
        bucket_bytes = self._synchronizer.replica.bucket_bytes
        store = TensorStore(
            layout_of([(variable.op.name, variable) for variable in variables], bucket_bytes), variables
        )
        store.load_variables()
        for send in self._synchronizer.membership.broadcasters(name):
            self._synchronizer.tensor_groups.send_store(store, send)
        with tf.control_dependencies(store.tensors()):
            return store.assign()


def _nothing() -> tf.Tensor:
    return tf.constant(False)


@dataclass(frozen=True)
class Startup:
    """What a graph has to do before its first step; boolean scalars.

    Attributes:
        anew: the center becomes what the parameters are.
        given: all ranks take over the root's values.
        replaced: this rank gets other parameters by that than it has gradients of.
    """

    anew: tf.Tensor
    given: tf.Tensor
    replaced: tf.Tensor


def begin_in_graph(
    synchronizer: VariableSynchronizer, turn: SessionTurn, center: tf.Tensor, replica: tf.Tensor
) -> Startup:
    """Find out on all ranks who has what, as :meth:`ReplicaSynchronizer.begin`, when the graph of a session runs.

    State that was loaded shows by its local steps.

    Args:
        synchronizer: of the exchanges.
        turn: waits until all ranks begin with this one.
        center: a number that is the same where the centers are, which may have been loaded.
        replica: a number that is the same where the values are that gradients are of.
    """

    def begin_in_turn(center: np.ndarray, replica: np.ndarray) -> list[np.ndarray]:
        with turn.turn():
            return begin(center, replica)

    def begin(center: np.ndarray, replica: np.ndarray) -> list[np.ndarray]:
        synchronizer.handshake.meet(Purpose.START)
        counters, membership = synchronizer.progress.counters, synchronizer.membership
        standing = LoadStatus(
            counters.local_steps > 0,
            counters.local_steps,
            (counters.last_exchange, counters.next_exchange),
            "",
            f"{center:014x}",
            f"{replica:014x}",
        )
        standings = membership.all_ranks.gather((standing, membership.in_groups), "start")
        return [np.array(_decide(synchronizer, standings))]

    stores = [synchronizer.progress.store()]
    (decided,), _ = python_call(begin_in_turn, synchronizer.replica.values, stores, [center, replica], [tf.bool])
    anew, given, replaced = tf.unstack(tf.ensure_shape(decided, [3]))
    return Startup(anew, given, replaced)


def _decide(synchronizer: VariableSynchronizer, found: Mapping[int, tuple[LoadStatus, bool]]) -> list[bool]:
    """Return whether training starts anew, whether all take over the root's values, and whether others than its own
    are new to this rank.
    """
    membership = synchronizer.membership
    standings = {rank: standing for rank, (standing, _) in found.items()}
    root, own = membership.global_root, membership.global_rank
    start = decide(standings, root)  # The root brings the state of the local optimizer as well.
    most = max(standing.local_steps for standing in standings.values())
    averaging = any(in_groups for _, in_groups in found.values()) or most < (synchronizer.warmup.until or 0)
    different = len({standing.replica for standing in standings.values()}) > 1
    given = start is Start.FROM_ROOT or (start is Start.FROM_PARAMETERS and different)
    replaced = parameters_replaced(start, standings, own, root, averaging)
    if given and own == root:
        logger.warning("The ranks have not started alike: all take over what rank %d has", root)
    return [start is Start.FROM_PARAMETERS, given, replaced]


def digest_of(tensors: Sequence[Any], chosen: Callable[[], Sequence[bool]] | None = None) -> tf.Tensor:
    """Return a number that is the same where values are, to the bit; when the graph runs.

    Args:
        tensors: the values.
        chosen: which of them count.
    """

    def digest(*values: tf.Tensor) -> tf.Tensor:
        total = hashlib.sha256()
        for value, counts in zip(values, [True] * len(values) if chosen is None else chosen(), strict=True):
            total.update(value.numpy().tobytes() if counts else b"")
        return tf.constant(int.from_bytes(total.digest()[:7], "big"), tf.int64)

    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(digest, list(tensors), tf.int64), [])
