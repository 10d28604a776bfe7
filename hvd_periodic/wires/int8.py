"""Messages in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.encoded import Encoded

V = TypeVar("V")

BLOCK = 1024
"""Elements that share a scale: 0.4 % more bytes."""

_LEVELS = 127
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Int8(Encoded):
    """Every block of elements is divided by a scale of its own, and rounded to integers.

        s = max |x| / 127,   q = round(x / s),   x ≈ s q

    The error of an element is at most s/2.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), Int8()
        >>> payload = wire.encode(coding, np.array([[1.27, 0.5, -0.014]], "f4"))
        >>> payload.nbytes, wire.decode(coding, payload, 3).round(6)
        (7, array([[ 1.27,  0.5 , -0.01]], dtype=float32))

    References:
        Douillard et al.: Streaming DiLoCo with overlapping communication. arXiv 2501.18512 (2025), in 4 bits.
    """

    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return, of every row, its scales, then 1 byte per element."""
        array: Any = rows
        count, length = coding.sizes(array)
        block, blocks = _blocks(length)
        cut: Any = coding.reshape(coding.padded(rows, blocks * block), count, blocks, block)
        scales: Any = coding.max_abs(cut) / _LEVELS  # type: ignore[operator]
        levels: Any = coding.reshape(coding.clip(coding.quotient(cut, scales), _LEVELS), count, blocks * block)
        scale_bytes = coding.to_bytes(coding.reshape(scales, count, blocks))
        return coding.joined([scale_bytes, coding.to_bytes(coding.cast(levels[:, :length], "i1"))])

    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Multiply."""
        array: Any = payload
        block, blocks = _blocks(length)
        count, start = coding.sizes(array)[0], blocks * _SCALE_BYTES
        scales: Any = coding.reshape(coding.from_bytes(array[:, :start], "f4"), count, blocks, 1)
        levels = coding.padded(coding.wide(coding.from_bytes(array[:, start:], "i1")), blocks * block)
        values: Any = coding.reshape(coding.reshape(levels, count, blocks, block) * scales, count, blocks * block)
        return values[:, :length]  # type: ignore[no-any-return]


def _blocks(length: int) -> tuple[int, int]:
    """Return the elements of a block, and the number of blocks."""
    block = min(BLOCK, length)
    return block, -(-length // block)
