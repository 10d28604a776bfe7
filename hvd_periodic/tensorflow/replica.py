"""The variables of one rank as a replica."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.keras.model import Named, NamedVariables
from hvd_periodic.keras.replica import NamedReplica
from hvd_periodic.replica import SOME
from hvd_periodic.tensorflow.host import in_session
from hvd_periodic.tensorflow.host_values import HostValues, blocks_of, empty, is_in_host_memory
from hvd_periodic.tensorflow.leaves import Tensors
from hvd_periodic.tensorflow.progress import NewVariable
from hvd_periodic.tensorflow.space import HostSpace, TensorSpace
from hvd_periodic.tensorflow.store import ArrayStore, CenterStore, VariableStore, array_of, layout_of
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Bucket, Layout
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import FlatStore, Store


class VariableReplica(NamedReplica):
    """Variables of one rank, which stay where they are.

    Args:
        named: the variables by role.
        new_variable: creates the variables of the algorithm's state.
        bucket_bytes: upper bound of the bytes in one collective.
        forget_variable: called with the name of a variable that is no longer used.

    Attributes:
        values: reads and writes the variables while Python exchanges for a compiled step.
        tensor_space: vector operations for the local rule, which a step runs on tensors.
        gradients: gradients of all trained variables, in their order; the algorithm's local rule reads those of
            parameters and may replace them.
        with_gradients: indices of trained variables that have had a gradient, in a step that ran or was compiled.
        positions: the index of every parameter among the trained variables.

    Raises:
        TypeError: a parameter cannot be averaged.
        ValueError: there are no parameters, or a shape is not fixed.
    """

    reuses_memory = False
    leaves = Tensors()
    framework = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"

    def __init__(
        self,
        named: NamedVariables,
        new_variable: NewVariable,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        forget_variable: Callable[[str], object] = lambda name: None,
    ) -> None:
        for name, variable in named.parameters:
            if not variable.shape.is_fully_defined():
                raise ValueError(f"Variable {name!r} must have a fixed shape. Received: {variable.shape}")
        super().__init__(named, bucket_bytes)
        self.gradients: list[Any] = [None] * self.trained
        self.with_gradients: set[int] = set()
        self.values = HostValues()
        exchanged = (named.parameters, named.following, named.averaged, named.counted, named.followed)
        here = all(is_in_host_memory(variable) for role in exchanged for _, variable in role)
        self.in_host_memory = here or in_session()  # A session passes its variables' values to Python.
        self.reports_work = not in_session()
        self.tensor_space = TensorSpace()
        self.space: VectorSpace[Any] = HostSpace(self.values) if self.in_host_memory else self.tensor_space
        self._new_variable, self._forget_variable = new_variable, forget_variable
        self._made: dict[str, int] = {}
        self.make_stores()

    def dtype_of(self, variable: tf.Variable) -> str:
        """Return the name of a variable's dtype."""
        return str(variable.dtype.base_dtype.name)

    def to_array(self, variable: tf.Variable) -> np.ndarray:
        """Return the values; eagerly."""
        return np.asarray(variable.numpy())

    def constrain(self, center: Store[Any]) -> None:
        """Apply the parameters' constraints to the parameters, and to the center if it is on this rank."""
        if not any(self.named.constraints):
            return
        self.values.release()
        for variables in (self.parameters.tensors(), center.tensors()):
            for variable, constraint in zip(variables, self.named.constraints, strict=False):
                if constraint is not None:
                    variable.assign(tf.cast(constraint(tf.convert_to_tensor(variable)), variable.dtype))

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return the parameters, among the given ones, that have had a gradient."""
        return {i for i in among if self.positions[i] in self.with_gradients}

    def with_gradient_now(self, among: Set[int]) -> Set[int]:
        """Return the parameters, among the given ones, that have a gradient in this step or in the one compiled now."""
        return {i for i in among if self.gradients[self.positions[i]] is not None}

    def mark_rows(self, marks: Store[Any]) -> None:
        """Mark the rows in which a dense gradient is not 0, and all that a sparse one names, in a graph or eagerly."""
        index_of = {name: position for (name, _), position in zip(self.named.parameters, self.positions, strict=True)}
        for spec, marked in zip(marks.layout.specs, marks.tensors(), strict=True):
            gradient = self.gradients[index_of[spec.name]]
            if isinstance(gradient, tf.IndexedSlices):
                ones = tf.ones_like(gradient.indices, dtype=marked.dtype)
                marked.scatter_update(tf.IndexedSlices(ones, gradient.indices))
            elif gradient is not None:
                rows = tf.reshape(gradient, [spec.shape[0], -1])
                touched = tf.reduce_any(tf.not_equal(rows, tf.zeros([], rows.dtype)), axis=1)
                marked.assign(tf.maximum(marked, tf.cast(touched, marked.dtype)))

    def some_of(self, tensor: Any) -> np.ndarray:
        """Return a sample of the elements; eagerly."""
        held = isinstance(tensor, tf.Variable) and self.values.holds(tensor)
        flat = tf.reshape(self.values.read(tensor) if held else tensor, [-1])
        flat = flat[:: max(1, math.prod(tensor.shape) // SOME)]
        return tf.cast(flat, tf.float64).numpy()

    def derived_from(self) -> bytes:
        """Return a digest of the weights from which layers derive values; empty if there are none."""
        weights = [weight.numpy().tobytes() for layer in self.named.deriving for weight in layer.weights]
        return hashlib.sha256(b"".join(weights)).digest() if weights else b""

    def follow_weights(self) -> None:
        """Make layers recompute values that they derive from their weights."""
        if self.named.deriving:
            self.values.release()
        super().follow_weights()

    def new_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return variables of zeros, one per variable of the layout."""
        return self._stored(layout, self._new_variables(layout, name), VariableStore)

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return such variables that are updated in place."""
        return self._stored(layout, self._new_variables(layout, name), CenterStore)

    def new_snapshot_store(self, layout: Layout, name: str) -> Store[Any]:
        """Return arrays, or variables on the device that are unknown to compiled steps."""
        if self.in_host_memory:
            return self.new_temporary_store(layout)
        zeros = [tf.Variable(tf.zeros(spec.shape, spec.kind), trainable=False) for spec in layout.specs]
        return VariableStore(layout, zeros)

    def _new_variables(self, layout: Layout, name: str) -> list[tf.Variable]:
        self._made[name] = len(layout.specs)
        return [
            self._new_variable(f"{name}.{i}", spec.shape, tf.as_dtype(spec.kind), 0)
            for i, spec in enumerate(layout.specs)
        ]

    def drop_store(self, name: str) -> None:
        """Stop saving the variables of a store with the others."""
        for i in range(self._made.pop(name, 0)):
            self._forget_variable(f"{name}.{i}")

    def new_temporary_store(self, layout: Layout) -> Store[Any]:
        """Return arrays, since states are saved as numpy arrays."""
        return FlatStore(layout, lambda kind, size: np.zeros(size, kind))

    def scratch(self, bucket: Bucket, slot: int) -> Any:
        """Return a buffer for a message in host memory; otherwise None, since TensorFlow allocates tensors itself."""
        return empty(bucket.size, bucket.kind) if self.in_host_memory and slot % 2 else None

    def blocks(self, bucket: Bucket) -> Sequence[Bucket]:
        """Return blocks that are whole variables, so that only messages are concatenated; small ones share a block."""
        return blocks_of(bucket)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Any]]) -> int:
        """Run the local rule on one variable at a time; it updates the state in place."""
        vectors = {key: store.tensors() for key, store in worker.items()}
        present = 0
        for i, (position, (_, variable)) in enumerate(zip(self.positions, self.named.parameters, strict=True)):
            gradient = self.gradients[position]
            if gradient is not None:
                present = 1
                of_variable = {key: variables[i] for key, variables in vectors.items()}
                self.gradients[position], _ = algorithm.local(self.tensor_space, variable, gradient, of_variable)
        return present

    def discard_gradients(self) -> None:
        """Replace the gradients with zeros, since Keras needs some for a step; does nothing in a graph."""
        if not tf.executing_eagerly():
            return
        self.gradients = [
            None if gradient is None else tf.zeros_like(tf.convert_to_tensor(gradient)) for gradient in self.gradients
        ]

    def to_host(self, value: Any, bucket: Bucket) -> np.ndarray:
        """Return an eager tensor as an array, or the array itself."""
        return np.asarray(value)

    def from_host(self, array: np.ndarray, bucket: Bucket) -> Any:
        """Return a tensor, or the array itself in host memory."""
        return array if self.in_host_memory else tf.constant(array)

    def to_bytes(self, value: Any) -> bytes:
        """Return the raw memory."""
        return np.asarray(value).tobytes()

    def save(self, store: Store[Any]) -> dict[str, Any]:
        """Return copies by name as numpy arrays, or views if they are lent."""
        return {spec.name: array_of(v) for spec, v in zip(store.layout.specs, store.tensors(), strict=True)}

    def load(self, store: Store[Any], tensors: dict[str, Any]) -> None:
        """Copy by name."""
        for spec, variable in zip(store.layout.specs, store.tensors(), strict=True):
            if isinstance(variable, np.ndarray):
                variable[...] = tensors[spec.name]
            else:
                variable.assign(tensors[spec.name])

    def store_of(self, named: Named) -> Store[Any]:
        """Return named variables as a store."""
        return self._stored(layout_of(named, self.bucket_bytes), [variable for _, variable in named], VariableStore)

    def _stored(self, layout: Layout, variables: Sequence[tf.Variable], on_device: type[VariableStore]) -> Store[Any]:
        return ArrayStore(layout, variables, self.values) if self.in_host_memory else on_device(layout, variables)
