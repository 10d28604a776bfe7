"""Variables of a TensorFlow 1 graph as a replica."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.tensorflow.contrib_opt.branches import TensorStore
from hvd_periodic.tensorflow.contrib_opt.getters import GLOBAL_VARIABLE_NAME
from hvd_periodic.tensorflow.ledger import NewVariable
from hvd_periodic.tensorflow.outer import VariableOuterOptimizer
from hvd_periodic.tensorflow.replica import Named, NamedVariables, VariableReplica
from hvd_periodic.tensorflow.store import layout_of
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.store import Store


class GraphReplica(VariableReplica):
    """Local replicas of a graph, whose centers and companions exist already.

    Args:
        named: the variables by role.
        vectors: the variables of the algorithm's state that exist, by name.
        new_variable: makes those that do not.

    Attributes:
        stores: of all variables that may be reference variables.
    """

    def __init__(
        self,
        named: NamedVariables,
        vectors: dict[str, list[tf.Variable]],
        new_variable: NewVariable,
    ) -> None:
        self._vectors = vectors
        self.stores: list[TensorStore] = []
        super().__init__(named, new_variable)

    def new_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the variables that exist for this vector, or new ones."""
        if name not in self._vectors or not layout.specs:  # A center that lives elsewhere has no part here.
            return super().new_store(layout, name)
        self.stores.append(TensorStore(layout, self._vectors[name]))
        return self.stores[-1]

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the same: outside of functions nothing orders what changes in place."""
        return self.new_store(layout, name)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Any]]) -> int:
        """Say whether there are gradients; what the local rule makes of them is not part of a function."""
        return int(any(gradient is not None for gradient in self.gradients))

    def store_of(self, named: Named) -> Store[Any]:
        """Return named variables as a store that a function can fill and read."""
        self.stores.append(TensorStore(layout_of(named, self.bucket_bytes), [variable for _, variable in named]))
        return self.stores[-1]


class GraphOuterOptimizer(VariableOuterOptimizer):
    """The optimizer of the center in a graph, where its step is not part of a function.

    Attributes:
        gradients: what an exchange leaves to it.
    """

    gradients: Sequence[tf.Tensor] = ()

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Remember where the gradients of the center will be."""
        self._gradient = gradient

    def step(self) -> None:
        """Take the gradients of the center; in host memory, step."""
        if self._host is None:
            self.gradients = self._gradient.tensors()
        else:
            super().step()

    def followed(self) -> list[Any]:
        """Return that nothing is read: hyper-parameters are numbers."""
        return []


