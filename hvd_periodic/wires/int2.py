"""Messages in 2 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.blockwise import Blockwise, lookup_table, magnitudes, sums
from hvd_periodic.wires.loops import Loop, compiled, ternary

V = TypeVar("V")

_SHARE = 0.7
_TABLE = lookup_table([0.0, 1.0, -1.0, 0.0], 2)


@dataclass(frozen=True)
class Int2(Blockwise):
    """Sends, of every block of 256 elements, the signs of those that are large, and their mean magnitude.

        θ = 0.7 mean |x|,   a = mean of the |x| > θ,   x ≈ a sign(x) where |x| > θ, 0 elsewhere

    The codes are 0, and 1 and 2 for a and −a. The error of an element is at most θ where 0 is sent, and at most
    max(a − θ, max |x| − a) elsewhere. Scales take 6 % more bytes. Magnitudes up to 2^-118 count as 0.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), Int2()
        >>> payload = wire.encode(coding, np.array([[1.0, -2.0, 0.5, 0.0]], "f4"))
        >>> payload.nbytes, wire.decode(coding, payload, 4)
        (5, array([[ 1.5, -1.5,  0. ,  0. ]], dtype=float32))

    References:
        Li et al.: Ternary weight networks. arXiv 1605.04711 (2016), for weights of a network.
    """

    coding_seconds: ClassVar[float] = 1.9e-9
    bits: ClassVar[int] = 2

    def loop(self) -> Loop | None:
        """Return :func:`~hvd_periodic.wires.loops.ternary`, compiled; None for subclasses, which may differ."""
        return compiled(ternary) if type(self) is Int2 else None

    def quantize(self, coding: Coding[V], blocks: V, length: int) -> tuple[V, V]:
        """Return a, and the code of every element."""
        _, number, size = coding.sizes(blocks)
        counts = coding.constant(np.minimum(size, length - size * np.arange(number))[:, None], blocks)
        found: Any = magnitudes(coding, blocks, size)
        threshold: Any = coding.ratio(sums(coding, found), counts) * _SHARE  # type: ignore[operator]
        large: Any = coding.exceeds(found, threshold)
        found *= large
        means: Any = coding.ratio(sums(coding, found), coding.count(large))
        codes: Any = coding.negative(blocks)
        codes += 1.0
        codes *= large
        return means * size, coding.rounded(codes, 0)

    def multiples(self, coding: Coding[V], payload: V) -> V:
        """Return 0, 1 and −1."""
        return coding.looked_up(_TABLE, payload)
