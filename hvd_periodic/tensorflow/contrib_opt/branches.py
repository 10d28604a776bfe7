"""Resource and reference variables of a graph, and conditional branches that change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.store import VariableStore

Assigned = list[Any]
"""Operations that assign variables."""


class TensorStore(VariableStore):
    """Holds values in place of ``variables``, from which they are loaded and to which they are assigned."""

    def __init__(self, layout: Any, variables: Sequence[tf.Variable]) -> None:
        super().__init__(layout, variables)
        self.variables = list(variables)
        self._written: set[int] = set()

    def load_variables(self) -> None:
        """Load the values of the variables that are needed from here on, at the time when the graph runs."""
        self._variables = _Values(self.variables)
        self._written.clear()

    def tensors(self) -> list[Any]:
        """Return the values."""
        return [self._variables[index] for index in range(len(self.variables))]

    def assign(self) -> Assigned:
        """Return the operations that assign the values written since :meth:`load_variables`."""
        return [self.variables[index].assign(self._variables[index]) for index in sorted(self._written)]

    def _assign(self, index: int, value: tf.Tensor) -> None:
        self._variables[index] = tf.cast(value, self.variables[index].dtype.base_dtype)
        self._written.add(index)


class _Values(dict[int, Any]):
    """The values of variables by index; those that are not set are loaded when they are needed."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        super().__init__()
        self._variables = variables

    def __missing__(self, index: int) -> tf.Tensor:
        value = self[index] = value_of(self._variables[index])
        return value


def value_of(variable: Any) -> tf.Tensor:
    """Return the value of a variable at the time when the graph runs.

    The value of a reference variable is copied: a resource assigned from it would share memory that changes in place.
    """
    value = variable.read_value()
    return value if is_resource(variable) else tf.raw_ops.DeepCopy(x=value)


def is_resource(variable: Any) -> bool:
    """Return whether a variable is a resource; otherwise it is a reference variable."""
    return hasattr(variable, "handle")


def branch(make: Callable[[], Assigned]) -> Callable[[], tf.Tensor]:
    """Return a branch that ends when all operations of ``make`` have run."""

    def run() -> tf.Tensor:
        with tf.control_dependencies([tf.group(*make())]):
            return tf.constant(True)

    return run


def nothing() -> tf.Tensor:
    """Do nothing: the other branch of :func:`branch`."""
    return tf.constant(False)


@contextmanager
def control_flow_v1() -> Iterator[None]:
    """Build version 1 conditionals inside the block: version 2 branches cannot assign reference variables."""
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if enabled:
            tf.compat.v1.enable_control_flow_v2()
