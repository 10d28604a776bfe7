"""Variables of a TensorFlow 1 graph as a replica."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import tensorflow as tf

from hvd_periodic.layout import Layout
from hvd_periodic.store import Store
from hvd_periodic.tensorflow.graph import NewVariable
from hvd_periodic.tensorflow.replica import Named, NamedVariables, VariableReplica
from hvd_periodic.tensorflow.store import VariableStore, layout_of


class TensorStore(VariableStore):
    """Tensors in place of variables, for one pass through an exchange.

    A function cannot assign a reference variable: it takes the values, and returns what is to be assigned.
    """

    def load(self, tensors: Sequence[tf.Tensor]) -> None:
        """Start from these values."""
        self._variables = list(tensors)

    def _assign(self, index: int, value: tf.Tensor) -> None:
        self._variables[index] = tf.cast(value, self._variables[index].dtype)


class GraphReplica(VariableReplica):
    """Local replicas of a graph, whose centers and companions exist already.

    Args:
        named: the variables by role.
        vectors: the variables of the algorithm's state that exist, by name.
        new_variable: makes those that do not.
        center_optimizer: for algorithms that optimize the center.
    """

    def __init__(
        self,
        named: NamedVariables,
        vectors: dict[str, list[tf.Variable]],
        new_variable: NewVariable,
        center_optimizer: Any = None,
    ) -> None:
        self._vectors = vectors
        super().__init__(named, new_variable, center_optimizer)

    def new_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the variables that exist for this vector, or new ones."""
        return VariableStore(layout, self._vectors[name]) if name in self._vectors else super().new_store(layout, name)

    def _store(self, named: Named) -> Store[Any]:
        return TensorStore(layout_of(named, self.bucket_bytes), [variable for _, variable in named])


class CenterOptimizer:
    """A copy of the local optimizer over the center variables, with slots and non-slot variables of its own.

    ``tf.contrib.opt`` applied the local optimizer itself, so that Adam's powers of β advanced at local steps as well.

    Args:
        local: the local optimizer.

    Attributes:
        optimizer: the copy.
    """

    def __init__(self, local: tf.compat.v1.train.Optimizer) -> None:
        self.optimizer = copy.copy(local)
        self.optimizer._slots = {}
        self.optimizer._non_slot_dict = {}
        self.optimizer._deferred_slot_restorations = {}
        self.optimizer._name = f"center_{local.get_name()}"

    def bind(self, parameters: Sequence[Any], centers: Sequence[tf.Variable], gradients: Sequence[tf.Variable]) -> None:
        """Take the centers, and what will hold their gradients."""
        self._centers, self._gradients = list(centers), list(gradients)

    def step(self, maximum: Callable[[Any], Any]) -> None:
        """Move the centers by their gradients."""
        gradients = [tf.convert_to_tensor(gradient) for gradient in self._gradients]
        self.optimizer.apply_gradients(list(zip(gradients, self._centers, strict=True)))

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters that are numbers; those that are tensors can be read in a session only."""
        return {
            f"{name.lstrip('_')} of the center optimizer": value
            for name, value in sorted(vars(self.optimizer).items())
            if isinstance(value, Number) and name != "_use_locking"
        }
