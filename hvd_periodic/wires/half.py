"""Messages in 16 bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.encoded import Encoded

V = TypeVar("V")

_ROUNDED_UP = 1 + 2.0**-11
"""Factor by which float16 rounding may increase a number, or a sum of two."""

_SUMS = frozenset({"f2"})
"""16-bit types that the collectives of Horovod sum."""


@dataclass(frozen=True)
class Half(Encoded):
    """Rounds every element to 16 bits, and clips it so that the sum over all ranks does not overflow.

    If the collective itself sums, as Horovod's does in float16, error feedback does not cover the rounding of the sum.
    Otherwise, ranks sum in float32.

    Args:
        kind: ``"f2"``, float16: 11 significant bits, up to 65504; or ``"bf2"``, bfloat16: 8 bits, in the range of
            float32.

    Raises:
        ValueError: ``kind`` is neither of these.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.vectors.coding import Coding
        >>> coding, wire = Coding(), Half("bf2")
        >>> wire.decode(coding, wire.encode(coding, np.array([[1.0, 3.14159, -1e-30]], "f4")), 3)
        array([[ 1.000000e+00,  3.140625e+00, -9.984021e-31]], dtype=float32)
    """

    kind: str = "f2"

    elementwise: ClassVar[bool] = True
    coding_seconds: ClassVar[float] = 5e-10

    def __post_init__(self) -> None:
        if self.kind not in ("f2", "bf2"):
            raise ValueError(f"`kind` must be 'f2' or 'bf2'. Received: {self.kind!r}")

    def check(self, communicator: Communicator, place: str) -> None:
        """Allow all placements if the collective itself sums."""
        if self.kind not in communicator.sums:
            super().check(communicator, place)

    def forms_sums(self, communicator: Communicator, lasting: bool) -> bool:
        """Return False if the collective itself sums."""
        return self.kind not in communicator.sums and super().forms_sums(communicator, lasting)

    def traffic(
        self, workers: int, nbytes: float, lasting: bool = False, sums: Collection[str] = _SUMS
    ) -> tuple[float, float]:
        """Return the traffic of a sum of half the bytes if the collective itself sums; otherwise of encoded messages.

        Args:
            workers: as in :meth:`Wire.traffic`.
            nbytes: likewise.
            lasting: likewise.
            sums: 16-bit types that collectives sum, as in :class:`~hvd_periodic.comm.Communicator`. Default: those of
                Horovod.
        """
        if self.kind in sums:
            return Wire.traffic(self, workers, nbytes / 2, lasting)
        return super().traffic(workers, nbytes, lasting)

    def decoded(self, workers: int, nbytes: float, lasting: bool = False, sums: Collection[str] = _SUMS) -> float:
        """Return 0 if the collective itself sums, otherwise as :class:`Encoded`; arguments as in :meth:`traffic`."""
        return 0.0 if self.kind in sums else super().decoded(workers, nbytes, lasting)

    def start(self, link: Link[V], message: V) -> Sent[V]:
        """Reduce in 16 bits, or as bytes."""
        if self.kind not in link.communicator.sums:
            return super().start(link, message)
        coding = link.coding
        n = link.communicator.size
        limit = coding.largest_value(self.kind) / (n * _ROUNDED_UP**n)
        half = coding.cast(coding.clip(message, limit), self.kind)
        decoded = coding.like(half, message)
        wait = link.reduce(half, link.name)
        return Sent(lambda: coding.like(wait(), message), decoded, 2 * link.size)

    def rounded(self, coding: Coding[V], message: V) -> V:
        """Return the message in 16 bits, as float32."""
        return coding.wide(coding.cast(coding.clip(message, coding.largest_value(self.kind)), self.kind))

    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return 2 bytes per element."""
        return coding.to_bytes(coding.cast(coding.clip(rows, coding.largest_value(self.kind)), self.kind))

    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Return the elements."""
        return coding.wide(coding.from_bytes(payload, self.kind))
