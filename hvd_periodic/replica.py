"""What a front end provides: where the tensors of one rank live, and how its framework works on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.layout import Bucket, Layout
from hvd_periodic.store import FlatStore, Store
from hvd_periodic.vector import VectorSpace

V = TypeVar("V")


class CenterOptimizer(Protocol):
    """The optimizer of the center, where the algorithm has one.

    Of an asynchronous center in host memory, several processes may step one after another; the state then travels
    through arrays that they share.
    """

    def step_center(self) -> None:
        """Apply one step of the center optimizer, in place."""

    def center_optimizer_state(self) -> Any:
        """Return a copy of the state of the center optimizer; None if there is none."""

    def load_center_optimizer_state(self, state: Any) -> None:
        """Restore what ``center_optimizer_state`` returned."""

    def bind_host_center(self, center: FlatStore[Any], total: FlatStore[Any]) -> None:
        """Make the center optimizer act on numpy arrays; ``total`` will hold what it is to apply."""

    def center_optimizer_shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays that the state will consist of, over a center of this layout.

        Raises:
            TypeError, ValueError: there is no center optimizer, or it cannot have such a center, or has other state.
        """

    def reset_center_optimizer(self) -> None:
        """Forget all state of the center optimizer, as if it had not stepped."""

    def pull_center_optimizer(self, arrays: Sequence[np.ndarray]) -> None:
        """Go on from the state in these arrays, which may become the state itself."""

    def push_center_optimizer(self, arrays: Sequence[np.ndarray]) -> None:
        """Put the state into these arrays."""


class Replica(CenterOptimizer, Protocol, Generic[V]):
    """One rank's replica of the model.

    Attributes:
        space: the verbs on flat vectors of this front end.
        parameters: what the algorithm acts on; the same parameters, in the same order, for the whole training.
        buffers: real-valued statistics that are averaged at every exchange; None where there are none.
        integers: counters, of which the largest of all ranks wins at every exchange; None where there are none.
        from_root: what becomes the root's at every exchange; None where there is nothing.
        constants: what the root broadcasts at the start and no exchange touches; None where there is nothing.
    """

    space: VectorSpace[V]
    parameters: Store[V]
    buffers: Store[V] | None
    integers: Store[V] | None
    from_root: Store[V] | None
    constants: Store[V] | None

    def facts(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by readable name."""

    def changes(self) -> str | None:
        """Return what has changed in the set of parameters since construction, or None."""

    def new_store(self, layout: Layout, name: str) -> Store[V]:
        """Return a store of zeros for a vector of the algorithm's state, such as ``"parameters.center"``."""

    def new_temporary_store(self, layout: Layout) -> Store[V]:
        """Return a store of zeros that is not part of what is saved, in the form that :meth:`save` takes."""

    def scratch(self, bucket: Bucket, slot: int) -> V | None:
        """Return a reusable buffer for the bucket, one per slot; None if this front end allocates as it goes."""

    def local(self, algorithm: Algorithm, state: dict[str, Store[V]]) -> int:
        """Run ``algorithm.local`` on the parameters that have a gradient; return 1 if gradients were there, else 0."""

    def bind_center(self, center: Store[V], gradient: Store[V]) -> None:
        """Make the center optimizer, for algorithms that have one; ``gradient`` will hold what it is to apply.

        Both are of this rank's share of the center, which may be empty; ``layout.sources`` says of which parameters.
        """

    def center_settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the center optimizer, by readable name; all ranks have to agree on them.

        Names of learning rates begin with ``lr`` or ``learning_rate``.
        """

    def center_hyperparameters(self) -> Any:
        """Return the same in a form that :meth:`follow` takes, on another rank."""

    def follow(self, settings: Any) -> None:
        """Let the next step of the center optimizer take these hyper-parameters; None: its own."""

    def frozen(self) -> bytes:
        """Return a digest of the parameters that no step changes and all need alike; empty if there are none."""

    def discard_gradients(self) -> None:
        """Forget the gradients of this iteration, which are of other parameters than there are."""

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
