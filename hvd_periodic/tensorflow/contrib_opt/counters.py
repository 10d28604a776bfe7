"""The counters of an optimizer, and other variables that it makes in addition to centers and slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.getters import belongs_to_optimizer
from hvd_periodic.tensorflow.contrib_opt.session_startup import FirstStep, read_after, require_initialized


class CounterVariables:
    """Makes the counters of an optimizer.

    Args:
        saved: whether checkpoints hold the local steps, unlike other counters, so that restored training does not fall
            back into a synchronous phase.

    Attributes:
        saved: the counters of local steps that checkpoints hold.
        first: tells whether a step is the first of its session, by the local steps of the latest minimization.
        check: the operation that fails if the variables of the latest minimization are not initialized, as control
            inputs.
    """

    first: FirstStep

    def __init__(self, owner: tf.compat.v1.train.Optimizer, collection: str, saved: bool) -> None:
        self._name = owner.get_name()
        self._cls = type(owner).__name__
        self._collection = collection
        self._saves = saved
        self._local_steps: tf.Variable | None = None
        self._read_after: set[Any] = set()
        self.made: list[tf.Variable] = []
        self.saved: list[tf.Variable] = []
        self.check: list[tf.Operation] = []
        self._counted: list[tf.Variable] = []

    def new_checks(self) -> list[tf.Operation]:
        """Return one operation per minimization that fails if its variables are not initialized.

        It waits for the operations that the caller waits for, an initializer for example.
        """
        return [require_initialized(counter, self._cls) for counter in self._counted]

    def local_steps(self) -> tf.Variable:
        """Return the counter of local steps of the next minimization, which has no synchronizer yet."""
        if self._local_steps is None:
            collection = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES if self._saves else self._collection
            self._local_steps = self._create("local_step", (), tf.int64, 0, collection)
            if self._saves:
                self.saved.append(self._local_steps)
            self._counted.append(self._local_steps)
            with tf.control_dependencies(None):  # Reads outside a training step wait for it too.
                self.check = [require_initialized(self._local_steps, self._cls)]
            self.first = FirstStep(self._local_steps)
        return self._local_steps

    def new_variable(self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
        """Make a variable for a synchronizer; its counter of local steps may exist already."""
        if name == "local_steps":
            counted, self._local_steps = self.local_steps(), None
            return counted
        return self._create(f"{self._name}/{name}", shape, dtype, initial_value, self._collection)

    def read_checked(self, variables: Sequence[Any]) -> None:
        """Make reads of variables wait for the check of the latest minimization, unless they wait for one already."""
        read_after(self.check[-1], [variable for variable in variables if variable.ref() not in self._read_after])
        self._read_after |= {variable.ref() for variable in variables}

    def _create(
        self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any, collection: str
    ) -> tf.Variable:
        def initial() -> tf.Tensor:
            return tf.fill(tuple(shape), tf.cast(initial_value, dtype)) if shape else tf.constant(initial_value, dtype)

        with tf.compat.v1.name_scope(None), tf.device(None):
            made = tf.compat.v1.Variable(
                initial,
                trainable=False,
                collections=[collection],
                name=name,
                use_resource=True,
            )
        belongs_to_optimizer(made)
        self.made.append(made)
        return made
