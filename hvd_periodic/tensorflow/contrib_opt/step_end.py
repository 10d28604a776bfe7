"""The end of a step in a graph: it is counted, and is an exchange if it is the last of its period."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_periodic.algorithms import Exchange
from hvd_periodic.sync.course import Course
from hvd_periodic.tensorflow.asynchronous import GraphAsynchronous
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, Branches, TensorStore, branch, control_flow_v1
from hvd_periodic.tensorflow.contrib_opt.replica import (
    CenterOptimizer,
    GraphOuterOptimizer,
    GraphReplica,
    HostCenterOptimizer,
)
from hvd_periodic.tensorflow.graph import VariableSynchronizer


class StepEnd:
    """Counts local steps, and exchanges at the last of each period.

    Args:
        synchronizer: counts and exchanges.
        center_optimizer: moves the center, if the algorithm leaves that to an optimizer.
        global_step: incremented by one, if there is one.
        counts_rounds: whether at every exchange, as in ``tf.contrib.opt``; otherwise at every local step: a Horovod
            script knows steps, not rounds.
        before_exchange: returns what else is assigned first at an exchange of some variables.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        center_optimizer: CenterOptimizer | HostCenterOptimizer | None,
        global_step: Any,
        counts_rounds: bool,
        before_exchange: Callable[[Sequence[Any]], Assigned],
    ) -> None:
        replica: GraphReplica = synchronizer.replica
        mirrors: Sequence[Any] = mirrors_of(synchronizer.course)
        self._synchronizer = synchronizer
        self._center_optimizer = center_optimizer
        self._global_step = global_step
        self._counts_rounds = counts_rounds
        self._before_exchange = before_exchange
        self._branches = Branches([*replica.stores, *mirrors])
        self._references = [variable.ref() for _, variable in replica.named.parameters]

    def after(self, waited: Sequence[Any], updated: Any) -> tf.Operation:
        """Return the operation that counts a local step after ``waited``, and whether it ``updated``."""
        if not self._counts_rounds:
            with tf.control_dependencies(waited):
                waited = self._increment() or waited
        with tf.control_dependencies(waited):
            due = tf.function(self._synchronizer.count, autograph=False)(updated)
        with control_flow_v1():
            with tf.control_dependencies(self._center_following(due)):
                due = tf.identity(due)
            return tf.group(tf.cond(due, branch(self._exchange), _nothing))

    def _increment(self) -> Assigned:
        step = self._global_step
        return [] if step is None else [step.assign_add(tf.ones([], step.dtype.base_dtype))]

    def _center_following(self, due: tf.Tensor) -> list[tf.Tensor]:
        """Return what an exchange waits for: in a synchronous phase, that the center is what the replicas are."""
        synchronizer = self._synchronizer
        if synchronizer.phase.until is None:
            return [due]
        with tf.control_dependencies([due]):
            remaining = synchronizer.steps_to_switch()
        return [
            tf.cond(remaining > 0, branch(lambda: self._follow(synchronizer.tensor_groups.reset)), _nothing),
            tf.cond(tf.equal(remaining, 0), branch(lambda: self._follow(synchronizer.restart_center)), _nothing),
        ]

    def _follow(self, action: Callable[[], Any]) -> Assigned:
        with tf.control_dependencies(self._branches.on_values(action)):
            return [tf.no_op(), *self._before_exchange(self._references)]

    def _exchange(self) -> Assigned:
        with tf.control_dependencies(self._before_exchange(self._references)):
            assigned = self._synchronized()
        if not self._counts_rounds:
            return assigned
        with tf.control_dependencies(assigned):  # One that fails does not count.
            return [*assigned, *self._increment()]

    def _synchronized(self) -> Assigned:
        """Return what an exchange assigns to replicas and centers."""
        synchronizer, optimizer, outer = self._synchronizer, self._center_optimizer, self._synchronizer.exchanged.outer
        parameters: Any = synchronizer.tensor_groups.parameters
        if not isinstance(optimizer, CenterOptimizer) or not isinstance(outer, GraphOuterOptimizer):
            return self._branches.on_values(synchronizer.sync)
        # Following a center that an optimizer moved asks no more.
        alone = Exchange(synchronizer.membership.communicator.size, period=1)

        def exchange() -> Sequence[Any]:
            synchronizer.sync()
            return list(outer.gradients)

        def pull() -> None:
            for bucket in parameters.values.layout.buckets:
                parameters.pull(bucket, parameters.center.read(bucket), alone)

        return self._branches.around_center_optimizer(
            exchange,
            lambda gradients: optimizer.apply(gradients, parameters.center.variables),
            parameters.center,
            pull,
            [store for store in (parameters.values, *parameters.worker.values()) if isinstance(store, TensorStore)],
        )


def mirrors_of(course: Course[Any]) -> list[Any]:
    """Return where the graph keeps a center that is outside of it."""
    if not isinstance(course, GraphAsynchronous):
        return []
    return [store for store in (course.as_read, course.as_left) if store is not None]


def _nothing() -> tf.Tensor:
    return tf.constant(False)
