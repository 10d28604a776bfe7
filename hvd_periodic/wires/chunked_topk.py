"""Only the largest elements of every chunk, in 2 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hvd_periodic.arguments import require_int
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.blockwise import SCALE_BYTES, SMALLEST_TERM, magnitudes, sums
from hvd_periodic.wires.encoded import Encoded

V = TypeVar("V")

_LONGEST = 1 << 16
_VALUE_BITS = 2


@dataclass(frozen=True)
class ChunkedTopK(Encoded):
    """Sends, of every C consecutive elements, the k that are largest in magnitude: their places, and 2 bits each.

        a0, a1 = means of the |x| up to the mean of the k chosen, and of those above it
        x ≈ ± a0 or ± a1 where x is chosen, 0 elsewhere

    Of equal elements, the first are chosen. If a chosen element is 0, a0 = 0, and a1 is the mean of the others; if
    none is above the mean, a1 = a0. The last chunk of a bucket may be shorter: of c elements, ⌈k c / C⌉ travel.
    Elements whose magnitude is up to 2^-126 times the power of 2 from k on count as 0.

    A row is a0 and a1 of every chunk in float32; then the places within their chunks, ⌈log2 C⌉ bits each; then for
    each place one bit for |x| ≈ a1, and one for x < 0; the first in the lowest bits. Every rank receives the elements
    of all ranks.

    Args:
        chunk: C, from 2 to 65536.
        keep: k, from 1 to C.

    Raises:
        TypeError, ValueError: an argument is not such an int.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), ChunkedTopK(4, 2)
        >>> wire.decode(coding, wire.encode(coding, np.array([[0.5, -2.0, 0.1, 3.0, 0.0, 1.0]], "f4")), 6)
        array([[ 0., -2.,  0.,  3.,  0.,  1.]], dtype=float32)

    References:
        Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo. arXiv 2508.15706 (2025).
        Covenant-72B. arXiv 2603.08163 (2026): chunks of 4096, of which 64 travel, with 2 bits per value. Chunks of
        consecutive elements, and two magnitudes per chunk, are of this package.
    """

    sparse: ClassVar[bool] = True
    coding_seconds: ClassVar[float] = 7e-10

    chunk: int = 4096
    keep: int = 64

    def __post_init__(self) -> None:
        for name, least, most in (("chunk", 2, _LONGEST), ("keep", 1, self.chunk)):
            value = require_int(getattr(self, name), f"`Compression.topk({name}=...)`", minimum=least)
            if value > most:
                raise ValueError(f"`Compression.topk({name}=...)` must be at most {most}. Received: {value}")
            object.__setattr__(self, name, value)

    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return the magnitudes, places and values of the one row."""
        array: Any = rows
        parts = []
        for start, stop, count in self._ranges(coding.sizes(rows)[1]):
            chunks = coding.reshape(array[:, start:stop], count, -1)
            parts.append([coding.reshape(part, 1, -1) for part in self._chosen(coding, chunks)])
        scales, places, values = (coding.joined(each) for each in zip(*parts, strict=True))
        return coding.joined([scales, *(_bytes_of_bits(coding, each) for each in (places, values))])

    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Return the elements at their places, zeros elsewhere."""
        array: Any = payload
        ranges = list(self._ranges(length))
        chunks = sum(count for _, _, count in ranges)
        sent = sum(count * self._count((stop - start) // count) for start, stop, count in ranges)
        first = 2 * SCALE_BYTES * chunks
        second = first + -(-sent * self._place_bits // 8)
        scales: Any = coding.reshape(coding.from_bytes(array[:, :first], "f4"), chunks, 2)
        bits = _bits_of_bytes(coding, array[:, first:second], sent * self._place_bits)
        places: Any = _numbers(coding, coding.reshape(bits, sent, self._place_bits))
        values: Any = coding.reshape(_bits_of_bytes(coding, array[:, second:], _VALUE_BITS * sent), sent, _VALUE_BITS)
        parts, chunk, element = [], 0, 0
        for start, stop, count in ranges:
            size = (stop - start) // count
            some = slice(element, element := element + count * self._count(size))
            between: Any = scales[chunk : (chunk := chunk + count)]
            upper, negative = (coding.wide(coding.reshape(values[some, i], count, -1)) for i in range(_VALUE_BITS))
            found = _values(between[:, :1], between[:, 1:], upper, negative)
            part = coding.scattered(found, coding.reshape(places[some], count, -1), size)
            parts.append(coding.reshape(part, 1, -1))
        return parts[0] if len(parts) == 1 else coding.joined(parts)

    @property
    def _place_bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _count(self, size: int) -> int:
        """Return how many elements of a chunk of some size travel."""
        return -(-self.keep * size // self.chunk)

    def _ranges(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield the range of the whole chunks and that of the shorter one, with the number of chunks in each."""
        whole = length - length % self.chunk
        for start, stop, count in ((0, whole, whole // self.chunk), (whole, length, 1)):
            if start < stop:
                yield start, stop, count

    def _chosen(self, coding: Coding[V], chunks: V) -> tuple[V, V, V]:
        """Return a0 and a1 of every chunk as bytes; and the bits of the places and of the values."""
        count = self._count(coding.sizes(chunks)[1])
        size = 1 << (count - 1).bit_length()
        places = coding.largest(chunks, count, size * SMALLEST_TERM)
        signed: Any = coding.take(chunks, places)
        found: Any = magnitudes(coding, signed, size)

        def summed(x: V) -> Any:
            return sums(coding, coding.padded(x, size))

        some_zero: Any = coding.max_abs(1.0 - coding.exceeds(found, 0.0))  # type: ignore[operator]
        mean: Any = coding.ratio(summed(found), coding.constant(count, found))
        upper: Any = coding.exceeds(found, mean * (1.0 - some_zero))
        above = summed(upper)
        lower_mean: Any = coding.ratio(summed(found * (1.0 - upper)), count - above)
        upper_mean: Any = coding.ratio(summed(found * upper), above)
        any_above: Any = coding.exceeds(above, 0.0)
        upper_mean = upper_mean + lower_mean * (1.0 - any_above)
        scales: Any = coding.joined([lower_mean, upper_mean])
        negative: Any = coding.negative(signed)
        values = coding.bits(coding.cast(upper + 2.0 * negative, "i4"), _VALUE_BITS)
        return coding.to_bytes(scales * size), coding.bits(places, self._place_bits), values


def _values(lower: Any, upper: Any, is_upper: Any, is_negative: Any) -> Any:
    """Return the elements that travelled: a0 or a1, with a sign."""
    return (lower * (1.0 - is_upper) + upper * is_upper) * (1.0 - 2.0 * is_negative)


def _bytes_of_bits(coding: Coding[V], bits: V) -> V:
    """Return a row of bits as bytes, filled up with zeros."""
    length = coding.sizes(bits)[1]
    return coding.packed(coding.padded(bits, length + -length % 8), 1)


def _bits_of_bytes(coding: Coding[V], row: V, count: int) -> V:
    """Return the first bits of a row of bytes."""
    bits: Any = coding.reshape(coding.bits(row, 8), 1, -1)
    return bits[:, :count]  # type: ignore[no-any-return]


def _numbers(coding: Coding[V], bits: V) -> V:
    """Return the integers of which these are the bits, the lowest first."""
    found: Any = coding.from_bytes(coding.packed(coding.padded(bits, 32), 1), "i4")
    return found[:, 0]  # type: ignore[no-any-return]
