"""Stores: tensors that can be read and written bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol, TypeVar, cast

from hvd_periodic.spellings import rename_members
from hvd_periodic.vectors.layout import Bucket, Layout

V = TypeVar("V")


class Store(Protocol[V]):
    """Tensors under one layout: the parameters of the user, or a vector of the algorithm's state.

    Attributes:
        layout: the tensors, arenas and buckets.
        offloaded: the values are in other memory than that of computations: reading always returns a copy.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_members(cls, away="offloaded")

    layout: Layout
    offloaded: bool = False

    def read(self, bucket: Bucket, out: V | None = None) -> V:
        """Return the values of a bucket as one flat vector: a view, or a copy in ``out`` if that is given."""

    def view(self, bucket: Bucket) -> V | None:
        """Return the memory of a bucket as one flat vector; None if there is no such view."""
        return None

    def write(self, bucket: Bucket, value: V) -> None:
        """Set the values of a bucket."""

    def tensors(self) -> list[Any]:
        """Return the tensors, in the order and with the shapes of the layout; views if the store is flat."""

    def originals(self) -> list[Any]:
        """Return the tensors as they were passed; :meth:`tensors` has complex ones as pairs of reals."""
        return self.tensors()

    def memory(self) -> list[Any]:
        """Return all values in as few tensors as possible; views."""
        return self.tensors()


rename_members(Store, away="offloaded")


class FlatStore(Store[V]):
    """A store that owns its memory: one flat array per arena; buckets and tensors are views of it.

    It serves every array type that slices to views, assigns by ``array[:] = value`` and reshapes without copying
    (numpy, torch).

    Args:
        layout: the tensors, arenas and buckets.
        zeros: ``zeros(kind, size)`` allocates the flat array of one arena.
    """

    def __init__(self, layout: Layout, zeros: Callable[[str, int], V]) -> None:
        self.layout = layout
        self._arenas: dict[str, Any] = {kind: zeros(kind, size) for kind, size in layout.arenas.items()}
        self._views = []
        for index, spec in enumerate(layout.specs):
            kind, start, stop = layout.span(index)
            self._views.append(self._arenas[kind][start:stop].reshape(spec.shape))

    def read(self, bucket: Bucket, out: V | None = None) -> V:
        """Return a view of a bucket, or ``out`` filled with its values."""
        view = self.view(bucket)
        if out is None:
            return view
        cast(Any, out)[:] = view
        return out

    def view(self, bucket: Bucket) -> V:
        """Return a view of a bucket."""
        return cast(V, self._arenas[bucket.kind][bucket.start : bucket.stop])

    def write(self, bucket: Bucket, value: V) -> None:
        """Copy a flat vector into a bucket."""
        self._arenas[bucket.kind][bucket.start : bucket.stop] = value

    def arena(self, kind: str) -> Any:
        """Return the flat array of an arena."""
        return self._arenas[kind]

    def tensors(self) -> list[Any]:
        """Return a view per tensor, in the tensor's own shape."""
        return list(self._views)

    def memory(self) -> list[Any]:
        """Return the flat array of every arena."""
        return list(self._arenas.values())


class PackedStore(Store[V]):
    """The user's own tensors, which stay where they are: reading packs them, writing unpacks them.

    It serves the same array types as :class:`FlatStore`. Values are converted to and from the dtype of the flat vector;
    tensors keep their strides.

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
            offset = piece.offset
            for view in _views(self._tensor(piece.tensor), piece.start, piece.stop):
                size = prod(view.shape)
                flat[offset : offset + size].reshape(view.shape)[...] = view
                offset += size
        return cast(V, flat)

    def write(self, bucket: Bucket, value: V) -> None:
        """Unpack a flat vector into the tensors of a bucket."""
        flat: Any = value
        for piece in bucket.pieces:
            offset = piece.offset
            for view in _views(self._tensor(piece.tensor), piece.start, piece.stop):
                size = prod(view.shape)
                view[...] = flat[offset : offset + size].reshape(view.shape)
                offset += size

    def tensors(self) -> list[Any]:
        """Return the user's tensors."""
        return [self._tensor(index) for index in range(len(self._tensors))]

    def originals(self) -> list[Any]:
        """Return the user's tensors as they were passed."""
        return list(self._tensors)

    def _tensor(self, index: int) -> Any:
        """Return the part of a tensor that is read and written, with the shape that the layout has: all of it."""
        return self._tensors[index]


def _views(tensor: Any, start: int, stop: int) -> Iterator[Any]:
    """Yield views that together are elements ``[start, stop)`` of the flattened tensor, in order.

    A tensor of arbitrary strides has no flat view; its whole rows have views, and so have the rows of a row.
    """
    if not tensor.shape:
        yield tensor
        return
    inner = tensor.shape[1:]
    row = prod(inner)
    first, last = -(-start // row), stop // row

    def part(index: int, low: int, high: int) -> Iterator[Any]:
        return _views(tensor[index : index + 1].reshape(inner), low - index * row, high - index * row)

    if first > last:
        yield from part(last, start, stop)
        return
    if start < first * row:
        yield from part(first - 1, start, first * row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from part(last, last * row, stop)
