"""Branches of a graph in which an exchange changes variables of either kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.store import VariableStore

Assigned = list[Any]
"""What has to run so that variables have been assigned."""


class TensorStore(VariableStore):
    """Values in place of variables, for one pass through a function.

    Attributes:
        variables: where the values come from and go to.
    """

    def __init__(self, layout: Any, variables: Sequence[tf.Variable]) -> None:
        super().__init__(layout, variables)
        self.variables = list(variables)

    def load(self, tensors: Sequence[tf.Tensor]) -> None:
        """Start from these values."""
        self._variables = list(tensors)

    def load_variables(self) -> None:
        """Start from what the variables hold when the graph runs."""
        self.load([value_of(variable) for variable in self.variables])

    def assign(self) -> Assigned:
        """Return what assigns the values to the variables."""
        return [variable.assign(value) for variable, value in zip(self.variables, self._variables, strict=True)]

    def _assign(self, index: int, value: tf.Tensor) -> None:
        self._variables[index] = tf.cast(value, self._variables[index].dtype)


class Branches:
    """Makes the branches of conditionals that change variables.

    What changes variables of our own, such as counters, and what exchanges, runs in functions, where control
    dependencies are automatic. Centers, accumulators and the user's variables may be reference variables, which
    functions cannot assign: they go in and come out as values.

    Args:
        stores: what the functions may change of those.
    """

    def __init__(self, stores: Sequence[TensorStore]) -> None:
        self._stores = list(stores)

    def on_values(self, action: Callable[[], Any]) -> Assigned:
        """Run an action on the values of the variables, and assign what it leaves."""
        before = self._read()
        return self._assign(self._stores, after=[*_flat(before), *self._run(action, before)])

    def around_center_optimizer(
        self,
        action: Callable[[], Sequence[Any]],
        optimize: Callable[[Sequence[tf.Tensor]], Any],
        center: TensorStore,
        pull: Callable[[], Any],
        pulling: Sequence[TensorStore],
    ) -> Assigned:
        """Run an exchange with an optimizer in its middle, which assigns the center by operations of the graph.

        Args:
            action: exchanges, and returns the gradients of the center; what it makes of ``pulling`` is not kept.
            optimize: returns the operation that applies them.
            center: what it moves.
            pull: lets the stores of ``pulling`` follow the center.
            pulling: what they held before the exchange is what the pull starts from.
        """
        before = self._read()
        after = [*_flat(before), *self._run(action, before)]
        gradients = after[2 * len(_flat(before)) :]
        assigned = self._assign([store for store in self._stores if store not in (center, *pulling)], after)
        with tf.control_dependencies(after):
            optimized = optimize(gradients)
        with tf.control_dependencies([optimized]):
            moved = [value_of(variable) for variable in center.variables]
        self._run(pull, [moved if store is center else old for store, old in zip(self._stores, before, strict=True)])
        return assigned + self._assign(pulling, after=[optimized])

    def _read(self) -> list[list[tf.Tensor]]:
        return [[value_of(variable) for variable in store.variables] for store in self._stores]

    def _assign(self, stores: Sequence[TensorStore], after: Sequence[Any]) -> Assigned:
        """Assign what was left in some stores, which may be constants, after all have been read and exchanged."""
        with tf.control_dependencies(after):
            return [assigned for store in stores for assigned in store.assign()]

    def _run(self, action: Callable[[], Any], values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Run an action in a function, on these values; return what it leaves, and then any list that it returns."""
        sizes = [len(of_store) for of_store in values]

        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            self._load(sizes, flat)
            result = action()
            left = [value for store in self._stores for value in store.tensors()]
            return [*left, *(result if isinstance(result, list) else [])]

        results = list(tf.function(run, autograph=False)(*_flat(values)))
        self._load(sizes, results)
        return results

    def _load(self, sizes: Sequence[int], flat: Sequence[tf.Tensor]) -> None:
        first = 0
        for store, size in zip(self._stores, sizes, strict=True):
            store.load(flat[first : first + size])
            first += size


def _flat(values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return [value for of_store in values for value in of_store]


def value_of(variable: Any) -> tf.Tensor:
    """Return what a variable holds when the graph runs.

    A resource that is set to the value of a reference variable would share its memory, which changes in place: copy it.
    """
    value = variable.read_value()
    return value if is_resource(variable) else tf.raw_ops.DeepCopy(x=value)


def is_resource(variable: Any) -> bool:
    """Return whether a variable is a resource; otherwise it is a reference variable."""
    return hasattr(variable, "handle")


def branch(make: Callable[[], Assigned]) -> Callable[[], tf.Tensor]:
    """Return a branch that is over when all of something has run."""

    def run() -> tf.Tensor:
        with tf.control_dependencies([tf.group(*make())]):
            return tf.constant(True)

    return run


@contextmanager
def control_flow_v1() -> Iterator[None]:
    """Build conditionals whose branches are part of the graph: those of version 2 cannot assign reference variables."""
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if enabled:
            tf.compat.v1.enable_control_flow_v2()
