"""Accumulated gradient normalization for TensorFlow 1 graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import tensorflow as tf

from hvd_periodic.algorithms import AGN
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, branch, control_flow_v1, nothing
from hvd_periodic.tensorflow.contrib_opt.getters import AGNCustomGetter
from hvd_periodic.tensorflow.contrib_opt.optimizer import InitializedByTask
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions
from hvd_periodic.tensorflow.contrib_opt.pairs import Pairs, shown, with_gradient
from hvd_periodic.tensorflow.contrib_opt.request import Request
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.space import TensorSpace


class AGNOptimizer(InitializedByTask):
    """Accumulated gradient normalization; see :class:`hvd_periodic.AGN` for the equations.

    A copy of the local optimizer, with its own slots, moves the center.

    Args:
        optimizer: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        custom_getter: the getter with which the model was created; or None, for scripts without one: their own
            trainable variables are the replicas; centers, slots and counters are global variables. If ranks start with
            different values, without ``hvd.broadcast_global_variables(0)``, the first step broadcasts the root's.
        communication_period: local steps between exchanges (τ), or a schedule.
        use_locking: accepted; workers that move the center in shared memory take turns in any case.
        name: name of the optimizer.
        outer_optimizer: the optimizer of which a copy, with its own state, moves the center. Default: ``optimizer``.
        op: ``"sum"`` or ``"average"`` of the workers' normalized gradients.
        asynchronous: as in :class:`ElasticAverageOptimizer`; the hyper-parameters of the center's optimizer have to be
            numbers, and its state is lost when the process ends.
        options: as in :class:`ElasticAverageOptimizer`.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` is not Horovod's size.
        RuntimeError: Horovod is not initialized.

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    @takes(SessionOptions)
    def __init__(
        self,
        optimizer: Any,
        num_worker: int,
        custom_getter: AGNCustomGetter | None,
        communication_period: int | Schedule = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
        *,
        outer_optimizer: Any = None,
        op: str = "sum",
        asynchronous: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        request = Request(
            optimizer,
            num_worker,
            custom_getter,
            AGNCustomGetter,
            lambda: AGN(op),
            ("communication_period", communication_period),
            options,
            asynchronous,
            outer_optimizer,
        )
        super().__init__(request, use_locking, name)

    def _seen(self, synchronizer: VariableSynchronizer, pairs: Pairs, exchanged: Sequence[Any]) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()

        def add() -> Assigned:
            before = len(graph.get_operations())
            for gradient, variable in with_gradient(pairs):
                accumulator = self._getter.companions.get(variable.ref())
                if accumulator is not None:
                    self._algorithm.local(TensorSpace(), variable, gradient, {"gradient": accumulator})
            return graph.get_operations()[before:]

        counted = shown(synchronizer, pairs, exchanged)
        if synchronizer.warmup.until is None:
            return [counted, *add()]
        with control_flow_v1():
            begun = synchronizer.steps_to_switch() <= 0
            return [counted, tf.cond(begun, branch(add), nothing)]

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        accumulators = [self._getter.companions[reference] for reference in references]
        return super()._vectors(references) | {"parameters.gradient": accumulators}
