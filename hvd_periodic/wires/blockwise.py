"""The base of wires in which every block of elements has a scale of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.encoded import Encoded
from hvd_periodic.wires.loops import Loop

V = TypeVar("V")

SCALE_BYTES = 4

SMALLEST_SCALE = 2.0**-118
"""Scales up to this are 0. TensorFlow treats numbers below 2^-126, the smallest normal float32, as 0, while numpy and
PyTorch compute with them; beside a larger scale than this, they are sent as 0 either way."""

SMALLEST_TERM = 2.0**-126
"""Magnitudes up to this are not summed."""


class Blockwise(Encoded):
    """Rows of bytes: a scale in float32 per block of elements, then a code of a few bits per element.

        x ≈ s · (what the code stands for)

    The first code is in the lowest bits of a byte. The last block of a row may be shorter, and unused bits are 0.

    Attributes:
        block: elements that share a scale.
        bits: bits of a code: 1, 2, 4 or 8.
    """

    block: ClassVar[int] = 256
    bits: ClassVar[int]

    @abstractmethod
    def quantize(self, coding: Coding[V], blocks: V, length: int) -> tuple[V, V]:
        """Return the scales of blocks, with 1 as the last axis, and the codes of their elements as bytes.

        Args:
            coding: the verbs.
            blocks: rows, blocks, and elements of a block; after the last element of a row, there are zeros.
            length: number of elements in a row.
        """

    @abstractmethod
    def multiples(self, coding: Coding[V], payload: V) -> V:
        """Return the elements of these rows of codes, in float32 and in multiples of their scales; a new value."""

    def loop(self) -> Loop | None:
        """Return compiled code that encodes rows in host memory; None: there is none, and :meth:`quantize` does."""
        return None

    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return the scales of every row, then its codes."""
        array: Any = coding.host_array(rows)
        if array is not None and (loop := self.loop()) is not None:
            return coding.from_host(self._encoded_by(loop, array))
        array = rows
        _, length = coding.sizes(rows)
        parts = (self._encoded(coding, array[:, start:stop]) for start, stop in self._ranges(coding, rows))
        return coding.in_turn(parts, (SCALE_BYTES * -(-length // self.block), -(-length * self.bits // 8)))

    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Multiply the scales by what their codes stand for."""
        array: Any = payload
        first_code = SCALE_BYTES * -(-length // self.block)

        def parts() -> Iterator[tuple[V]]:
            for start, stop in self._ranges(coding, payload, length):
                scales = array[:, SCALE_BYTES * start // self.block : SCALE_BYTES * -(-stop // self.block)]
                codes = array[:, first_code + start * self.bits // 8 : first_code + -(-stop * self.bits // 8)]
                yield (self._decoded(coding, scales, codes, stop - start),)

        return coding.in_turn(parts(), (length,))

    def _encoded_by(self, loop: Loop, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the bytes of rows in host memory."""
        count, length = rows.shape
        scales = np.empty((count, -(-length // self.block)), np.float32)
        codes = np.empty((count, -(-length * self.bits // 8)), np.uint8)
        loop(np.require(rows, np.float32, ["C", "W"]), scales, codes)
        return np.concatenate([scales.view(np.uint8), codes], axis=1)

    def _encoded(self, coding: Coding[V], rows: V) -> tuple[V, V]:
        """Return the bytes of the scales and of the codes."""
        count, length = coding.sizes(rows)
        blocks = -(-length // self.block)
        cut = coding.reshape(coding.padded(rows, blocks * self.block), count, blocks, self.block)
        scales, found = self.quantize(coding, cut, length)
        codes: Any = coding.reshape(found, count, blocks * self.block)
        whole = coding.padded(codes[:, :length], length + -length % (8 // self.bits))
        return coding.to_bytes(coding.reshape(scales, count, blocks)), coding.packed(whole, self.bits)

    def _decoded(self, coding: Coding[V], scale_bytes: V, code_bytes: V, length: int) -> V:
        """Return the elements that these bytes encode."""
        count, _ = coding.sizes(scale_bytes)
        blocks = -(-length // self.block)
        scales: Any = coding.reshape(coding.from_bytes(scale_bytes, "f4"), count, blocks, 1)
        multiples = self.multiples(coding, coding.padded(code_bytes, blocks * self.block * self.bits // 8))
        values: Any = coding.reshape(multiples, count, blocks, self.block)
        values *= scales
        whole: Any = coding.reshape(values, count, blocks * self.block)
        return whole[:, :length]  # type: ignore[no-any-return]

    def _ranges(self, coding: Coding[V], rows: V, length: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements, in whole blocks, that are best computed one after another."""
        count, width = coding.sizes(rows)
        length = width if length is None else length
        together = coding.at_once(rows, count * length)
        step = length if together is None else max(together // (count * self.block), 1) * self.block
        for start in range(0, length, step):
            yield start, min(start + step, length)


def scales_of(coding: Coding[V], blocks: V, levels: int) -> V:
    """Return the largest magnitude of every block, divided by a number of levels."""
    scales: Any = coding.ratio(coding.max_abs(blocks), coding.constant(levels, blocks))
    return scales * coding.exceeds(scales, SMALLEST_SCALE)  # type: ignore[no-any-return]


def magnitudes(coding: Coding[V], x: V, size: int) -> V:
    """Return magnitudes divided by a power of 2, so that a sum of so many is finite; 0 where there is less to sum.

    Example:
        >>> magnitudes(Coding(), np.array([3e38, -4.0, 1e-36], "f4"), 256)
        array([1.171875e+36, 1.562500e-02, 0.000000e+00], dtype=float32)
    """
    found: Any = abs(x)  # type: ignore[arg-type]
    found *= 1.0 / size
    return coding.above(found, SMALLEST_TERM)


def sums(coding: Coding[V], x: V) -> V:
    """Return the sums over the last axis, whose length is a power of 2, in the same order in all front ends.

    The second half is added to the first until one element is left.
    """
    total: Any = x
    length = coding.sizes(x)[-1]
    while length > 1:
        length //= 2
        total = total[..., :length] + total[..., length:]
    return total  # type: ignore[no-any-return]


def lookup_table(levels: list[float], bits: int) -> np.ndarray[Any, Any]:
    """Return, for every byte, the levels of its codes, as one entry of 8 or 16 bytes."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (2**bits - 1)
    entries: np.ndarray[Any, Any] = np.array(levels, np.float32)[codes].view("i8" if bits == 4 else "c16")
    return entries.reshape(-1)
