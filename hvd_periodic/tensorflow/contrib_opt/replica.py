"""Variables of a TensorFlow 1 graph as a replica."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.tensorflow.contrib_opt.getters import GLOBAL_VARIABLE_NAME, belongs_to_optimizer
from hvd_periodic.tensorflow.outer import VariableOuterOptimizer
from hvd_periodic.tensorflow.progress import NewVariable
from hvd_periodic.tensorflow.replica import NamedVariables, VariableReplica
from hvd_periodic.tensorflow.store import ArrayStore
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import Store


class GraphReplica(VariableReplica):
    """Local replicas of a graph, whose centers and companions exist already.

    Python computes with arrays, while a session waits for it; graphs with tensors.

    Args:
        named: the variables by role.
        vectors: the variables of the algorithm's state that exist, by name.
        new_variable: makes those that do not.
    """

    def __init__(
        self,
        named: NamedVariables,
        vectors: dict[str, list[tf.Variable]],
        new_variable: NewVariable,
    ) -> None:
        self._vectors = vectors
        super().__init__(named, new_variable)

    @property
    def space(self) -> VectorSpace[Any]:
        """The verbs on arrays; while a graph is built, on tensors."""
        return self._host_space if tf.executing_eagerly() else self.tensor_space

    @space.setter
    def space(self, space: VectorSpace[Any]) -> None:
        self._host_space = space

    def new_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the variables that exist for this vector, or new ones."""
        if name not in self._vectors or not layout.specs:  # A center that lives elsewhere has no part here.
            return super().new_store(layout, name)
        return ArrayStore(layout, self._vectors[name], self.values)

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return the same."""
        return self.new_store(layout, name)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Any]]) -> int:
        """Say whether there are gradients; what the local rule makes of them is not part of a function."""
        return int(any(gradient is not None for gradient in self.gradients))


class GraphOuterOptimizer(VariableOuterOptimizer):
    """An optimizer of TensorFlow 1 that moves the center, whose state is in variables of the session.

    Attributes:
        given: the values of the hyper-parameters that have one in the session only, as :meth:`in_session` names them.
    """

    given: Sequence[np.ndarray] = ()
    _moved: Any
    _in_python: HostCenterOptimizer | None = None

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Create what the optimizer needs, before a conditional does."""
        self._center, self._gradient = center, gradient
        self._moved.create(center.tensors())

    @property
    def is_in_session(self) -> bool:
        """Whether its state is in variables of the session; that of an asynchronous center is not."""
        return isinstance(self._moved, CenterOptimizer)

    def state_variables(self) -> list[Any]:
        """Return the variables of the optimizer: slots by name and center, then others by name."""
        return _state_of(self._moved.optimizer, self._center.tensors())

    def in_session(self) -> dict[str, tf.Tensor]:
        """Return the hyper-parameters that are no numbers, as tensors of the graph that is being built, by name."""
        return {
            name: tf.convert_to_tensor(value() if callable(value) else value)
            for name, value in vars(self._moved.optimizer).items()
            if _is_given(name, value)
        }

    def step(self) -> None:
        """Move the center by its gradient."""
        values = self._values
        if not self.is_in_session or values is None:
            super().step()
            return
        if not self._center.tensors():
            return
        variables = [*self._center.tensors(), *self.state_variables()]
        arrays = [values.read(variable).reshape(variable.shape.as_list()) for variable in variables]
        gradients = [values.read(gradient).reshape(gradient.shape.as_list()) for gradient in self._gradient.tensors()]
        for variable, array in zip(variables, self._stepped(arrays, gradients), strict=True):
            values.write(variable, np.asarray(array).reshape(-1))

    def _stepped(self, arrays: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the centers and the state after a step, given those before it, the centers first."""
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

    def followed(self) -> list[Any]:
        """Return that nothing is read: hyper-parameters are numbers, or given."""
        return []


class CenterOptimizer:
    """A copy of the local optimizer over the center variables, with slots and non-slot variables of its own.

    ``tf.contrib.opt`` applied the local optimizer itself, so that Adam's powers of β advanced at local steps as well.

    Args:
        local: the local optimizer.

    Attributes:
        optimizer: the copy.
        others: like this, each for a fragment of the parameters.
    """

    follows_rate = False

    def __init__(self, local: tf.compat.v1.train.Optimizer) -> None:
        self._local = local
        self.others: list[CenterOptimizer] = []
        self.optimizer = copy.copy(local)
        self.optimizer._slots = {}
        self.optimizer._non_slot_dict = {}
        self.optimizer._deferred_slot_restorations = {}
        self.optimizer._name = f"center_{local.get_name()}"

    def clone(self) -> CenterOptimizer:
        """Return one like this that has no center yet."""
        self.others.append(CenterOptimizer(self._local))
        return self.others[-1]

    def variables(self) -> list[Any]:
        """Return the slots and other variables of all of them."""
        return [variable for each in (self, *self.others) for variable in each.optimizer.variables()]

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

        if not centers:  # They are on another rank.
            return
        with tf.compat.v1.name_scope(None), tf.variable_creator_scope(rename):
            self.optimizer._create_slots(list(centers))
        belongs_to_optimizer(*self.optimizer.variables())

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
        given: dtypes and shapes of the hyper-parameters that every step is given, by the names of the attributes.

    Attributes:
        optimizer: that one.

    Raises:
        ValueError: another hyper-parameter is a tensor, which belongs to the graph of the user.
    """

    follows_rate = False

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
        """Return shape and dtype of the variables that the optimizer has over such centers: make one and look."""
        self._make([(shape, dtype) for _, shape, dtype in centers])
        return [(tuple(variable.shape), variable.dtype.base_dtype.name) for variable in self._state]

    def bind_host(
        self, parameters: Sequence[Any], centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> None:
        """Make the graph for these centers."""
        self._make([(center.shape, center.dtype.name) for center in centers])

    def step_host(
        self, centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray], given: Sequence[np.ndarray] = ()
    ) -> None:
        """Move the arrays."""
        fed = dict(zip(self._placeholders, (*centers, *gradients, *given), strict=True))
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
            given = {name: v1.placeholder(dtype, shape) for name, (dtype, shape) in self._given.items()}
            size = len(centers)
            self._assigned = [v.assign(p) for v, p in zip(self._centers, self._placeholders[:size], strict=True)]
            optimizer = CenterOptimizer(self.optimizer).optimizer
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
        # Threads of its own: it runs while those of the user's session may all wait for it.
        config = v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
        self._session = v1.Session(graph=graph, config=config)
        self._session.run(initialized)


def _is_given(name: str, value: object) -> bool:
    """Return whether an attribute of an optimizer is a hyper-parameter that has its value in a session only."""
    if name.endswith("_tensor") or name.endswith("_t"):  # what an optimizer makes of its hyper-parameters by itself
        return False
    return callable(value) or isinstance(value, (tf.Tensor, tf.Variable))


def _state_of(optimizer: tf.compat.v1.train.Optimizer, centers: Sequence[tf.Variable]) -> list[Any]:
    """Return the variables of an optimizer: slots by name and center, then others by name."""
    slots = [optimizer.get_slot(center, name) for name in optimizer.get_slot_names() for center in centers]
    others = sorted(optimizer._non_slot_dict.items(), key=lambda item: str(item[0][0]))
    return [*slots, *(variable for _, variable in others)]
