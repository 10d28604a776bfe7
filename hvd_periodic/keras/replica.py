"""The variables of a Keras model as a replica."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence, Set
from typing import Any

import keras
import numpy as np

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.buffers import NONE_AVERAGED, is_of_random_generator
from hvd_periodic.keras.model import Named, NamedVariables
from hvd_periodic.keras.store import HostStore, Variables
from hvd_periodic.numpy.replica import HostReplica
from hvd_periodic.numpy.sgd import Array
from hvd_periodic.replica import SOME, Replica
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Layout, TensorSpec
from hvd_periodic.vectors.store import Store

REAL = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of variables that can be trained."""


class NamedReplica(Replica[Any]):
    """Base of replicas of named variables.

    Args:
        named: the variables by role.
        bucket_bytes: upper bound of the bytes in one collective.

    Attributes:
        positions: the index of every parameter among the trained variables.
        trained: number of trained variables.

    Raises:
        TypeError: a parameter cannot be averaged.
        ValueError: there are no parameters.
    """

    how_to_exclude = (
        "Set trainable = False on their layers before the optimizer is made, and choose how they are exchanged: "
        "buffers={'PATTERN': 'average'}. If another optimizer trains them, pass as `model` what this one trains"
    )
    how_to_exchange = (
        "Choose how they are exchanged: buffers={'PATTERN': 'average'}, or 'local' if each rank is to have its own"
    )

    def __init__(self, named: NamedVariables, bucket_bytes: int) -> None:
        for name, variable in named.parameters:
            if self.dtype_of(variable) not in REAL:
                raise TypeError(
                    f"Variable {name!r} must be float64, float32, bfloat16 or float16. Received: "
                    f"{self.dtype_of(variable)}"
                )
        if not any(math.prod(variable.shape) for _, variable in named.parameters):
            raise ValueError(
                "At least one trainable variable with elements has to take part. Received: "
                f"{len(named.parameters)} variables, none of them with elements"
                f"{'' if named.positions is None else NONE_AVERAGED}"
            )
        self.named, self.bucket_bytes = named, bucket_bytes
        self.positions: Sequence[int] = range(len(named.parameters)) if named.positions is None else named.positions
        self.trained = named.trained or len(named.parameters)
        self.local_names = [name for name, _ in named.own]
        self.keeps_own, self.present, self.tables = bool(named.own), named.present, named.tables

    def make_stores(self) -> None:
        """Make the stores of all roles."""
        named = self.named
        self.parameters: Store[Any] = self.store_of(named.parameters)
        self.buffers: Store[Any] | None = self.store_of(named.averaged) if named.averaged else None
        self.integers: Store[Any] | None = self.store_of(named.counted) if named.counted else None
        self.from_root: Store[Any] | None = self.store_of(named.followed) if named.followed else None
        self.parameters_from_root: Store[Any] | None = self.store_of(named.following) if named.following else None
        self.constants: Store[Any] | None = self.store_of(named.constants) if named.constants else None

    @abstractmethod
    def store_of(self, named: Named) -> Store[Any]:
        """Return named variables as a store."""

    @abstractmethod
    def dtype_of(self, variable: Any) -> str:
        """Return the name of a variable's dtype."""

    @abstractmethod
    def to_array(self, variable: Any) -> np.ndarray:
        """Return the values of a variable."""

    def facts(self) -> dict[str, object]:
        """Return shapes and dtypes by role; without paths, since Keras numbers them across all models of a process."""
        facts: dict[str, object] = {"bucket_bytes": self.bucket_bytes}
        roles = {
            "parameter": self.named.parameters,
            "parameter from the root": self.named.following,
            "buffer": self.named.averaged,
            "integer buffer": self.named.counted,
            "buffer from the root": self.named.followed,
            "constant": self.named.constants,
        }
        for role, pairs in roles.items():
            facts[f"number of {role}s"] = len(pairs)
            for i, (name, variable) in enumerate(pairs):
                last, shape = name.rpartition("/")[2], [int(length) for length in variable.shape]
                facts[f"{role} {i}"] = f"{last} {self.dtype_of(variable)}{shape}"
        if self.named.positions is not None:  # Names cannot tell which variables are whose.
            facts["places of parameters among the trained variables"] = list(self.named.positions)
        names = [name for name, _ in self.named.parameters]
        for kind, some in (("of those present", self.present), ("of which rows travel", self.tables)):
            if some:
                facts[f"places of parameters {kind}"] = [names.index(name) for name in some]
        return facts

    def changes(self) -> str | None:
        """Return None: variables keep dtype and shape."""
        return None

    def refuse_constraints(self, share: Layout, asynchronous: bool) -> None:
        """Raise a ValueError if constraints of the parameters cannot be applied to the center."""
        pairs = zip(self.named.parameters, self.named.constraints, strict=False)  # TensorFlow 1 has none
        constrained = [name for (name, _), constraint in pairs if constraint is not None]
        if not constrained:
            return
        if asynchronous:
            raise ValueError(
                f"Variable {constrained[0]!r} has a constraint, which a center of asynchronous exchange or of rounds "
                "with a quorum does not keep: exchange synchronously among all ranks, or train without constraints"
            )
        if share.specs and share is not self.parameters.layout:
            raise ValueError(
                f"Variable {constrained[0]!r} has a constraint, which needs the whole of it, and `center='sharded'` "
                "cuts it: use center='root' or 'replicated'"
            )

    def unexchanged(self) -> dict[str, Any]:
        """Return the weights that are constants by default."""
        return dict(self.named.unasked)

    def digests(self) -> dict[str, bytes]:
        """Return digests of the weights that are constants by default, without those of random generators."""
        return {
            name: hashlib.sha256(self.to_array(variable).tobytes()).digest()
            for name, variable in self.named.unasked
            if not is_of_random_generator(name)
        }

    def advice_on_difference(self, name: str) -> str:
        """Return the argument to write for one weight."""
        return f"To exchange it, pass buffers={{{name!r}: 'average'}}; to keep each rank's own, 'local'"

    def frozen(self) -> bytes:
        """Return a digest of the model's untrained weights, without statistics."""
        weights = [self.to_array(variable).tobytes() for _, variable in self.named.frozen]
        return hashlib.sha256(b"".join(weights)).digest() if weights else b""

    def follow_weights(self) -> None:
        """Make layers recompute values that they derive from their weights."""
        for layer in self.named.deriving:
            layer.finalize_state()


