"""The position of every tensor in the fused flat buffers, as plain integers.

A *tensor* of the user is packed, without padding, into the *arena* of its kind (one flat vector per accumulation dtype
and device). Each arena is cut into *buckets* of bounded size; one collective carries one bucket. A tensor may
span several buckets, and a bucket may hold several tensors: a *piece* is the intersection of the two.

    arena   |----- tensor 0 -----|- 1 -|--------------- tensor 2 ---------------|
    bucket  |------- bucket 0 -------|------- bucket 1 -------|---- bucket 2 ---|
    piece   |--------- 0 --------|-1-|1|---------- 2 ---------|------- 2 -------|
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TypeVar, cast

T = TypeVar("T")

DEFAULT_BUCKET_BYTES = 16 * 2**20
"""Large enough for bandwidth, small enough that computing the next bucket overlaps with sending this one."""

MAX_BUCKET_ELEMENTS = 2**31 - 1
"""MPI, NCCL and Gloo count elements in a C int."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be packed.

    Attributes:
        name: unique name of the tensor.
        shape: its shape; ``()`` and shapes with a zero are allowed.
        kind: the arena that it belongs to; any string that is the same on all ranks, such as ``"float32"``.
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

    def part(self, start: int, stop: int) -> Bucket:
        """Return elements ``[start, stop)`` of this bucket, counted within it."""
        pieces = tuple(
            Piece(
                piece.tensor,
                max(piece.start, piece.start + start - piece.offset),
                min(piece.stop, piece.start + stop - piece.offset),
                max(piece.offset - start, 0),
            )
            for piece in self.pieces
            if piece.offset < stop and start < piece.offset + piece.stop - piece.start
        )
        return replace(self, start=self.start + start, stop=self.start + stop, pieces=pieces)