class CenterOptimizer:
    """A copy of the local optimizer over the center variables, with slots and non-slot variables of its own.

    ``tf.contrib.opt`` applied the local optimizer itself, so that Adam's powers of β advanced at local steps as well.

    Args:
        local: the local optimizer.

    Attributes:
        optimizer: the copy.
    """

    follows_rate = False

    def __init__(self, local: tf.compat.v1.train.Optimizer) -> None:
        self.optimizer = copy.copy(local)
        self.optimizer._slots = {}
        self.optimizer._non_slot_dict = {}
        self.optimizer._deferred_slot_restorations = {}
        self.optimizer._name = f"center_{local.get_name()}"

    def variables(self) -> list[Any]:
        """Return the slots and other variables."""
        return list(self.optimizer.variables())

    def create(self, centers: Sequence[tf.Variable]) -> None:
        """Create slots and other variables, before a conditional needs them.

        Scripts for ``tf.contrib.opt``, its own tests among them, take global variables with "beta" in their names, and
        those with the optimizer's name outside of the center, for what has to be local: these are called otherwise.
        """

        def rename(make: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
            name = arguments.get("name") or ""
            if not name.startswith(f"{GLOBAL_VARIABLE_NAME}/"):
                own = name.replace("beta", "decay")
                arguments["name"] = f"{GLOBAL_VARIABLE_NAME}/{self.optimizer.get_name()}/{own}"
            return make(**arguments)

        with tf.compat.v1.name_scope(None), tf.variable_creator_scope(rename):
            self.optimizer._create_slots(list(centers))

    def apply(self, gradients: Sequence[tf.Tensor], centers: Sequence[tf.Variable]) -> tf.Operation:
        """Return the operation that moves the centers by their gradients."""
        return self.optimizer.apply_gradients(list(zip(gradients, centers, strict=True)))

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters that are numbers; those that are tensors can be read in a session only."""
        return {
            f"{name.lstrip('_')} of the center optimizer": value
            for name, value in sorted(vars(self.optimizer).items())
            if isinstance(value, Number) and name != "_use_locking"
        }

    def hyperparameters(self) -> None:
        """Return None: what is a number is the same on all ranks."""

    def take_rate(self, given: Any, maximum: Any) -> None:
        """Do nothing: hyper-parameters are those of this rank."""


class HostCenterOptimizer:
    """A copy of the local optimizer in a graph and a session of its own, for a center in host memory.

    It may have to step while the session of the user does something else, or on behalf of another rank.

    Args:
        local: the local optimizer.

    Attributes:
        optimizer: that one.

    Raises:
        ValueError: a hyper-parameter is a tensor, which belongs to the graph of the user.
    """

    follows_rate = False

    def __init__(self, local: tf.compat.v1.train.Optimizer) -> None:
        for name, value in vars(local).items():
            if isinstance(value, (tf.Tensor, tf.Variable)):
                raise ValueError(
                    f"The optimizer of an asynchronous center is outside of the graph, where {name.lstrip('_')!r} of "
                    f"{type(local).__name__}, a tensor, has no value: pass a number"
                )
        self.optimizer = local

    def shapes(self, centers: Sequence[tuple[str, tuple[int, ...], str]]) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the variables that the optimizer has over such centers: make one and look."""
        self._make([(shape, dtype) for _, shape, dtype in centers])
        return [(tuple(variable.shape), variable.dtype.base_dtype.name) for variable in self._state]

    def bind_host(
        self, parameters: Sequence[Any], centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> None:
        """Make the graph for these centers."""
        self._make([(center.shape, center.dtype.name) for center in centers])

    def step_host(self, centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
        """Move the arrays."""
        fed = dict(zip(self._placeholders, (*centers, *gradients), strict=True))
        self._session.run(self._assigned, fed)
        self._session.run(self._applied, fed)
        for array, value in zip(centers, self._session.run(self._results), strict=True):
            array[...] = value

    def variables(self) -> list[Any]:
        """Return none: they are not in the graph of the user."""
        return []

    def state(self) -> list[np.ndarray]:
        """Return copies of the slots and other variables."""
        return list(self._session.run(self._read))

    def load_state(self, state: Sequence[np.ndarray]) -> None:
        """Assign what :meth:`state` returned."""
        self._session.run(self._loaded, dict(zip(self._values, state, strict=True)))

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters that are numbers."""
        return CenterOptimizer(self.optimizer).settings()

    def hyperparameters(self) -> None:
        """Return None: what is a number is the same on all ranks."""

    def take_rate(self, given: Any, maximum: Any) -> None:
        """Do nothing: hyper-parameters are those of this rank."""

    def _make(self, centers: Sequence[tuple[tuple[int, ...], str]]) -> None:
        graph, v1 = tf.Graph(), tf.compat.v1
        with graph.as_default(), tf.device("CPU:0"):
            self._centers = [
                v1.Variable(tf.zeros(shape, dtype), trainable=False, use_resource=True) for shape, dtype in centers
            ]
            self._placeholders = [v1.placeholder(dtype, shape) for shape, dtype in (*centers, *centers)]
            size = len(centers)
            self._assigned = [v.assign(p) for v, p in zip(self._centers, self._placeholders[:size], strict=True)]
            optimizer = CenterOptimizer(self.optimizer).optimizer
            self._applied = tf.group()
            if centers:
                pairs = list(zip(self._placeholders[size:], self._centers, strict=True))
                self._applied = optimizer.apply_gradients(pairs)
            self._state = list(optimizer.variables()) if centers else []
            self._read = [variable.read_value() for variable in self._state]
            self._values = [v1.placeholder(variable.dtype.base_dtype, variable.shape) for variable in self._state]
            self._loaded = [v.assign(value) for v, value in zip(self._state, self._values, strict=True)]
            self._results = [center.read_value() for center in self._centers]
            initialized = v1.global_variables_initializer()
        # Threads of its own: it runs while those of the user's session may all wait for it.
        config = v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
        self._session = v1.Session(graph=graph, config=config)
        self._session.run(initialized)
