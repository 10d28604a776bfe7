"""The operation with which a session starts all ranks from the root's centers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.training_group import TrainingGroup
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, value_of
from hvd_periodic.tensorflow.contrib_opt.counters import CounterVariables
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter
from hvd_periodic.tensorflow.contrib_opt.session_startup import ROOT
from hvd_periodic.tensorflow.contrib_opt.shared_center import SharedCenter


class Initialization:
    """Broadcasts the root's centers and global step, then sets all local variables from the center.

    Attributes:
        times: number of these operations.
        shared_centers: the asynchronous centers.
    """

    def __init__(self, name: str, communicator: Communicator, getter: CustomGetter, counters: CounterVariables) -> None:
        self._name = self._prefix = name
        self._communicator = communicator
        self._getter = getter
        self._counters = counters
        self._together: TrainingGroup | None = None
        self._global_step: Any = None
        self._buffer_centers: list[tuple[tf.Variable, Any]] = []
        self.times = 0
        self.shared_centers: list[SharedCenter] = []

    def begin_within(self, together: TrainingGroup, prefix: str, global_step: Any) -> None:
        """Include the groups of ranks, set a unique prefix of names, and also broadcast this global step, if any."""
        self._together, self._prefix, self._global_step = together, prefix, global_step

    def start_buffers(self, pairs: Iterable[tuple[tf.Variable, Any]]) -> None:
        """Start centers of statistics from the root's statistics, given (center, statistic) pairs."""
        self._buffer_centers += pairs

    def start_centers(self, variables: Sequence[Any]) -> Assigned:
        """Set centers to the replicas; a script may have restored only these, for example for fine-tuning."""
        assigned: Assigned = []
        for variable in variables:
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
                received = [
                    variable.assign(self._from_root(variable.read_value(), f"initialize.{times}.{i}"))
                    for i, variable in enumerate(shared)
                ]
            with tf.control_dependencies(received):
                assigned = self._start_from_centers()
            return tf.group(*assigned, name=f"{self._name}.initialize.{times}")

    def _from_root(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Return the root's value, sent to the ranks that exchange with it, then to the others of their groups."""
        value = self._communicator.broadcast(value, f"{self._prefix}.{name}", ROOT)
        together = self._together
        if together is not None and together.group is not None:
            value = together.group.broadcast(value, f"{together.group_name}.{name}", together.group_root)
        return value

    def _start_from_centers(self) -> Assigned:
        """Set local variables from the centers, and the centers of statistics from the statistics."""
        assigned = [
            center.assign(tf.cast(value_of(statistic), center.dtype)) for center, statistic in self._buffer_centers
        ]
        for reference, center in self._getter.centers.items():
            local, value = reference.deref(), value_of(center)
            assigned.append(local.assign(tf.cast(value, local.dtype.base_dtype)))
            assigned += self._start_companion(reference, value)
        return assigned

    def _start_companion(self, reference: Any, center: tf.Tensor) -> Assigned:
        companion = self._getter.companions.get(reference)
        return [] if companion is None else [companion.assign(self._getter.first_companion(center))]
