"""The end of a session's step: counts the step, and exchanges if it is the last of its period."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.sync.reporting import report_start
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, branch, control_flow_v1, nothing
from hvd_periodic.tensorflow.contrib_opt.exchangers import SessionAsynchronous, SessionOverlapped
from hvd_periodic.tensorflow.contrib_opt.python_call import python_call
from hvd_periodic.tensorflow.contrib_opt.replica import GraphOuterOptimizer
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.tensorflow.contrib_opt.unexchanged import compared
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.store import ArrayStore, layout_of
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from hvd_periodic.vectors.store import Store


class StepEnd:
    """Counts local steps, and exchanges at the last step of each period.

    Args:
        global_step: incremented by one, if there is one.
        counts_rounds: whether ``global_step`` counts exchanges, as in ``tf.contrib.opt``; otherwise it counts local
            steps, as a Horovod script expects.
        start_centers: returns the operations that set centers and companions from the replicas.
    """

    def __init__(
        self,
        synchronizer: VariableSynchronizer,
        turn: Turn,
        global_step: Any,
        counts_rounds: bool,
        start_centers: Callable[[], Assigned],
    ) -> None:
        self._synchronizer = synchronizer
        self._turn = turn
        if isinstance(synchronizer.exchanger, SessionOverlapped):
            synchronizer.exchanger.turn = turn
        outer = synchronizer.exchanged.outer
        parts = outer.parts if isinstance(outer, PerFragmentOptimizer) else [outer]
        self._outer = [part for part in parts if isinstance(part, GraphOuterOptimizer) and part.is_in_session]
        rates = synchronizer.exchanged.rates
        self._given: list[Any] = [*self._outer, *([] if rates is None else [rates])]
        self._audits = synchronizer.exchanger.context.audit_every > 0
        self._global_step = global_step
        self._counts_rounds = counts_rounds
        self._start_centers = start_centers

    def after(self, waited: Sequence[Any], updated: Any) -> tf.Operation:
        """Return the operation that ends a local step after ``waited``; ``updated``: whether it changed the replica."""
        if not self._counts_rounds:
            with tf.control_dependencies(waited):
                waited = self._increment() or waited
        with tf.control_dependencies(waited):
            due, landing = tf.function(self._count, autograph=False)(updated)
        with control_flow_v1():
            with tf.control_dependencies(self._center_following(due)):
                due = tf.identity(due)
            ended = [tf.cond(due, branch(self._exchange), nothing)]
            if self._synchronizer.progress.is_landing_due is not False:
                ended.append(tf.cond(landing, branch(lambda: self._call(None)), nothing))
            return tf.group(*ended)

    def land(self) -> tf.Operation:
        """Return the operation that applies the exchange in flight to replica and center."""
        with control_flow_v1():
            return tf.group(*self._call(None))

    def push_rest(self) -> tf.Operation:
        """Return the operation that pushes what an asynchronous worker has computed since its last exchange, if any."""

        def push() -> None:
            counters = self._synchronizer.progress.counters
            if counters.local_steps > counters.last_exchange:
                self._exchange_now()

        with control_flow_v1():
            return tf.group(*self._call(push))

    def take_statistics(self) -> list[tf.Operation]:
        """Return the operations that set averaged statistics to those of the final center of asynchronous training."""
        exchanger = self._synchronizer.exchanger
        if not isinstance(exchanger, SessionAsynchronous) or not exchanger.tensor_groups.statistics:
            return []
        with control_flow_v1():
            return [tf.group(*self._call(exchanger.take_statistics))]

    def audit(self) -> tf.Operation:
        """Return the operation with which ranks compare centers and the variables that no exchange touches."""
        with control_flow_v1():
            return tf.group(*self._call(self._synchronizer.exchanger.audit, compares=True))

    def compare(self, purpose: Purpose) -> tf.Operation:
        """Return the operation with which ranks compare, in a call, the variables that no exchange touches."""
        with control_flow_v1():
            return tf.group(*compared(self._synchronizer, self._turn, purpose))

    def end(self) -> tf.Operation:
        """Return the operation that tells the journal that training has ended, if the journal knows its beginning."""
        journal, progress = self._synchronizer.journal, self._synchronizer.progress

        def tell() -> None:
            if journal.begun:
                journal.ended(progress.counters)

        with control_flow_v1():
            _, assigned = python_call(tell, self._synchronizer.replica.values, [progress.store()])
            return tf.group(*assigned)

    def _count(self, updated: Any) -> tuple[Any, Any]:
        """Count a local step; return whether an exchange is due, and whether only the one in flight is applied."""
        due = self._synchronizer.count(updated)
        return due, tf.logical_and(self._synchronizer.progress.is_landing_due, tf.logical_not(due))

    def _increment(self) -> Assigned:
        step = self._global_step
        return [] if step is None else [step.assign_add(tf.ones([], step.dtype.base_dtype))]

    def _center_following(self, due: tf.Tensor) -> list[tf.Tensor]:
        """Return the control inputs of an exchange; in a synchronous phase, they set the center to the replicas."""
        synchronizer = self._synchronizer
        if synchronizer.warmup.until is None:
            return [due]
        with tf.control_dependencies([due]):
            remaining = synchronizer.steps_to_switch()
        return [
            tf.cond(remaining > 0, branch(self._start_centers), nothing),
            tf.cond(tf.equal(remaining, 0), branch(lambda: self._call(synchronizer.restart_center)), nothing),
        ]

    def _exchange(self) -> Assigned:
        assigned = self._call(self._exchange_now, compares=self._audits)
        if not self._counts_rounds:
            return assigned
        with tf.control_dependencies(assigned):  # A failed exchange does not count.
            return [*assigned, *self._increment()]

    def _exchange_now(self) -> None:
        """Exchange in Python; first report the start of training to the journal, since sessions do not."""
        exchanger = self._synchronizer.exchanger
        if not self._synchronizer.journal.begun:
            before = self._synchronizer.progress.counters
            report_start(exchanger, replace(before, local_steps=before.last_exchange))
        exchanger.exchange()

    def _call(self, run: Callable[[], object] | None, compares: bool = False) -> Assigned:
        """Make Python apply the exchange in flight and then call ``run``; return the assignments of changed variables.

        The exchange in flight moves the center with the hyper-parameters given when it began. If ``compares``, ``run``
        may compare the variables that no exchange touches.
        """
        synchronizer = self._synchronizer
        given = [list(each.in_session().values()) for each in self._given]
        unexchanged = synchronizer.replica.unexchanged_variables
        shown = unexchanged.in_session() if compares else {}

        def in_turn(*values: np.ndarray) -> None:
            synchronizer.exchanger.land()
            if run is None:
                return
            rest = iter(values)
            for each, tensors in zip(self._given, given, strict=True):
                each.given = list(islice(rest, len(tensors)))
            turn = self._turn() if synchronizer.exchanger.steps_agree else nullcontext()
            with turn, unexchanged.holding(list(shown), list(rest)):
                run()

        inputs = [*chain(*given), *shown.values()]
        _, assigned = python_call(in_turn, synchronizer.replica.values, self._stores(), inputs)
        return assigned

    def _stores(self) -> list[Store[Any]]:
        """Return the stores of all variables that an exchange reads or writes."""
        synchronizer, exchanger = self._synchronizer, self._synchronizer.exchanger
        stores = synchronizer.stores()
        if isinstance(exchanger, SessionAsynchronous) and exchanger.as_left is not None:
            stores.append(exchanger.as_left)
        state = [variable for outer in self._outer for variable in outer.state_variables()]
        if state:
            layout = layout_of([(variable.op.name, variable) for variable in state], DEFAULT_BUCKET_BYTES)
            stores.append(ArrayStore(layout, state, synchronizer.replica.values))
        return stores
