"""Where every tensor lies in the fused flat buffers, as plain integers.

A *tensor* of the user is packed, without padding, into the *arena* of its kind (one flat vector per accumulation dtype
and device). Each arena is cut into *buckets* of bounded size; one bucket is what one collective carries. A tensor may
span several buckets, and a bucket may hold several tensors: a *piece* is the intersection of the two.

    arena   |----- tensor 0 -----|- 1 -|--------------- tensor 2 ---------------|
    bucket  |------- bucket 0 -------|------- bucket 1 -------|---- bucket 2 ---|
    piece   |--------- 0 --------|-1-|1|---------- 2 ---------|------- 2 -------|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

DEFAULT_BUCKET_BYTES = 16 * 2**20
"""Large enough for bandwidth, small enough that the next bucket is computed while this one travels."""

MAX_BUCKET_ELEMENTS = 2**31 - 1
"""MPI, NCCL and Gloo count elements in a C int."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be packed.

    Attributes:
        name: unique name of the tensor.
        shape: its shape; ``()`` and shapes with a zero are allowed.
        kind: the arena it belongs to; any string that is the same on all ranks, such as ``"float32"``.
        itemsize: bytes per element *in the arena*.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    itemsize: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of flattened tensor ``tensor``, at ``offset`` in their bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Elements ``[start, stop)`` of the arena ``kind``; ``index`` counts the buckets of a layout."""

    index: int
    kind: str
    start: int
    stop: int
    itemsize: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes that one collective carries for this bucket."""
        return self.size * self.itemsize


class Layout:
    """The packing of a list of tensors into arenas and buckets; equal input gives an equal layout on every rank.

    Args:
        specs: the tensors, in the order in which they are packed.
        bucket_bytes: upper bound of a bucket, in bytes; at least one element always fits.

    Attributes:
        arenas: elements per arena, by kind, in order of first appearance.
        offsets: the first element of every tensor in its arena.
        buckets: all buckets, arena by arena, without gap or overlap.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.

    Example:
        >>> layout = Layout([TensorSpec("w", (3,), "f4", 4), TensorSpec("b", (), "f4", 4)], bucket_bytes=8)
        >>> [(b.start, b.stop) for b in layout.buckets]
        [(0, 2), (2, 4)]
        >>> layout.buckets[1].pieces
        (Piece(tensor=0, start=2, stop=3, offset=0), Piece(tensor=1, start=0, stop=1, offset=1))
    """

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"`bucket_bytes` must be positive. Received: bucket_bytes={bucket_bytes}")
        self.specs = tuple(specs)
        self.arenas: dict[str, int] = {}
        self.offsets: list[int] = []
        itemsizes: dict[str, int] = {}
        for spec in self.specs:
            offset = self.arenas.setdefault(spec.kind, 0)
            self.offsets.append(offset)
            self.arenas[spec.kind] = offset + spec.size
            if itemsizes.setdefault(spec.kind, spec.itemsize) != spec.itemsize:
                raise ValueError(
                    f"Tensors of one kind must have one itemsize. Received: {spec.name!r} of kind {spec.kind!r} with "
                    f"{spec.itemsize} bytes after {itemsizes[spec.kind]}"
                )
        buckets: list[Bucket] = []
        for kind, total in self.arenas.items():
            elements = min(max(1, bucket_bytes // itemsizes[kind]), MAX_BUCKET_ELEMENTS)
            members = [i for i, spec in enumerate(self.specs) if spec.kind == kind and spec.size]
            first = 0
            for start in range(0, total, elements):
                stop = min(start + elements, total)
                pieces = []
                while first < len(members) and self.offsets[members[first]] < stop:
                    tensor = members[first]
                    begin, size = self.offsets[tensor], self.specs[tensor].size
                    low, high = max(begin, start), min(begin + size, stop)
                    pieces.append(Piece(tensor, low - begin, high - begin, low - start))
                    if begin + size > stop:
                        break
                    first += 1
                buckets.append(Bucket(len(buckets), kind, start, stop, itemsizes[kind], tuple(pieces)))
        self.buckets = tuple(buckets)

    def span(self, tensor: int) -> tuple[str, int, int]:
        """Return the arena of a tensor and the first and past-the-last element of the tensor in it."""
        offset = self.offsets[tensor]
        return self.specs[tensor].kind, offset, offset + self.specs[tensor].size
