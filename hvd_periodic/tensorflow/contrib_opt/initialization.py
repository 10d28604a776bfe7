"""Operations on centers that are not part of a training step: the start from the root's centers, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.membership import Membership
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, TensorStore, control_flow_v1, value_of
from hvd_periodic.tensorflow.contrib_opt.counters import CounterVariables
from hvd_periodic.tensorflow.contrib_opt.exchangers import SessionAsynchronous
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter
from hvd_periodic.tensorflow.contrib_opt.python_call import sent_from_root
from hvd_periodic.tensorflow.contrib_opt.session_startup import ROOT
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.tensorflow.contrib_opt.unexchanged import UnexchangedVariables


class SharedCenter:
    """Starts and ends the exchanges with an asynchronous center.

    Attributes:
        hands_out: whether workers take the center: they push all they have, and end with the final center.
    """

    def __init__(
        self,
        exchanger: SessionAsynchronous,
        centers: Sequence[tf.Variable],
        statistics: Sequence[tf.Variable],
        unexchanged: UnexchangedVariables,
    ) -> None:
        self._worker, self._finish, self._unexchanged = exchanger.worker, exchanger.finish, unexchanged
        self._is_root = exchanger.context.membership.is_root
        self.hands_out = exchanger.tensor_groups.parameters.taken is not None
        self._centers = TensorStore(exchanger.tensor_groups.parameters.values.layout, centers)
        self._stores = [self._centers]
        if statistics:
            self._stores.append(TensorStore(exchanger.tensor_groups.statistics[0].values.layout, statistics))

    def write(self) -> tf.Operation:
        """Return the operation with which the root sets the center to the values of its variables."""
        if not self._is_root:
            return tf.no_op()
        for store in self._stores:
            store.load_variables()
        values = [store.read(bucket) for store in self._stores for bucket in store.layout.buckets]

        def write(*buckets: tf.Tensor) -> tf.Tensor:
            self._worker.resume_training()
            self._worker.transport.write(bucket.numpy() for bucket in buckets)
            return tf.constant(True)

        with tf.device("CPU:0"):
            return tf.py_function(write, values, tf.bool).op

    def finish(self) -> tf.Operation:
        """Return the operation that waits for all ranks and reads the final center.

        Ranks compare the variables that no exchange touches.
        """
        buckets, unexchanged = self._centers.layout.buckets, self._unexchanged
        with control_flow_v1():
            shown = unexchanged.in_session()

        def finish(*arrays: np.ndarray) -> list[np.ndarray]:
            with unexchanged.holding(list(shown), arrays):
                self._finish()
            return [self._worker.final(index) for index in range(len(buckets))]

        with tf.device("CPU:0"):
            kinds = [tf.as_dtype(bucket.kind) for bucket in buckets]
            values = tf.numpy_function(finish, list(shown.values()), kinds)

        self._centers.load_variables()
        for bucket, value in zip(buckets, values, strict=True):
            self._centers.write(bucket, tf.ensure_shape(value, [bucket.size]))
        return tf.group(*self._centers.assign())


class Initialization:
    """Broadcasts the root's centers and global step, then sets all local variables from the center.

    Attributes:
        times: number of these operations.
        shared_centers: the asynchronous centers.
        buffer_centers: (center, statistic) pairs; the centers start from the root's statistics.
        of_rows: what is known of the rows of tables since replicas were equal to the center.
    """

    def __init__(self, name: str, communicator: Communicator, getter: CustomGetter, counters: CounterVariables) -> None:
        self._name = name
        self._routes = lambda: [(communicator, name, ROOT)]
        self._turn: Turn = nullcontext
        self._getter = getter
        self._counters = counters
        self._global_step: Any = None
        self.buffer_centers: list[tuple[tf.Variable, Any]] = []
        self.of_rows: list[tf.Variable] = []
        self.times = 0
        self.shared_centers: list[SharedCenter] = []

    def begin_within(self, membership: Membership, turn: Turn, global_step: Any) -> None:
        """Include the groups of ranks, in the turn of this optimizer; also broadcast this global step, if any."""
        self._routes, self._turn, self._global_step = membership.routes, turn, global_step

    def start_centers(self, variables: Sequence[Any]) -> Assigned:
        """Set centers to the replicas; a script may have restored only these, for example for fine-tuning."""
        assigned: Assigned = []
        for variable in variables:
            if variable.ref() in self._getter.own:
                continue
            center = self._getter.centers[variable.ref()]
            value = tf.cast(value_of(variable), center.dtype.base_dtype)
            assigned += [center.assign(value), *self._start_companion(variable.ref(), value)]
        return assigned

    def operation(self, of_centers: Sequence[Any]) -> tf.Operation:
        """Return the operation; it also broadcasts the root's ``of_centers``, the state kept with the centers."""
        self.times += 1
        shared = [
            *self._getter.centers.values(),
            *self._getter.statistics,
            *self._counters.saved,
            *of_centers,
            *([] if self._global_step is None else [self._global_step]),
        ]
        times = self.times
        with tf.compat.v1.name_scope(None), tf.device(None):
            checks = self._counters.new_checks()
            with tf.control_dependencies(checks):
                written = [center.write() for center in self.shared_centers]
            with tf.control_dependencies([*checks, *written]):
                values = [variable.read_value() for variable in shared]
                roots = sent_from_root(values, f"initialize.{times}", self._routes, self._turn)
                received = [variable.assign(value) for variable, value in zip(shared, roots, strict=True)]
            with tf.control_dependencies(received):
                assigned = self.start_from_centers()
            return tf.group(*assigned, name=f"{self._name}.initialize.{times}")

    def start_from_centers(self) -> Assigned:
        """Set local variables from the centers, and the centers of statistics from the statistics."""
        assigned = [
            center.assign(tf.cast(value_of(statistic), center.dtype)) for center, statistic in self.buffer_centers
        ]
        assigned += [variable.assign(tf.zeros_like(variable)) for variable in self.of_rows]
        for reference, center in self._getter.centers.items():
            local, value = reference.deref(), value_of(center)
            assigned.append(local.assign(tf.cast(value, local.dtype.base_dtype)))
            assigned += self._start_companion(reference, value)
        return assigned

    def _start_companion(self, reference: Any, center: tf.Tensor) -> Assigned:
        companion = self._getter.companions.get(reference)
        return [] if companion is None else [companion.assign(self._getter.first_companion(center))]
