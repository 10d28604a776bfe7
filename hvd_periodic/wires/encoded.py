"""The base of wires whose messages no collective can sum: ranks decode and then sum them."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.base import Link, Residual, Sent, Wire

V = TypeVar("V")

_LARGEST = 3e38
"""Largest float32, minus a margin, because decoded numbers may be larger than encoded ones."""

_SAMPLE = 1 << 16
"""Number of elements to encode in order to measure the size of a wire's output."""


class Encoded(Wire):
    """Sums in float32, in rank order: bit-identical on all ranks.

    There are two hops, in which no rank sends more than two messages' worth of bytes: every rank receives one n-th of
    all messages, and sends their sum to the others, also encoded. It keeps the encoding error of that sum and adds it
    to the next one; elastic averaging, whose center moves at the rate of that next exchange, loses nothing as long as
    its rate is constant. There is one hop, in which every rank receives all messages, if exchanges overlap with local
    steps or the messages are sparse.

    Attributes:
        sparse: sums have more nonzero elements than messages, so that there is always one hop.
    """

    sparse: ClassVar[bool] = False
    adding_seconds: ClassVar[float] = 3e-10

    @abstractmethod
    def encode(self, coding: Coding[V], rows: V) -> V:
        """Return rows of float32 as rows of bytes."""

    @abstractmethod
    def decode(self, coding: Coding[V], payload: V, length: int) -> V:
        """Return the rows of ``length`` float32 that these bytes encode."""

    def pack(self, coding: Coding[V], message: V, ranks: int) -> tuple[V, V]:
        """Return a message as bytes, for a receiver that sums those of ``ranks``, and the message as it receives it."""
        (size,) = coding.sizes(message)
        payload: Any = self.encode(coding, coding.rows(_as_float32(coding, message, ranks), 1, size))
        decoded: Any = self.decode(coding, payload, size)
        return coding.reshape(payload, -1), coding.like(decoded[0], message)

    def unpack(self, coding: Coding[V], payload: V, size: int) -> V:
        """Return the ``size`` float32 of a packed message."""
        decoded: Any = self.decode(coding, coding.reshape(payload, 1, -1), size)
        return cast(V, decoded[0])

    def packed_size(self, size: int) -> int:
        """Return the bytes of a packed message of ``size`` elements.

        Example:
            >>> from hvd_periodic.wires import Half, TopK
            >>> Half().packed_size(1000), TopK(0.01).packed_size(1000)
            (2000, 54)
        """
        return _packed_size(self, size)

    def check(self, communicator: Communicator, place: str) -> None:
        """Refuse a center that is not replicated."""
        if place != "replicated":
            raise ValueError(
                f"`compression` as {self!r} needs center='replicated': with center={place!r} the center itself "
                "travels, which cannot be compressed. Received: "
                f"compression={self!r}, center={place!r}"
            )

    def forms_sums(self, communicator: Communicator, lasting: bool) -> bool:
        """Return True if there are two hops."""
        return not (lasting or self.sparse)

    def traffic(self, workers: int, nbytes: float, lasting: bool = False) -> tuple[float, float]:
        """Return the traffic of one hop, with every message to all others; or of two, each with one n-th of that."""
        others, encoded = workers - 1, nbytes * _encoded_fraction(self)
        if lasting or self.sparse:
            return others, others * encoded
        return 2 * others, 2 * others / workers * encoded

    def decoded(self, workers: int, nbytes: float, lasting: bool = False) -> float:
        """Return the bytes for one hop, in which every rank decodes every message; 0 for two hops."""
        return workers * nbytes if lasting or self.sparse else 0.0

    def start(self, link: Link[V], message: V) -> Sent[V]:
        """Start the first hop; waiting for the sum runs the second one."""
        if link.residual is None:
            return self._in_one_hop(link, message)
        return self._in_two_hops(link, message, link.residual)

    def _in_one_hop(self, link: Link[V], message: Any) -> Sent[V]:
        coding, communicator, size = link.coding, link.communicator, link.size
        payload: Any = self.encode(coding, coding.rows(_as_float32(coding, message, communicator.size), 1, size))
        _, width = coding.sizes(payload)
        decoded: Any = self.decode(coding, payload, size)
        flat = coding.reshape(payload, -1)
        wait = communicator.begin_allgather(flat, link.name, coding.joined([flat] * communicator.size))

        def total() -> V:
            return coding.like(self._sum(coding, wait(), (communicator.size, width), size), message)

        return Sent(total, coding.like(decoded[0], message), width)

    def _in_two_hops(self, link: Link[V], message: Any, residual: Residual[V]) -> Sent[V]:
        coding, communicator, size, n = link.coding, link.communicator, link.size, link.communicator.size
        length = row_length(size, n)
        payload: Any = self.encode(coding, coding.rows(_as_float32(coding, message, n), n, length))
        _, width = coding.sizes(payload)
        decoded: Any = coding.reshape(self.decode(coding, payload, length), -1)
        wait = communicator.alltoall(coding.reshape(payload, -1), link.name)

        def total() -> V:
            unsent: Any = coding.cast(residual.read(), "f4")
            mine: Any = self._sum(coding, wait(), (n, width), length) + unsent
            encoded: Any = self.encode(coding, coding.rows(mine, 1, length))
            received: Any = self.decode(coding, encoded, length)
            residual.write(mine - received[0])
            flat = coding.reshape(encoded, -1)
            gathered: Any = communicator.allgather(flat, f"{link.name}.sum", coding.joined([flat] * n))
            sums: Any = self.decode(coding, coding.reshape(gathered, n, width), length)
            return coding.like(coding.reshape(sums, -1)[:size], message)  # type: ignore[index]

        return Sent(total, coding.like(decoded[:size], message), (n + 1) * width)

    def _sum(self, coding: Coding[V], payloads: Any, shape: tuple[int, int], length: int) -> Any:
        """Return the sum of payloads in their order; a graph does not know the ``shape`` of gathered payloads."""
        rows: Any = coding.reshape(payloads, *shape)
        total: Any = self.decode(coding, rows[:1], length)
        for rank in range(1, shape[0]):
            total = total + self.decode(coding, rows[rank : rank + 1], length)
        return total[0]


@cache
def _packed_size(wire: Encoded, size: int) -> int:
    """Return the bytes of a packed message of zeros, which is as long as any other."""
    rows: Any = np.zeros((1, size), "f4")
    encoded: Any = wire.encode(Coding(), rows)
    return int(encoded.nbytes)


@cache
def _encoded_fraction(wire: Encoded) -> float:
    """Return the encoded bytes per byte of float32."""
    rows: Any = np.linspace(-1, 1, _SAMPLE, dtype="f4").reshape(1, -1)
    encoded: Any = wire.encode(Coding(), rows)
    return float(encoded.nbytes / rows.nbytes)


def _as_float32(coding: Coding[V], message: V, ranks: int) -> V:
    """Return a message in float32, clipped so that the sum over ``ranks`` messages is finite."""
    return coding.cast(coding.clip(message, _LARGEST / ranks), "f4")


def row_length(size: int, ranks: int) -> int:
    """Return how many of ``size`` elements each rank sums; the last ranks have fewer, or none.

    Example:
        >>> row_length(7, 3)
        3
    """
    return -(-size // ranks)
