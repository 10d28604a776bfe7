"""What a session has to have initialized; an initializer knows the variables that there were when it was built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.branches import is_resource

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
