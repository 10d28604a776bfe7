"""The operations (verbs) in which wires are written: they convert numbers to the bytes that travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np

V = TypeVar("V")

_TYPES = {"f4": np.float32, "f2": np.float16, "i1": np.int8, "i4": np.int32, "u1": np.uint8}
ROUNDER = 1.5 * 2.0**23
"""In a float32 as large as this, the lowest bit stands for 1."""

BLOCK = 128 * 2**10
"""Number of elements to compute at once, so that intermediate results stay in the processor's cache."""

_GROUP = 16
"""Elements of a group, of which only the largest is compared with others at first."""

_MANY = 4
"""So many candidates for each element that is chosen are many: there are about 1.2 if few elements are equal."""

_LARGEST = {"f2": 65504.0, "bf2": 3.3895313892515355e38}


class Coding(Generic[V]):
    """The verbs on numpy arrays; each front end has its own for its tensors.

    Types are named ``"f4"``, ``"f2"`` (float16), ``"bf2"`` (bfloat16), ``"i1"``, ``"i4"``, ``"u1"``. All verbs act on
    the last axis, and return new values, or their argument if nothing changes.
    """

    def cast(self, x: Any, kind: str) -> V:
        """Return ``x`` as another type; rounds to nearest, ties to even. numpy keeps a bfloat16 as its 16 bits."""
        if kind != "bf2":
            return cast(V, np.asarray(x).astype(_TYPES[kind]))
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return cast(V, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))

    def at_once(self, x: Any, elements: int) -> int | None:
        """Return the best number of elements per call of a verb, of so many; None: all. ``x`` tells where they are.

        Intermediate results then stay in the processor's cache.
        """
        return BLOCK

    def host_array(self, x: Any) -> np.ndarray[Any, Any] | None:
        """Return ``x`` as an array that shares its memory; None if it is on a device, or part of a graph."""
        return x if isinstance(x, np.ndarray) else None

    def from_host(self, x: np.ndarray[Any, Any]) -> V:
        """Return an array in the type of this class; with that of :class:`Coding`, itself."""
        return cast(V, x)

    def sizes(self, x: Any) -> tuple[int, ...]:
        """Return the shape of ``x`` as plain integers."""
        return tuple(map(int, x.shape))

    def wide(self, x: Any) -> V:
        """Return numbers of any type of this class as float32."""
        if x.dtype == np.uint16:
            return cast(V, (x.astype(np.uint32) << 16).view(np.float32))
        return cast(V, x.astype(np.float32))

    def like(self, x: Any, other: Any) -> V:
        """Return ``x`` in the type of ``other``."""
        return cast(V, x.astype(other.dtype))

    def largest_value(self, kind: str) -> float:
        """Return the largest finite number of a 16-bit type."""
        return _LARGEST[kind]

    def clip(self, x: Any, limit: float) -> V:
        """Return ``x`` with all elements clipped to the limit in magnitude."""
        return cast(V, np.clip(x, -limit, limit))

    def are_finite(self, tensors: Sequence[Any]) -> bool:
        """Return whether no element is NaN or infinite.

        A finite sum of squares proves it in one pass, without memory for flags; if it overflows, elements are checked.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return all(np.isfinite(np.vdot(tensor, tensor)) or np.isfinite(tensor).all() for tensor in tensors)

    def is_finite_or(self, x: Any, other: Any) -> bool:
        """Return whether every element is finite, or equal to the same element of another array."""
        return bool((np.isfinite(x) | (x == other)).all())

    def rows(self, x: Any, count: int, length: int) -> V:
        """Return the elements of ``x`` in ``count`` rows of ``length``, padded with zeros."""
        flat = x.reshape(-1)
        return cast(V, np.concatenate([flat, np.zeros(count * length - flat.size, flat.dtype)]).reshape(count, length))

    def padded(self, x: Any, length: int) -> V:
        """Return rows padded with zeros to ``length`` elements."""
        return cast(V, x if x.shape[1] == length else np.pad(x, ((0, 0), (0, length - x.shape[1]))))

    def constant(self, values: Any, other: Any) -> V:
        """Return numbers as float32, where ``other`` is."""
        return cast(V, np.asarray(values, np.float32))

    def reshape(self, x: Any, *shape: int) -> V:
        """Return ``x`` in another shape."""
        return cast(V, x.reshape(shape))

    def max_abs(self, x: Any) -> V:
        """Return the largest magnitude of every row, as an axis of length 1."""
        return cast(V, np.abs(x).max(axis=-1, keepdims=True))

    def at_least(self, x: Any, limit: float) -> V:
        """Return ``x`` with smaller elements replaced by the limit; overwrites ``x``."""
        return cast(V, np.maximum(x, limit, out=x))

    def above(self, x: Any, floor: float) -> V:
        """Return magnitudes, with 0 where they are not larger than the floor; may overwrite ``x``."""
        larger = x > floor
        return cast(V, x if larger.all() else x * larger.astype(np.float32))

    def count(self, x: Any) -> V:
        """Return the number of ones in every row of zeros and ones in float32, as an axis of length 1."""
        return cast(V, x.sum(axis=-1, keepdims=True))

    def exceeds(self, x: Any, limit: Any) -> V:
        """Return 1 where an element of float32 is larger than the limit, a number or an array, and 0 elsewhere."""
        return cast(V, (x > limit).astype(np.float32))

    def negative(self, x: Any) -> V:
        """Return 1 where an element of float32 is less than 0, and 0 elsewhere."""
        return cast(V, (x < 0).astype(np.float32))

    def ratio(self, x: Any, y: Any) -> V:
        """Return ``x / y``; 0 where ``y`` is 0."""
        return cast(V, x / np.where(y == 0, np.full_like(y, np.inf), y))

    def quotient(self, x: Any, y: Any) -> V:
        """Return the integers nearest to ``x / y``; 0 where ``y`` is 0."""
        ratio: Any = self.ratio(x, y)
        return cast(V, np.rint(ratio))

    def rounded(self, x: Any, offset: int) -> V:
        """Return, as ``"u1"``, the lowest byte of the integers nearest to float32 plus an offset, an even number.

        Of two, the even one. Magnitudes are less than 2^21: the lowest bits of the sum with 1.5 · 2^23 are the integer.
        Overwrites ``x``.
        """
        x += np.float32(ROUNDER + offset)
        return cast(V, x.view(np.int32).astype(np.uint8))

    def exponents(self, x: Any) -> V:
        """Return, as ``"i4"``, the k for which 2^k is nearest to a positive float32; of two, the even k."""
        bits = x.view(np.int32) >> 23  # Bit 23 is that of an odd k + 127.
        bits &= 1
        bits += x.view(np.int32)
        bits += 0x3FFFFF - (127 << 23)
        bits >>= 23
        return cast(V, bits)

    def to_bytes(self, x: Any) -> V:
        """Return the memory of every row as ``"u1"``."""
        return cast(V, np.ascontiguousarray(x).view(np.uint8))

    def from_bytes(self, x: Any, kind: str) -> V:
        """Return the numbers that :meth:`to_bytes` was given."""
        return cast(V, np.ascontiguousarray(x).view(np.uint16 if kind == "bf2" else _TYPES[kind]))

    def packed(self, x: Any, bits: int) -> V:
        """Return rows of ``"u1"``, numbers of 1, 2, 4 or 8 bits, in as many bits each; the first in the lowest bits.

        Rows are whole bytes. The numbers of a byte are read as one integer, and a product shifts them side by side.
        """
        if bits == 1:
            return cast(V, np.packbits(x.reshape(-1), bitorder="little").reshape(len(x), -1))
        words = np.ascontiguousarray(x).view(f"u{8 // bits}")
        return cast(V, (words * shifts(bits) >> (64 // bits - 8)).astype(np.uint8))

    def bits(self, x: Any, count: int) -> V:
        """Return the lowest bits of integers as ``"u1"``, the lowest first, on another axis."""
        found = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1), bitorder="little")
        return cast(V, found.reshape(*x.shape, -1)[..., :count])

    def looked_up(self, table: np.ndarray[Any, Any], x: Any) -> V:
        """Return, for every byte of ``x``, the two or four float32 that are one entry of a table of 256."""
        return cast(V, np.take(table, x).view(np.float32))

    def in_turn(self, parts: Iterable[Sequence[V]], widths: Sequence[int]) -> V:
        """Return rows side by side, of parts that are computed one after another.

        Each is copied to its place while it is in the cache.

        Args:
            parts: the next columns of each of several arrays.
            widths: the columns of each array in the result: all of the first, then all of the second, and so on.
        """
        places = [sum(widths[:i]) for i in range(len(widths))]
        result: Any = None
        for part in parts:
            arrays: Sequence[Any] = part
            if [array.shape[1] for array in arrays] == list(widths):
                return self.joined(arrays)
            if result is None:
                result = self.new_rows(arrays[0], sum(widths))
            for i, array in enumerate(arrays):
                result[:, places[i] : places[i] + array.shape[1]] = array
                places[i] += array.shape[1]
        return cast(V, result)

    def new_rows(self, x: Any, length: int) -> V:
        """Return as many rows as ``x`` has, of a length and the type of ``x``, with any values."""
        return cast(V, np.empty((len(x), length), x.dtype))

    def joined(self, parts: Sequence[Any]) -> V:
        """Return rows side by side."""
        return cast(V, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1))

    def largest(self, x: Any, count: int, floor: float = 0.0) -> V:
        """Return the indices, in every row of float32, of the ``count`` elements that are largest in magnitude.

        They are in ascending order; among equal elements, the first are chosen. Magnitudes up to the floor count as 0.
        """
        step = max(BLOCK // x.shape[1], 1)
        parts = [_largest(x[start : start + step], count, floor) for start in range(0, len(x), step)]
        return cast(V, np.concatenate(parts))

    def take(self, x: Any, places: Any) -> V:
        """Return the elements of every row at its indices."""
        return cast(V, np.take_along_axis(x, places, axis=1))

    def nonzero_rows(self, x: Any) -> np.ndarray[Any, Any]:
        """Return for every row, in host memory, whether any element is not 0; NaN is not."""
        return cast(np.ndarray, x.any(axis=1))

    def take_rows(self, x: Any, places: np.ndarray[Any, Any]) -> V:
        """Return the rows at these indices, a copy."""
        return cast(V, x[places])

    def put_rows(self, x: Any, places: np.ndarray[Any, Any], rows: Any) -> V:
        """Return ``x`` with other rows at these indices; overwrites ``x``."""
        x[places] = rows
        return cast(V, x)

    def scattered(self, values: Any, places: Any, length: int) -> V:
        """Return rows of zeros with these values at these indices, which are distinct in each row."""
        result = np.zeros((values.shape[0], length), values.dtype)
        np.put_along_axis(result, places, values, axis=1)
        return cast(V, result)


def shifts(bits: int) -> int:
    """Return the factor that moves numbers of a few bits, one per byte, side by side into the highest byte.

    No two of their copies meet.

    Example:
        >>> hex(0x0302 * shifts(4) & 0xFFFF)
        '0x3220'
    """
    return sum(1 << (64 // bits - 8 - (8 - bits) * i) for i in range(8 // bits))


def _largest(x: Any, count: int, floor: float) -> Any:
    """Return the indices that :meth:`Coding.largest` returns, of rows that are computed at once.

    The elements of a row are put into groups. As many groups as are to be chosen have a largest element that reaches
    the least of these maxima: the rows of few candidates above it are searched, instead of all elements. If that least
    maximum counts as 0, the candidates are the elements that do not, and the first of the row: zeros that are chosen
    are among these. Of many elements that are equal to the least maximum, only the first can be chosen.
    """
    rows, length = x.shape
    magnitudes = np.abs(x)
    size = min(length // (4 * count), _GROUP)
    groups = magnitudes
    if size > 1:
        groups = magnitudes[:, : length // size * size].reshape(rows, size, -1).max(axis=1)
    least = _at_rank(groups, count)
    few = least <= floor
    if few.any():
        among = magnitudes >= np.where(few, np.nextafter(np.float32(floor), np.float32(np.inf)), least)
        among[:, :count] |= few
    else:
        among = magnitudes >= least
    found, starts = _places(among)
    if np.diff(starts).max() > _MANY * count:
        among = _first_of_equal(among, magnitudes == least, count)
        found, starts = _places(among)
    values = magnitudes.reshape(-1)[found]
    values[values <= floor] = 0
    counts = np.diff(starts)
    taken = np.arange(counts.max()) < counts[:, None]
    candidates = np.full(taken.shape, -1, np.float32)
    candidates[taken] = values
    least = _at_rank(candidates, count)
    chosen = candidates >= least
    if np.count_nonzero(chosen) > rows * count:
        larger = candidates > least
        chosen &= larger | (np.cumsum(chosen & ~larger, axis=1) <= count - larger.sum(axis=1, keepdims=True))
    places = found[chosen[taken]].reshape(rows, count) - length * np.arange(rows)[:, None]
    return places.astype(np.int32)


def _places(flags: Any) -> tuple[Any, Any]:
    """Return the places of the ones in the memory of rows, and how many of them come before each row and in all."""
    rows, length = flags.shape
    found = np.flatnonzero(flags)
    return found, np.searchsorted(found, length * np.arange(rows + 1))


def _first_of_equal(among: Any, equal: Any, count: int) -> Any:
    """Return the candidates without those that follow ``count`` others, in the same row, to which they are equal.

    Example:
        >>> _first_of_equal(np.array([[1, 1, 0, 1, 1]], bool), np.array([[1, 1, 0, 0, 1]], bool), 2).astype(int)
        array([[1, 1, 0, 1, 0]])
    """
    equal &= among
    found, starts = _places(equal)
    first = starts[:-1, None] + np.arange(count)
    kept = among ^ equal
    kept.reshape(-1)[found[first[first < starts[1:, None]]]] = True
    return kept


def _at_rank(x: Any, rank: int) -> Any:
    """Return the element of every row that has so many elements from it on; as integers, float32 are found faster.

    Example:
        >>> _at_rank(np.array([[1.0, 3.0, 2.0]], "f4"), 2)
        array([[2.]], dtype=float32)
    """
    first = x.shape[1] - rank
    return np.partition(x.view(np.int32), first)[:, first, None].view(np.float32)


def packed_bits(flags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return booleans as bits, in 64-bit integers.

    Example:
        >>> packed_bits(np.array([False] * 8 + [True] * 8)).view(np.uint8)
        array([  0, 255,   0,   0,   0,   0,   0,   0], dtype=uint8)
    """
    octets = np.packbits(flags)
    return np.pad(octets, (0, -octets.size % 8)).view(np.int64)
