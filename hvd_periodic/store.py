"""Stores: what can be read and written bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from hvd_periodic.layout import Bucket, Layout

V = TypeVar("V")


class Store(Protocol[V]):
    """Tensors under one layout: the parameters of the user, or a vector of the algorithm's state."""

    layout: Layout

    def read(self, bucket: Bucket, out: V | None = None) -> V:
        """Return the values of a bucket as one flat vector: a view, or a copy in ``out`` if that is given."""

    def write(self, bucket: Bucket, value: V) -> None:
        """Set the values of a bucket."""

    def tensors(self) -> list[Any]:
        """Return the tensors, in the order and with the shapes of the layout; views where the store is flat."""


class FlatStore(Store[V]):
    """A store of our own: one flat array per arena; buckets and tensors are views of it.

    It serves every array type that slices to views, assigns by ``array[:] = value`` and reshapes without copying
    (numpy, torch).

    Args:
        layout: the tensors, arenas and buckets.
        zeros: ``zeros(kind, size)`` allocates the flat array of one arena.
    """

    def __init__(self, layout: Layout, zeros: Callable[[str, int], V]) -> None:
        self.layout = layout
        self._arenas: dict[str, Any] = {kind: zeros(kind, size) for kind, size in layout.arenas.items()}

    def read(self, bucket: Bucket, out: V | None = None) -> V:
        """Return a view of a bucket, or ``out`` filled with its values."""
        view = self._arenas[bucket.kind][bucket.start : bucket.stop]
        if out is None:
            return cast(V, view)
        cast(Any, out)[:] = view
        return out

    def write(self, bucket: Bucket, value: V) -> None:
        """Copy a flat vector into a bucket."""
        self._arenas[bucket.kind][bucket.start : bucket.stop] = value

    def tensors(self) -> list[Any]:
        """Return a view per tensor, in the tensor's own shape."""
        views = []
        for index, spec in enumerate(self.layout.specs):
            kind, start, stop = self.layout.span(index)
            views.append(self._arenas[kind][start:stop].reshape(spec.shape))
        return views


class PackedStore(Store[V]):
    """The user's own tensors, which stay where they are: reading packs them, writing unpacks.

    It serves array types as :class:`FlatStore` does. Values are converted to and from the dtype of the flat vector;
    tensors of any strides keep them.

    Args:
        layout: the tensors, arenas and buckets.
        tensors: the tensors themselves, in the order of the layout.
        empty: ``empty(bucket)`` allocates a flat vector for a bucket.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Any], empty: Callable[[Bucket], V]) -> None:
        self.layout = layout
        self._tensors = list(tensors)
        self._empty = empty

    def read(self, bucket: Bucket, out: V | None = None) -> V:
        """Pack the tensors of a bucket into ``out``, or into a new vector."""
        flat: Any = self._empty(bucket) if out is None else out
        for piece in bucket.pieces:
            tensor = self._tensors[piece.tensor]
            target = flat[piece.offset : piece.offset + piece.stop - piece.start]
            if target.shape[0] == self.layout.specs[piece.tensor].size:
                target.reshape(tensor.shape)[...] = tensor
            else:
                target[...] = tensor.reshape(-1)[piece.start : piece.stop]
        return cast(V, flat)

    def write(self, bucket: Bucket, value: V) -> None:
        """Unpack a flat vector into the tensors of a bucket."""
        for piece in bucket.pieces:
            tensor = self._tensors[piece.tensor]
            source = cast(Any, value)[piece.offset : piece.offset + piece.stop - piece.start]
            if source.shape[0] == self.layout.specs[piece.tensor].size:
                tensor[...] = source.reshape(tensor.shape)
                continue
            # Only a contiguous tensor has a flat view; a flat copy has to be copied back whole.
            flat = tensor.reshape(-1)
            flat[piece.start : piece.stop] = source
            tensor[...] = flat.reshape(tensor.shape)

    def tensors(self) -> list[Any]:
        """Return the user's tensors."""
        return list(self._tensors)
