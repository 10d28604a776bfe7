"""What a front end provides: where the tensors of one rank live, and how its framework works on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

SOME = 64
"""Elements of a tensor that tell, well enough, whether it has changed."""


class Replica(Protocol, Generic[V]):
    """One rank's replica of the model; front ends inherit from it.

    Attributes:
        space: the verbs on flat vectors of this front end.
        parameters: what the algorithm acts on; the same parameters, in the same order, for the whole training.
        buffers: real-valued statistics that are averaged at every exchange; None where there are none.
        integers: counters, of which the largest of all ranks wins at every exchange; None where there are none.
        from_root: what becomes the root's at every exchange; None where there is nothing.
        constants: what the root broadcasts at the start and no exchange touches; None where there is nothing.
        in_host_memory: vectors are at hand in host memory, at once.
        may_be_left_out: an exchange may leave this rank out; not where other ranks hold parts of the same replica.
        framework: its name and version, for people.
        uncounted: what is wrong where the local optimizer has stepped and nobody counted it; None where nothing is
            known.
        how_to_exclude: what users do about parameters that take part and should not.
        how_to_exchange: what users do about weights that no exchange touches and one should.
    """

    space: VectorSpace[V]
    parameters: Store[V]
    buffers: Store[V] | None = None
    integers: Store[V] | None = None
    from_root: Store[V] | None = None
    constants: Store[V] | None = None
    in_host_memory: bool = False
    may_be_left_out: bool = True
    framework: str = ""
    uncounted: str | None = None
    how_to_exclude: str = "Leave them out"
    how_to_exchange: str = "Exchange them, too"

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return what profilers of this framework show as a range of this name, for a ``with`` block."""
        return nullcontext()

    def facts(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by readable name."""

    def changes(self) -> str | None:
        """Return what has changed in the set of parameters since construction, or None."""

    def misfit(self) -> str | None:
        """Return which change keeps values from being read and written at all, or None."""
        return self.changes()

    def new_store(self, layout: Layout, name: str) -> Store[V]:
        """Return a store of zeros for a vector of the algorithm's state, such as ``"parameters.center"``."""

    def new_resting_store(self, layout: Layout, name: str) -> Store[V]:
        """Return what :meth:`new_store` does, for a vector that exchanges alone read; it may lie elsewhere."""
        return self.new_store(layout, name)

    def resting(self, value: V) -> V:
        """Return a vector that is not computed with for some time; it may lie elsewhere until it is written again."""
        return value

    def drop_store(self, name: str) -> None:
        """Take notice that what :meth:`new_store` has made under a name is no longer used."""
        return

    def new_temporary_store(self, layout: Layout) -> Store[V]:
        """Return a store of zeros that is not part of what is saved, in the form that :meth:`save` takes."""

    def scratch(self, bucket: Bucket, slot: int) -> V | None:
        """Return a reusable buffer for the bucket, one per slot; None if this front end allocates as it goes."""

    def blocks(self, bucket: Bucket) -> Sequence[Bucket]:
        """Return the parts of a bucket that are computed one after another; several only where vectors can be sliced.

        As small as fits into the processor's cache.
        """
        return (bucket,)

    def compiled(self, run: Callable[..., int], key: Hashable, communicator: Communicator) -> Callable[..., int]:
        """Return a function of numbers, or one that does the same faster, where this front end compiles.

        Args:
            run: takes numbers that change from call to call, or None; returns a number that does not.
            key: equal for functions that do the same with the same numbers.
            communicator: the ranks that run it together.
        """
        return run

    def local(self, algorithm: Algorithm, worker: dict[str, Store[V]]) -> int:
        """Run ``algorithm.local`` on the parameters that have a gradient; return 1 if gradients were there, else 0."""

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return which of some parameters, by their places, have a gradient now, or have had one."""
        return among

    def unexchanged(self) -> Mapping[str, Any]:
        """Return the weights that no exchange touches although nobody has asked for that, by name."""
        return {}

    def some_of(self, tensor: Any, like: Any = None) -> np.ndarray:
        """Return some elements of a tensor or of a center's, spread over it; rounded as another tensor would be."""
        return np.zeros(0)

    def frozen(self) -> bytes:
        """Return a digest of the parameters that no step changes and all need alike; empty if there are none."""

    def discard_gradients(self) -> None:
        """Forget the gradients of this iteration, which are of other parameters than there are."""

    def follow_weights(self) -> None:
        """Let follow what was derived from the values of the replica, which the root's have replaced."""
        return

    def constrain(self, center: Store[V]) -> None:
        """Make parameters and center obey constraints, alike on all ranks: what an exchange has averaged may not."""
        return

    def to_host(self, value: V, bucket: Bucket) -> np.ndarray:
        """Return a flat vector as an array in host memory; a view, where it is there already."""

    def from_host(self, array: np.ndarray, bucket: Bucket) -> V:
        """Return an array as a flat vector on the device of the bucket; may be a view of the array."""

    def to_bytes(self, value: V) -> bytes:
        """Return the raw memory of a flat vector, for audits."""

    def save(self, store: Store[V]) -> dict[str, Any]:
        """Return copies of the tensors of a store, by name."""

    def load(self, store: Store[V], tensors: dict[str, Any]) -> None:
        """Copy tensors by name into a store."""