class Layout:
    """The packing of a list of tensors into arenas and buckets; equal input gives an equal layout on every rank.

    Args:
        specs: the tensors, in the order in which they are packed.
        bucket_bytes: upper bound of a bucket, in bytes; at least one element always fits.

    Attributes:
        arenas: elements per arena, by kind, in order of first appearance.
        itemsizes: bytes per element, by kind.
        offsets: the first element of every tensor in its arena.
        buckets: all buckets, arena by arena, without gaps or overlap.
        sources: per tensor, the tensor of the layout that this layout restricts, and the first and past-the-last
            element there.
        cut: the argument that may cut tensors, here or on another rank; empty if all are whole.
        ends: indices of the buckets after which writing may pause, so that everything written until then must be
            visible.

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
        self.itemsizes: dict[str, int] = {}
        for spec in self.specs:
            offset = self.arenas.setdefault(spec.kind, 0)
            self.offsets.append(offset)
            self.arenas[spec.kind] = offset + spec.size
            if self.itemsizes.setdefault(spec.kind, spec.itemsize) != spec.itemsize:
                raise ValueError(
                    f"Tensors of one kind must have one itemsize. Received: {spec.name!r} of kind {spec.kind!r} with "
                    f"{spec.itemsize} bytes after {self.itemsizes[spec.kind]}"
                )
        cuts: dict[str, list[int]] = {}
        for kind, total in self.arenas.items():
            elements = min(max(1, bucket_bytes // self.itemsizes[kind]), MAX_BUCKET_ELEMENTS)
            cuts[kind] = [min(elements, total - start) for start in range(0, total, elements)]
        self.sources = tuple((index, 0, spec.size) for index, spec in enumerate(self.specs))
        self.cut = ""
        self.ends: frozenset[int] = frozenset()
        self.buckets = self._cut(cuts)

    def share(self, owned: Callable[[Bucket], tuple[int, int]]) -> Layout:
        """Return :meth:`restrict` of this layout; or this one, with its empty tensors, if nothing is left out."""
        whole = all(owned(bucket) == (0, bucket.size) for bucket in self.buckets)
        return self if whole else self.restrict(owned)

    def restrict(self, owned: Callable[[Bucket], tuple[int, int]]) -> Layout:
        """Return the layout of elements ``[start, stop) = owned(bucket)`` of every bucket, counted within the bucket.

        It has as many buckets as this one, some of which may be empty. A tensor that is not whole becomes one flat
        tensor per range, such as ``"w[0:5]"``; ``sources`` gives its origin.

        Example:
            >>> whole = Layout([TensorSpec("w", (3,), "f4", 4), TensorSpec("b", (), "f4", 4)], bucket_bytes=8)
            >>> half = whole.restrict(lambda bucket: (1, 2))
            >>> [spec.name for spec in half.specs], half.sources
            (['w[1:2]', 'b'], ((0, 1, 2), (1, 0, 1)))
        """
        ranges: list[tuple[int, int, int]] = []
        cuts: dict[str, list[int]] = {kind: [] for kind in self.arenas}
        for bucket in self.buckets:
            first, last = owned(bucket)
            cuts[bucket.kind].append(last - first)
            for piece in bucket.part(first, last).pieces:
                if ranges and ranges[-1][0] == piece.tensor and ranges[-1][2] == piece.start:
                    ranges[-1] = (piece.tensor, ranges[-1][1], piece.stop)
                else:
                    ranges.append((piece.tensor, piece.start, piece.stop))
        part = Layout([self._range_spec(*each) for each in ranges])
        part.arenas = {kind: sum(sizes) for kind, sizes in cuts.items()}
        part.itemsizes = self.itemsizes
        part.sources = tuple(ranges)
        part.cut = "center='sharded'"
        part.ends = self.ends
        part.buckets = part._cut(cuts)
        return part

    def cut_at(self, places: Mapping[str, Sequence[int]]) -> Layout:
        """Return the same layout with more buckets: one that holds one of these elements, by arena, ends before it.

        Example:
            >>> layout = Layout([TensorSpec("w", (3,), "f4", 4), TensorSpec("b", (), "f4", 4)])
            >>> [(bucket.start, bucket.stop) for bucket in layout.cut_at({"f4": [3]}).buckets]
            [(0, 3), (3, 4)]
        """
        cuts = {}
        for kind, total in self.arenas.items():
            starts = {bucket.start for bucket in self.buckets if bucket.kind == kind}
            ends = sorted({*starts, *places.get(kind, ()), total} - {0})
            cuts[kind] = [end - start for start, end in pairwise([0, *ends])]
        cut = copy(self)
        cut.buckets = cut._cut(cuts)
        return cut

    def by_rows(self, tensors: Iterable[int]) -> Layout:
        """Return the same layout, in which buckets of these tensors hold whole rows of one tensor, and nothing else.

        A row is all elements with one index of the first axis. A bucket may be larger by less than one row.

        Example:
            >>> specs = [TensorSpec("w", (3, 2), "f4", 4), TensorSpec("b", (3,), "f4", 4)]
            >>> [(b.start, b.stop) for b in Layout(specs, bucket_bytes=12).by_rows([0]).buckets]
            [(0, 2), (2, 6), (6, 9)]
        """
        tables = [i for i in tensors if self.specs[i].size]
        cuts = {}
        for kind in self.arenas:
            ends = {bucket.stop for bucket in self.buckets if bucket.kind == kind}
            for i in tables:
                of_table, start, stop = self.span(i)
                if of_table == kind:
                    length = (stop - start) // self.specs[i].shape[0]
                    ends = {end - (end - start) % length if start < end < stop else end for end in ends}
                    ends |= {start, stop}
            cuts[kind] = [end - start for start, end in pairwise([0, *sorted(ends - {0})])]
        aligned = copy(self)
        aligned.buckets = aligned._cut(cuts)
        return aligned

    def one_per_row(self, tensors: Collection[int]) -> Layout:
        """Return the layout of one element per row of these tensors, where :meth:`by_rows` has made the buckets.

        It has as many buckets as this one; those of other tensors are empty.

        Example:
            >>> specs = [TensorSpec("w", (3, 2), "f4", 4), TensorSpec("b", (3,), "f4", 4)]
            >>> [(b.start, b.stop) for b in Layout(specs, bucket_bytes=12).by_rows([0]).one_per_row([0]).buckets]
            [(0, 1), (1, 3), (3, 3)]
        """
        tables = [i for i in tensors if self.specs[i].size]
        cuts: dict[str, list[int]] = {kind: [] for kind in self.arenas}
        for bucket in self.buckets:
            tensor = bucket.pieces[0].tensor if bucket.size else None
            spec = self.specs[tensor or 0]
            cuts[bucket.kind].append(bucket.size * spec.shape[0] // spec.size if tensor in tables else 0)
        rows = Layout([replace(self.specs[i], shape=self.specs[i].shape[:1]) for i in tables])
        rows.arenas = {kind: sum(sizes) for kind, sizes in cuts.items()}
        rows.itemsizes = self.itemsizes
        rows.ends = self.ends
        rows.buckets = rows._cut(cuts)
        return rows

    def span(self, tensor: int) -> tuple[str, int, int]:
        """Return the arena of a tensor and the first and past-the-last element of the tensor in it."""
        offset = self.offsets[tensor]
        return self.specs[tensor].kind, offset, offset + self.specs[tensor].size

    def constant_ranges(self, bucket: Bucket, value_of: Callable[[int], T]) -> Iterator[tuple[int, int, T]]:
        """Yield the ranges of a bucket whose tensors have one value: first and past-the-last element, and the value.

        Args:
            bucket: a bucket of this layout, or a part of one.
            value_of: returns the value of a tensor of the layout that this one restricts, given its index there.

        Example:
            >>> layout = Layout([TensorSpec(name, (2,), "f4", 4) for name in "abc"])
            >>> list(layout.constant_ranges(layout.buckets[0], {0: "x", 1: "x", 2: "y"}.__getitem__))
            [(0, 4, 'x'), (4, 6, 'y')]
        """
        start, value = 0, None
        for piece in bucket.pieces:
            of_piece = value_of(self.sources[piece.tensor][0])
            if piece.offset > start and of_piece is not value and of_piece != value:
                yield start, piece.offset, cast(T, value)
                start = piece.offset
            value = of_piece
        if bucket.size:
            yield start, bucket.size, cast(T, value)

    def _cut(self, sizes: Mapping[str, Sequence[int]]) -> tuple[Bucket, ...]:
        """Return buckets of the given sizes, by kind."""
        buckets: list[Bucket] = []
        for kind, of_kind in sizes.items():
            members = [i for i, spec in enumerate(self.specs) if spec.kind == kind and spec.size]
            first = start = 0
            for size in of_kind:
                stop = start + size
                pieces = []
                while first < len(members) and self.offsets[members[first]] < stop:
                    tensor = members[first]
                    begin, length = self.offsets[tensor], self.specs[tensor].size
                    low, high = max(begin, start), min(begin + length, stop)
                    pieces.append(Piece(tensor, low - begin, high - begin, low - start))
                    if begin + length > stop:
                        break
                    first += 1
                buckets.append(Bucket(len(buckets), kind, start, stop, self.itemsizes[kind], tuple(pieces)))
                start = stop
        return tuple(buckets)

    def _range_spec(self, tensor: int, start: int, stop: int) -> TensorSpec:
        spec = self.specs[tensor]
        if stop - start == spec.size:
            return spec
        return TensorSpec(f"{spec.name}[{start}:{stop}]", (stop - start,), spec.kind, spec.itemsize)


def chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """Return the first and past-the-last of the ``size`` elements that are in chunk ``index`` of ``count``.

    Chunks are as equal as possible, the larger ones first, as in Horovod's reduce-scatter.

    Example:
        >>> [chunk(7, index, 3) for index in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    quotient, rest = divmod(size, count)
    start = index * quotient + min(index, rest)
    return start, start + quotient + (index < rest)
