"""Messages in 4 bits, as powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.blockwise import Blockwise, lookup_table, scales_of
from hvd_periodic.wires.loops import Loop, compiled, powers

V = TypeVar("V")

_POWERS = [0.0] + [2.0 ** (level - 7) for level in range(1, 8)]
_TABLE = lookup_table([*_POWERS, *(-power for power in _POWERS)], 4)


@dataclass(frozen=True)
class E3M0(Blockwise):
    """Divides every block of 256 elements by its largest magnitude, and rounds to powers of two: a sign and 3 bits.

        M = max |x|,   L = the one of 0 … 7 whose level is nearest to |x| / M,   x ≈ ± M level(L)
        level(0) = 0,   level(L) = 2^(L − 7)

    Ties go to the even L. The error of an element is at most |x|/3 from M/64 on, and less than M/128 below: smaller
    than in :class:`Int4` for elements that are small within their block, and larger for others. An M up to 2^-118 is
    0, and the block is sent as zeros.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), E3M0()
        >>> payload = wire.encode(coding, np.array([[2.0, -0.3, 0.02]], "f4"))
        >>> payload.nbytes, wire.decode(coding, payload, 3)
        (6, array([[ 2.     , -0.25   ,  0.03125]], dtype=float32))

    References:
        Douillard et al.: Streaming DiLoCo with overlapping communication. arXiv 2501.18512 (2025), section 2.4, which
        gives neither scale nor rounding.
    """

    coding_seconds: ClassVar[float] = 2.2e-9
    bits: ClassVar[int] = 4

    def loop(self) -> Loop | None:
        """Return :func:`~hvd_periodic.wires.loops.powers`, compiled; None for subclasses, which may differ."""
        return compiled(powers) if type(self) is E3M0 else None

    def quantize(self, coding: Coding[V], blocks: V, length: int) -> tuple[V, V]:
        """Return M, and L of every element, with 8 added if it is negative and not sent as 0."""
        largest = scales_of(coding, blocks, 1)
        of_largest: Any = coding.ratio(abs(blocks), largest)  # type: ignore[arg-type]
        sent: Any = coding.exceeds(of_largest, _POWERS[1] / 2)
        codes: Any = coding.negative(blocks)
        codes *= 8.0
        codes += coding.wide(coding.exponents(coding.at_least(of_largest, _POWERS[1])))
        codes += 7.0
        codes *= sent
        return largest, coding.rounded(codes, 0)

    def multiples(self, coding: Coding[V], payload: V) -> V:
        """Return the powers, with their signs."""
        return coding.looked_up(_TABLE, payload)
