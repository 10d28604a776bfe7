"""Only the largest elements of messages."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, TypeVar

from hvd_periodic.arguments import require_real
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.encoded import Encoded
from hvd_periodic.wires.int8 import Int8

V = TypeVar("V")

_INDEX_BYTES = 4


@dataclass(frozen=True)
class TopK(Encoded):
    """Sends the elements of every bucket that are largest in magnitude: their indices, and their values in 8 bits.

    Every rank receives the elements of all ranks, so that the sum is not encoded again.

    Args:
        fraction: fraction of the elements to send, in (0, 1]; at least one is sent.

    Raises:
        TypeError, ValueError: ``fraction`` is not such a number.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), TopK(0.5)
        >>> wire.decode(coding, wire.encode(coding, np.array([[0.5, -2.0, 0.1, 2.0]], "f4")), 4)
        array([[ 0., -2.,  0.,  2.]], dtype=float32)

    References:
        Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo. arXiv 2508.15706 (2025).
    """

    sparse: ClassVar[bool] = True
    coding_seconds: ClassVar[float] = 5e-10

    fraction: float

    def __post_init__(self) -> None:
        fraction = require_real(self.fraction, "`Compression.topk(fraction)`", positive=True)
        if fraction > 1:
            raise ValueError(f"`Compression.topk(fraction)` must be in (0, 1]. Received: {self.fraction!r}")
        object.__setattr__(self, "fraction", fraction)

    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return the indices, then the elements there as :class:`Int8` encodes them."""
        indices = coding.largest(rows, self._count(coding.sizes(rows)[1]))
        return coding.joined([coding.to_bytes(indices), Int8().encode(coding, coding.take(rows, indices))])

    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Return the elements at their indices, zeros elsewhere."""
        array: Any = payload
        count = self._count(length)
        start = count * _INDEX_BYTES
        indices = coding.from_bytes(array[:, :start], "i4")
        return coding.scattered(Int8().decode(coding, array[:, start:], count), indices, length)

    def _count(self, length: int) -> int:
        return min(ceil(self.fraction * length), length)
