"""Messages in 4 bits, linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.blockwise import Blockwise, lookup_table, scales_of

V = TypeVar("V")

_LEVELS = 7
_TABLE = lookup_table([0.0, *(code - 8.0 for code in range(1, 16))], 4)
"""Code 0 never travels; rows are filled up with it."""


@dataclass(frozen=True)
class Int4(Blockwise):
    """Divides every block of 256 elements by its own scale, and rounds to integers of 4 bits.

        s = max |x| / 7,   q = round(x / s),   x ≈ s q

    Ties go to the even q, and q + 8 travels. The error of an element is at most s/2, max |x| / 14. Scales take 3 %
    more bytes. A scale up to 2^-118 is 0, and the block is sent as zeros.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), Int4()
        >>> payload = wire.encode(coding, np.array([[1.4, 0.5, -0.04]], "f4"))
        >>> payload.nbytes, wire.decode(coding, payload, 3)
        (6, array([[1.4, 0.4, 0. ]], dtype=float32))
    """

    coding_seconds: ClassVar[float] = 1.2e-9
    bits: ClassVar[int] = 4

    def quantize(self, coding: Coding[V], blocks: V, length: int) -> tuple[V, V]:
        """Return the scales, and q + 8 of every element."""
        scales = scales_of(coding, blocks, _LEVELS)
        return scales, coding.rounded(coding.ratio(blocks, scales), 8)

    def multiples(self, coding: Coding[V], payload: V) -> V:
        """Return q."""
        return coding.looked_up(_TABLE, payload)