class HostedReplica(NamedReplica, HostReplica):
    """Keras variables of any backend, which are exchanged through host arrays; 16-bit ones have a float32 center.

    Args:
        named: the variables by role.
        values: reads and assigns them.
        bucket_bytes: upper bound of the bytes in one collective.
    """

    may_be_left_out = False  # It would need a new state of its local optimizer, which is not reached from here.
    framework = f"Keras {keras.__version__} on {keras.backend.backend()}"

    def __init__(self, named: NamedVariables, values: Variables, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        super().__init__(named, bucket_bytes)
        self._values = values
        self.make_stores()

    def store_of(self, named: Named) -> Store[Array]:
        """Return named variables as a store."""
        specs = []
        for name, variable in named:
            kind = np.dtype(_accumulation_dtype(variable.dtype))
            specs.append(TensorSpec(name, tuple(variable.shape), kind.name, kind.itemsize))
        return HostStore(Layout(specs, self.bucket_bytes), [variable for _, variable in named], self._values)

    def dtype_of(self, variable: Any) -> str:
        """Return the name of a variable's dtype."""
        return str(variable.dtype)

    def to_array(self, variable: Any) -> np.ndarray:
        """Return the values of a variable."""
        return self._values.read(variable)

    def constrain(self, center: Store[Array]) -> None:
        """Apply the parameters' constraints to the parameters, and to the center if it is on this rank."""
        if not any(self.named.constraints):
            return
        for (_, variable), constraint in zip(self.named.parameters, self.named.constraints, strict=True):
            if constraint is not None:
                self._values.write(variable, _constrained(self._values.read(variable), constraint))
        for array, constraint in zip(center.tensors(), self.named.constraints, strict=False):  # none where it is not
            if constraint is not None:
                array[...] = _constrained(array, constraint)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Array]]) -> int:
        """Return 0: between batches, no gradients are left."""
        return 0

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return all parameters: which of them have gradients is not known between batches."""
        return among

    def with_gradient_now(self, among: Set[int]) -> Set[int]:
        """Return which of some parameters had a gradient in the batch that has just ended; with Keras on PyTorch."""
        variables = self.parameters.originals()
        return {i for i in among if variables[i].value.grad is not None}

    def some_of(self, tensor: Any) -> np.ndarray:
        """Return some elements of an array, or of a variable."""
        flat = (tensor if isinstance(tensor, np.ndarray) else self.to_array(tensor)).reshape(-1)
        return np.array(flat[:: max(1, flat.size // SOME)], np.float64)

    def discard_gradients(self) -> None:
        """Do nothing: between batches, there are no gradients."""


def _constrained(array: Array, constraint: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(constraint(keras.ops.convert_to_tensor(array))))


def _accumulation_dtype(dtype: str) -> str:
    """Return the dtype of center and accumulators: a 16-bit center does not move under a small rate."""
    if dtype in ("float16", "bfloat16"):
        return "float32"
    return "int64" if dtype == "bool" else dtype
