"""The first step of a session that no hook of an optimizer has started: who has what, and what all ranks start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, TensorStore, branch, control_flow_v1, value_of
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter, can_be_sent
from hvd_periodic.tensorflow.contrib_opt.session_start import begin_in_graph, digest_of
from hvd_periodic.tensorflow.contrib_opt.turns import SessionTurn
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import on_host
from hvd_periodic.tensorflow.store import layout_of

ROOT = 0
"""The rank whose values all start from."""


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

    def over(self) -> tf.Operation:
        """Remember that training has begun."""
        return self._mark.assign(True)

    def steps_of_all(self, synchronize: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Return the local steps before this one; at the first step what ``synchronize``, which communicates, says."""
        if self._steps is None:
            with control_flow_v1():
                steps = self._local_steps.read_value()
                self._steps = tf.cond(self(), lambda: synchronize(steps), lambda: tf.identity(steps))
        return self._steps


class Start:
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
            with tf.control_dependencies([centered]), tf.control_dependencies([self._first.over()]):
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
