"""The variables of a TensorFlow 1 graph as a replica, and the optimizers of its center."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Number
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.keras.model import NamedVariables
from hvd_periodic.tensorflow.contrib_opt.getters import GLOBAL_VARIABLE_NAME, belongs_to_optimizer
from hvd_periodic.tensorflow.contrib_opt.unexchanged import UnexchangedVariables
from hvd_periodic.tensorflow.outer import VariableOuterOptimizer
from hvd_periodic.tensorflow.progress import NewVariable
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.store import ArrayStore
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import Store


class GraphReplica(VariableReplica):
    """The local replicas of a graph, whose centers and companions exist already.

    Python computes with arrays while a session waits for it; graphs compute with tensors.

    Attributes:
        unexchanged_variables: the variables that no exchange touches.
    """

    def __init__(
        self,
        named: NamedVariables,
        vectors: dict[str, list[tf.Variable]],
        new_variable: NewVariable,
        unexchanged: UnexchangedVariables,
    ) -> None:
        self._vectors, self.unexchanged_variables = vectors, unexchanged
        super().__init__(named, new_variable)

    @property
    def space(self) -> VectorSpace[Any]:
        """Vector operations on arrays; on tensors while a graph is built."""
        return self._host_space if tf.executing_eagerly() else self.tensor_space

    @space.setter
    def space(self, space: VectorSpace[Any]) -> None:
        self._host_space = space

    def new_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the existing variables of this vector, or new ones."""
        if name not in self._vectors or not layout.specs:  # Empty if the center is on another rank.
            return super().new_store(layout, name)
        return ArrayStore(layout, self._vectors[name], self.values)

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return :meth:`new_store`: the vectors of a session are not offloaded."""
        return self.new_store(layout, name)

    def digests(self) -> dict[str, bytes]:
        """Return digests of the variables that no exchange touches, if the session has passed their values."""
        return self.unexchanged_variables.digests()

    def advice_on_difference(self, name: str) -> str:
        """Return the argument to write for one variable."""
        return self.unexchanged_variables.advice(name)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Any]]) -> int:
        """Return whether there are gradients; the graph, not a function, applies the local rule."""
        return int(any(gradient is not None for gradient in self.gradients))


class GraphOuterOptimizer(VariableOuterOptimizer):
    """A TensorFlow 1 optimizer that moves the center, with its state in variables of the session.

    Attributes:
        given: values of the hyper-parameters that only the session knows, in the order of :meth:`in_session`.
    """

    given: Sequence[np.ndarray] = ()
    _moved: Any
    _in_python: HostCenterOptimizer | None = None

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Create the variables of the optimizer outside of conditionals."""
        self._center, self._gradient = center, gradient
        self._owned = [owner for owner, _, _ in center.layout.sources]
        self._moved.create(center.tensors())

    @property
    def is_in_session(self) -> bool:
        """Whether its state is in variables of the session; not so for an asynchronous center."""
        return isinstance(self._moved, CenterOptimizer)

    def state_variables(self) -> list[Any]:
        """Return the variables of the optimizer: slots by name and center, then others by name."""
        return _state_of(self._moved.optimizer, self._center.tensors())

    def in_session(self) -> dict[str, tf.Tensor]:
        """Return the hyper-parameters that are not numbers, by name, as tensors of the graph being built."""
        return {
            name: tf.convert_to_tensor(value() if callable(value) else value)
            for name, value in vars(self._moved.optimizer).items()
            if _is_given(name, value)
        }

    def step(self, without: Set[int] = frozenset()) -> None:
        """Apply the gradient to the center; the centers ``without`` a gradient keep their values and slots."""
        values = self._values
        if not self.is_in_session:
            super().step(without)
            return
        if not self._center.tensors():
            return
        variables = [*self._center.tensors(), *self.state_variables()]
        arrays = [values.read(variable).reshape(variable.shape.as_list()) for variable in variables]
        gradients = [values.read(gradient).reshape(gradient.shape.as_list()) for gradient in self._gradient.tensors()]
        owners = self._owned * (1 + len(self._moved.optimizer.get_slot_names()))
        for i, (variable, array) in enumerate(zip(variables, self._stepped(arrays, gradients), strict=True)):
            if i >= len(owners) or owners[i] not in without:
                values.write(variable, np.asarray(array).reshape(-1))

    def _stepped(self, arrays: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Take a step in Python; ``arrays`` and the result hold the centers, then the state."""
        centers, state = [np.array(array) for array in arrays[: len(gradients)]], arrays[len(gradients) :]
        if self._in_python is None:
            optimizer = self._moved.optimizer
            names = [name for name, value in vars(optimizer).items() if _is_given(name, value)]
            kinds = [(value.dtype.name, value.shape) for value in self.given]
            self._in_python = HostCenterOptimizer(optimizer, dict(zip(names, kinds, strict=True)))
            self._in_python.bind_host([], centers, gradients)
        self._in_python.load_state(state)
        self._in_python.step_host(centers, gradients, self.given)
        return [*centers, *self._in_python.state()]

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters that are numbers; only a session can read tensors."""
        return {
            f"{name.lstrip('_')} of the center optimizer": value
            for name, value in sorted(vars(self._moved.optimizer).items())
            if isinstance(value, Number) and name != "_use_locking"
        }

    def hyperparameters(self) -> None:
        """Return None: all ranks have the same numbers."""

    def follow(self, settings: Any) -> None:
        """Do nothing: each rank uses its own hyper-parameters."""


class CenterOptimizer:
    """A copy of the local optimizer over the center variables, with its own slots and other variables.

    ``tf.contrib.opt`` applied the local optimizer itself, so that Adam's powers of β advanced at local steps as well.

    Attributes:
        optimizer: the copy.
        others: the clones of this object, one per fragment of the parameters.
    """

    def __init__(self, local: tf.compat.v1.train.Optimizer) -> None:
        self._local = local
        self.others: list[CenterOptimizer] = []
        self.optimizer = _unused(local)

    def clone(self) -> CenterOptimizer:
        """Return a clone without a center."""
        self.others.append(CenterOptimizer(self._local))
        return self.others[-1]

    def variables(self) -> list[Any]:
        """Return the slots and other variables of this optimizer and its clones."""
        return [variable for each in (self, *self.others) for variable in each.optimizer.variables()]

    def create(self, centers: Sequence[tf.Variable]) -> None:
        """Create slots and other variables outside of conditionals.

        Scripts for ``tf.contrib.opt``, including its own tests, assume that global variables must be local if their
        names contain "beta", or the optimizer's name outside of the center. These variables therefore get other names.
        """

        def rename(make: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
            name = arguments.get("name") or ""
            if not name.startswith(f"{GLOBAL_VARIABLE_NAME}/"):
                own = name.replace("beta", "decay")
                arguments["name"] = f"{GLOBAL_VARIABLE_NAME}/{self.optimizer.get_name()}/{own}"
            return make(**arguments)

        if not centers:  # The centers are on another rank.
            return
        with tf.compat.v1.name_scope(None), tf.variable_creator_scope(rename):
            self.optimizer._create_slots(list(centers))
        belongs_to_optimizer(*self.optimizer.variables())


class HostCenterOptimizer:
    """A copy of the local optimizer in a separate graph and session, for a center in host memory.

    It may have to step while the user's session does something else, or on behalf of another rank.

    Args:
        local: the local optimizer.
        given: dtypes and shapes of the hyper-parameters that every step gets, by attribute name.

    Raises:
        ValueError: a hyper-parameter that is not ``given`` is a tensor, which belongs to the user's graph.
    """

    def __init__(
        self,
        local: tf.compat.v1.train.Optimizer,
        given: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({}),
    ) -> None:
        self._given = given
        for name, value in vars(local).items():
            if isinstance(value, (tf.Tensor, tf.Variable)) and _is_given(name, value) and name not in given:
                raise ValueError(
                    f"The optimizer of an asynchronous center is outside of the graph, where {name.lstrip('_')!r} of "
                    f"{type(local).__name__}, a tensor, has no value: pass a number"
                )
        self.optimizer = local

    def shapes(self, centers: Sequence[tuple[str, tuple[int, ...], str]]) -> list[tuple[tuple[int, ...], str]]:
        """Create the graph for such centers; return shapes and dtypes of the optimizer's variables."""
        self._make([(shape, dtype) for _, shape, dtype in centers])
        return [(tuple(variable.shape), variable.dtype.base_dtype.name) for variable in self._state]

    def bind_host(
        self, parameters: Sequence[Any], centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> None:
        """Create the graph for these centers."""
        self._make([(center.shape, center.dtype.name) for center in centers])

    def step_host(
        self, centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray], given: Sequence[np.ndarray] = ()
    ) -> None:
        """Apply gradients to the centers, in place."""
        fed = dict(zip(self._placeholders, (*centers, *gradients, *given), strict=True))
        self._session.run(self._assigned, fed)
        self._session.run(self._applied, fed)
        for array, value in zip(centers, self._session.run(self._results), strict=True):
            array[...] = value

    def variables(self) -> list[Any]:
        """Return no variables: they are not in the user's graph."""
        return []

    def state(self) -> list[np.ndarray]:
        """Return copies of the slots and other variables."""
        return list(self._session.run(self._read))

    def load_state(self, state: Sequence[np.ndarray]) -> None:
        """Assign what :meth:`state` returned."""
        self._session.run(self._loaded, dict(zip(self._values, state, strict=True)))

    def _make(self, centers: Sequence[tuple[tuple[int, ...], str]]) -> None:
        graph, v1 = tf.Graph(), tf.compat.v1
        with graph.as_default(), tf.device("CPU:0"):
            self._centers = [
                v1.Variable(tf.zeros(shape, dtype), trainable=False, use_resource=True) for shape, dtype in centers
            ]
            self._placeholders = [v1.placeholder(dtype, shape) for shape, dtype in (*centers, *centers)]
            given = {name: v1.placeholder(dtype, shape) for name, (dtype, shape) in self._given.items()}
            size = len(centers)
            self._assigned = [v.assign(p) for v, p in zip(self._centers, self._placeholders[:size], strict=True)]
            optimizer = _unused(self.optimizer)
            vars(optimizer).update(given)
            self._applied = tf.group()
            if centers:
                pairs = list(zip(self._placeholders[size:], self._centers, strict=True))
                self._applied = optimizer.apply_gradients(pairs)
            self._placeholders += given.values()
            self._state = _state_of(optimizer, self._centers) if centers else []
            self._read = [variable.read_value() for variable in self._state]
            self._values = [v1.placeholder(variable.dtype.base_dtype, variable.shape) for variable in self._state]
            self._loaded = [v.assign(value) for v, value in zip(self._state, self._values, strict=True)]
            self._results = [center.read_value() for center in self._centers]
            initialized = v1.global_variables_initializer()
        # Separate threads: all threads of the user's session may be waiting for this one.
        config = v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
        self._session = v1.Session(graph=graph, config=config)
        self._session.run(initialized)


def _unused(local: tf.compat.v1.train.Optimizer) -> Any:
    """Return a copy of an optimizer without slots and other variables."""
    made = copy.copy(local)
    made._slots = {}
    made._non_slot_dict = {}
    made._deferred_slot_restorations = {}
    made._name = f"center_{local.get_name()}"
    return made


def _is_given(name: str, value: object) -> bool:
    """Return whether an attribute of an optimizer is a hyper-parameter whose value only a session knows."""
    if name.endswith("_tensor") or name.endswith("_t"):  # computed by the optimizer from a hyper-parameter
        return False
    return callable(value) or isinstance(value, (tf.Tensor, tf.Variable))


def _state_of(optimizer: tf.compat.v1.train.Optimizer, centers: Sequence[tf.Variable]) -> list[Any]:
    """Return the variables of an optimizer: slots by name and center, then others by name."""
    slots = [optimizer.get_slot(center, name) for name in optimizer.get_slot_names() for center in centers]
    others = sorted(optimizer._non_slot_dict.items(), key=lambda item: str(item[0][0]))
    return [*slots, *(variable for _, variable in others)]
