"""The interface of a front end: where the tensors of one rank live, and how its framework computes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.checkpoints.tree import Leaves
from hvd_periodic.spellings import rename_members
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

SOME = 64
"""Number of elements of a tensor that are enough to notice whether it has changed."""


class Replica(Protocol, Generic[V]):
    """One rank's replica of the model; front ends inherit from it.

    Attributes:
        space: operations on the flat vectors of this front end.
        parameters: tensors that the algorithm acts on; the same parameters, in the same order, for the whole training.
        buffers: real-valued statistics that are averaged at every exchange; None if there are none.
        integers: counters that take their largest value over all ranks at every exchange; None if there are none.
        from_root: tensors that take the root's values at every exchange; None if there are none.
        parameters_from_root: parameters that take the root's values at every exchange; None if there are none.
        constants: tensors that the root broadcasts at the start and no exchange touches; None if there are none.
        in_host_memory: vectors are in host memory and can be used there at once.
        reuses_memory: messages of one exchange are formed in the memory of those before, see :meth:`scratch`.
        complex_names: exchanged parameters whose elements are complex; stores hold them as reals of shape (…, 2).
        by_policy: names of the parameters that have another policy than the default, by the policy's name.
        reports_work: the user can report the examples of each local update.
        may_be_left_out: an exchange may exclude this rank; false if other ranks hold parts of the same replica.
        leaves: converts the framework's tensors in states of optimizers to arrays.
        framework: name and version of the framework, for display.
        uncounted: the error if the local optimizer has taken a step that was not counted; None if no such step is
            known.
        how_to_exclude: advice to users about parameters that take part but should not.
        how_to_exchange: advice to users about weights that should be exchanged but are not.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_members(cls, new_resting_store="new_offloaded_store", resting="offload")

    space: VectorSpace[V]
    parameters: Store[V]
    buffers: Store[V] | None = None
    integers: Store[V] | None = None
    from_root: Store[V] | None = None
    parameters_from_root: Store[V] | None = None
    constants: Store[V] | None = None
    leaves: Leaves = Leaves()
    in_host_memory: bool = False
    reuses_memory: bool = True
    complex_names: Sequence[str] = ()
    by_policy: Mapping[str, Sequence[str]] = MappingProxyType({})
    reports_work: bool = False
    may_be_left_out: bool = True
    framework: str = ""
    uncounted: str | None = None
    how_to_exclude: str = "Leave them out"
    how_to_exchange: str = "Exchange them, too"

    @property
    def present(self) -> Sequence[str]:
        """Names of the parameters, among ``parameters``, to which only ranks with gradients of them contribute."""
        return self.by_policy.get("present", ())

    @property
    def tables(self) -> Sequence[str]:
        """Names of the parameters, among ``parameters``, of which only touched rows travel."""
        return self.by_policy.get("rows", ())

    @property
    def local_names(self) -> Sequence[str]:
        """Names of the parameters that are not exchanged, of which every rank has its own."""
        return self.by_policy.get("local", ())

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager whose ``with`` block profilers of this framework show as a range of this name."""
        return nullcontext()

    def facts(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, by readable name."""

    def changes(self) -> str | None:
        """Return a description of changes in the set of parameters since construction, or None."""

    def misfit(self) -> str | None:
        """Return the change because of which values cannot be read and written at all, or None."""
        return self.changes()

    def store_of(self, named: Sequence[tuple[str, Any]]) -> Store[V]:
        """Return named tensors as a store, which leaves them in place; needed where the set of parameters changes."""

    def new_store(self, layout: Layout, name: str) -> Store[V]:
        """Return a store of zeros for a vector of the algorithm's state, such as ``"parameters.center"``."""

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[V]:
        """Return a store as :meth:`new_store` does, of a vector that only exchanges read; it may be in other memory."""
        return self.new_store(layout, name)

    def new_snapshot_store(self, layout: Layout, name: str) -> Store[V]:
        """Return a store as :meth:`new_offloaded_store` does, of the replica while its message is in flight."""
        return self.new_offloaded_store(layout, name)

    def offload(self, value: V) -> V:
        """Return a vector that is not used for some time; it may be in other memory until it is written again."""
        return value

    def drop_store(self, name: str) -> None:
        """Note that the store made by :meth:`new_store` under a name is no longer used."""
        return

    def new_temporary_store(self, layout: Layout) -> Store[V]:
        """Return a store of zeros that is not part of the saved state, in the form that :meth:`save` takes."""

    def scratch(self, bucket: Bucket, slot: int) -> V | None:
        """Return a reusable buffer for the bucket, one per slot; None if this front end allocates as it goes."""

    def blocks(self, bucket: Bucket) -> Sequence[Bucket]:
        """Return the parts of a bucket that are computed one after another; several only if vectors can be sliced.

        Each part fits into the processor's cache.
        """
        return (bucket,)

    def local(self, algorithm: Algorithm, worker: dict[str, Store[V]]) -> int:
        """Run ``algorithm.local`` on the parameters that have a gradient; return 1 if there were gradients, else 0."""

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return which of some parameters, given by index, have a gradient now or have had one."""
        return among

    def with_gradient_now(self, among: Set[int]) -> Set[int]:
        """Return which of some parameters, given by index, have a gradient in the update to come."""
        return self.with_gradient(among)

    def mark_rows(self, marks: Store[V]) -> None:
        """Mark the rows of tables that have a gradient in the update to come: set to 1 what a store holds of them.

        Args:
            marks: one element per row of each table.
        """
        return

    def unexchanged(self) -> Mapping[str, Any]:
        """Return, by name, the weights that no exchange touches although the user has not asked for this."""
        return {}

    def digests(self) -> Mapping[str, bytes]:
        """Return a SHA-256 digest of each weight of :meth:`unexchanged`, in an order that is the same on all ranks."""
        return {}

    def advice_on_difference(self, name: str) -> str:
        """Return advice to users about a weight of :meth:`unexchanged` that differs between ranks."""
        return self.how_to_exchange

    def some_of(self, tensor: Any) -> np.ndarray:
        """Return some elements, spread over a tensor."""
        return np.zeros(0)

    def frozen(self) -> bytes:
        """Return a digest of the parameters that no step changes and all ranks need equal; empty if there are none."""

    def discard_gradients(self) -> None:
        """Discard the gradients of this iteration, which were computed with other parameter values."""

    def follow_weights(self) -> None:
        """Update everything derived from the values of the replica, which the root's values have replaced."""
        return

    def constrain(self, center: Store[V]) -> None:
        """Make parameters and center obey constraints, identically on all ranks: averaged values may violate them."""
        return

    def to_host(self, value: V, bucket: Bucket) -> np.ndarray:
        """Return a flat vector as an array in host memory; a view if it is there already."""

    def from_host(self, array: np.ndarray, bucket: Bucket) -> V:
        """Return an array as a flat vector on the device of the bucket; may be a view of the array."""

    def to_bytes(self, value: V) -> bytes:
        """Return the raw memory of a flat vector, for audits."""

    def save(self, store: Store[V]) -> dict[str, Any]:
        """Return copies of the tensors of a store, by name."""

    def load(self, store: Store[V], tensors: dict[str, Any]) -> None:
        """Copy tensors by name into a store."""


rename_members(Replica, new_resting_store="new_offloaded_store", resting="offload")
