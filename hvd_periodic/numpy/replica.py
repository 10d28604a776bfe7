"""Replicas on which numpy computes, and named numpy arrays as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.numpy.complex_numbers import ComplexArrayStore, as_complex, as_real
from hvd_periodic.numpy.sgd import Array
from hvd_periodic.participation import (
    EXCHANGED,
    NONE_AVERAGED,
    Broadcast,
    Policies,
    by_policy,
    facts_of,
    participation_of,
)
from hvd_periodic.participation.named import unique_pairs
from hvd_periodic.replica import SOME, Replica
from hvd_periodic.spellings import renamed
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Bucket, Layout, TensorSpec
from hvd_periodic.vectors.lending import lends
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import FlatStore, PackedStore, Store

NamedArrays = Mapping[str, Array] | Iterable[tuple[str, Array]]


class HostReplica(Replica[Array]):
    """A replica whose exchanges compute on numpy arrays, wherever its own values are."""

    in_host_memory = True
    space: VectorSpace[Array] = VectorSpace()

    def new_store(self, layout: Layout, name: str) -> Store[Array]:
        """Return flat arrays of zeros, one per dtype."""
        return FlatStore(layout, lambda kind, size: np.zeros(size, kind))

    def new_temporary_store(self, layout: Layout) -> Store[Array]:
        """Return a store as :meth:`new_store` does: arrays are the saved form."""
        return self.new_store(layout, "temporary")

    def scratch(self, bucket: Bucket, slot: int) -> None:
        """Return None: numpy allocates as it goes."""
        return

    def to_host(self, value: Array, bucket: Bucket) -> Array:
        """Return the array itself: it is in host memory."""
        return value

    def from_host(self, array: Array, bucket: Bucket) -> Array:
        """Return the array itself."""
        return array

    def to_bytes(self, value: Array) -> bytes:
        """Return the raw memory."""
        return value.tobytes()

    def save(self, store: Store[Array]) -> dict[str, Any]:
        """Return copies by name, or the arrays themselves if they are lent."""
        pairs = zip(store.layout.specs, store.tensors(), strict=True)
        return {spec.name: array if lends() else np.copy(array) for spec, array in pairs}

    def load(self, store: Store[Array], tensors: dict[str, Any]) -> None:
        """Copy by name."""
        for spec, array in zip(store.layout.specs, store.tensors(), strict=True):
            array[...] = tensors[spec.name]


class NumpyReplica(HostReplica):
    """Named numpy arrays as a replica; 16-bit arrays have a float32 center, complex arrays one of pairs of reals.

    Args:
        model: a dict, or (name, array) pairs.
        bucket_bytes: maximum bytes that one collective carries.
        parameters: policies of the arrays, see :class:`~hvd_periodic.options.Options`.
        former: names of arrays before ``adopt()``, which patterns may match as well.

    Attributes:
        names: names of all arrays, which the local optimizer steps.
        known_names: these and the former ones.
        arrays: the arrays.
        gradients: their gradients.
    """

    reports_work = True
    framework = f"numpy {np.__version__}"
    how_to_exclude = "Leave them out of the arrays that the optimizer is given"

    @renamed(named_parameters="model")
    def __init__(
        self,
        model: NamedArrays,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        parameters: Policies = None,
        former: Iterable[str] = (),
    ) -> None:
        pairs = model.items() if isinstance(model, Mapping) else model
        self.names, self.arrays = [], []
        for name, array in unique_pairs(pairs):
            if not isinstance(array, np.ndarray) or not _can_be_exchanged(array.dtype):
                found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(
                    f"Parameter {name!r} must be a numpy array of floating point, complex64 or complex128. "
                    f"Received: {found}"
                )
            self.names.append(name)
            self.arrays.append(array)
        named = list(zip(self.names, self.arrays, strict=True))
        participation = participation_of(parameters, named, former)
        self.known_names = {*self.names, *former}
        taking_part = [pair for pair in named if participation[pair[0]] in EXCHANGED]
        if not any(array.size for _, array in taking_part):
            found = f"{len(named)} parameters{NONE_AVERAGED}" if len(taking_part) < len(named) else "no parameters"
            raise ValueError(f"`model` must hold at least one element. Received: {found}")
        self.by_policy = by_policy(participation, named)
        following = [pair for pair in named if pair[0] in self.by_policy.get(Broadcast.name, ())]
        self.exchanged = [i for i, name in enumerate(self.names) if participation[name] in EXCHANGED]
        """Indices of the arrays on which the algorithm acts."""
        self.complex_names = [name for name, array in taking_part + following if np.iscomplexobj(array)]
        self.gradients: list[Array | None] = [None] * len(self.arrays)
        self._bucket_bytes = bucket_bytes
        self.parameters: Store[Array] = self.store_of(taking_part)
        self.parameters_from_root: Store[Array] | None = self.store_of(following) if following else None
        self._signature = [(array.shape, array.dtype) for array in self.arrays]

    def store_of(self, named: Sequence[tuple[str, Array]]) -> Store[Array]:
        """Return a store of named arrays, which stay where they are."""
        specs = []
        for name, real in ((name, as_real(array)) for name, array in named):
            kind = np.promote_types(real.dtype, np.float32)
            specs.append(TensorSpec(name, real.shape, kind.name, kind.itemsize))
        layout = Layout(specs, self._bucket_bytes)
        store = ComplexArrayStore if any(np.iscomplexobj(array) for _, array in named) else PackedStore
        return store(layout, [a for _, a in named], lambda bucket: np.empty(bucket.size, bucket.kind))

    def facts(self) -> dict[str, object]:
        """Return names, shapes and dtypes."""
        facts: dict[str, object] = dict(facts_of(self))
        for role, store in {"parameter": self.parameters, "parameter from the root": self.parameters_from_root}.items():
            arrays = [] if store is None else list(zip(store.layout.specs, store.originals(), strict=True))
            facts[f"number of {role}s"] = len(arrays)
            facts |= {f"{role} {i}": f"{spec.name} {a.dtype}{list(a.shape)}" for i, (spec, a) in enumerate(arrays)}
        return facts

    def changes(self) -> str | None:
        """Return a message about an array whose shape or dtype has changed, or None."""
        for name, array, signature in zip(self.names, self.arrays, self._signature, strict=True):
            if (array.shape, array.dtype) != signature:
                return f"Parameter {name!r} changed from {signature} to {(array.shape, array.dtype)} after construction"
        return None

    def local(self, algorithm: Algorithm, worker: dict[str, Store[Array]]) -> int:
        """Run the local rule on one array at a time; it replaces gradients and updates the state in place.

        Raises:
            RuntimeError: an array changed its shape or dtype.
        """
        if (problem := self.changes()) is not None:
            raise RuntimeError(problem)
        views = {key: store.tensors() for key, store in worker.items()}
        present = 0
        for i, position in enumerate(self.exchanged):
            g = self.gradients[position]
            if g is None:
                continue
            present = 1
            old, x = {key: tensors[i] for key, tensors in views.items()}, self.arrays[position]
            pairs = np.iscomplexobj(x)
            x, g = (as_real(x), as_real(np.asarray(g))) if pairs else (x, g)
            g, new = algorithm.local(self.space, x, g, old)
            self.gradients[position] = as_complex(g) if pairs else g
            for key, value in new.items():
                old[key][...] = value
        return present

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return the parameters that have a gradient."""
        return {i for i in among if self.gradients[self.exchanged[i]] is not None}

    def mark_rows(self, marks: Store[Array]) -> None:
        """Mark the rows in which a gradient is not 0."""
        gradients = dict(zip(self.names, self.gradients, strict=True))
        for spec, array in zip(marks.layout.specs, marks.tensors(), strict=True):
            gradient = gradients[spec.name]
            if gradient is not None:
                array[gradient.reshape(len(array), -1).any(axis=1)] = 1

    def some_of(self, tensor: Array) -> np.ndarray:
        """Return some elements."""
        flat = as_real(tensor).reshape(-1)
        return np.array(flat[:: max(1, flat.size // SOME)], np.float64)

    def frozen(self) -> bytes:
        """Return an empty digest: all arrays are trained."""
        return b""

    def discard_gradients(self) -> None:
        """Discard all gradients."""
        self.gradients = [None] * len(self.arrays)


def _can_be_exchanged(dtype: np.dtype[Any]) -> bool:
    return np.issubdtype(dtype, np.floating) or dtype in (np.complex64, np.complex128)
