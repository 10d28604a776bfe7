"""The center in the memory of its holder, and the transactions on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.space import ArraySpace
from hvd_periodic.vectors.store import FlatStore

_ALIGNMENT = 64
"""Bytes: the size of a cache line and of the widest vector register."""


@dataclass(frozen=True)
class ExchangedTensors:
    """Tensors that are exchanged together, as all ranks know them.

    Attributes:
        layout: layout of the whole; the first word of a kind is the numpy name of the dtype.
        algorithm: computes a transaction.
        optimized: an outer optimizer moves the center.
    """

    layout: Layout
    algorithm: Algorithm
    optimized: bool = False


class _Arena(NamedTuple):
    """Bytes of a flat array: the center of a part, or the gradients for its optimizer."""

    part: int
    of_center: bool
    kind: str
    start: int
    stop: int


class CenterInMemory:
    """One holder's share of the center.

    Buckets are numbered across all parts. A transaction on a bucket takes the worker's replica x, or its message if the
    algorithm forms the message without the center, and returns the center that the worker then pulls:

        m  = message(x, publish(c))
        c' = move(c, m)              with c and x of one worker alone; n in the rates is the number of all workers
        returned: publish(c), or c' if the algorithm pulls the moved center

    A worker that is absent for a tensor pulls it, and its message is 0.

    Args:
        parts: tensors that are exchanged.
        shares: the layout of this holder's share of each part.
        buffer: ``uint8`` memory of :meth:`nbytes`.

    Attributes:
        buckets: the share of each bucket.
        optimized: number of buckets, the first ones, that an outer optimizer moves.
    """

    def __init__(self, parts: Sequence[ExchangedTensors], shares: Sequence[Layout], buffer: np.ndarray) -> None:
        self._space = ArraySpace()
        self.buckets = [bucket for share in shares for bucket in share.buckets]
        self._part_of = [index for index, share in enumerate(shares) for _ in share.buckets]
        self.optimized = len(shares[0].buckets) if parts[0].optimized else 0
        self.parts = list(parts)
        self.centers: list[FlatStore[Any]] = []
        self.total: FlatStore[Any] | None = None
        """The gradient for the outer optimizer, if one moves the center; of the first part only."""
        pieces = _pieces(parts, shares)

        def arena(kind: str, size: int) -> np.ndarray:
            piece = next(pieces)
            return buffer[piece.start : piece.stop].view(kind.split()[0])

        for part, share in zip(parts, shares, strict=True):
            self.centers.append(FlatStore(share, arena))
            if part.optimized:
                self.total = FlatStore(share, arena)

    @staticmethod
    def nbytes(parts: Sequence[ExchangedTensors], shares: Sequence[Layout]) -> int:
        """Return the number of bytes that shares of these parts take."""
        return max((piece.stop for piece in _pieces(parts, shares)), default=0)

    @staticmethod
    def arenas(parts: Sequence[ExchangedTensors], shares: Sequence[Layout]) -> Iterator[tuple[int, str, int]]:
        """Yield part, kind and first byte of every flat array of the center, but not of arrays of gradients."""
        for piece in _pieces(parts, shares):
            if piece.of_center:
                yield piece.part, piece.kind, piece.start

    def read(self, index: int) -> np.ndarray:
        """Return a copy of a bucket."""
        part, bucket = self._part_of[index], self.buckets[index]
        return np.array(self.centers[part].read(bucket))

    def write(self, index: int, values: np.ndarray) -> None:
        """Set a bucket."""
        part, bucket = self._part_of[index], self.buckets[index]
        self.centers[part].write(bucket, values)

    def set_total(self, index: int, message: np.ndarray, exchange: Exchange) -> None:
        """Store the gradient for the outer optimizer."""
        part, bucket = self._part_of[index], self.buckets[index]
        if self.total is not None:
            self.total.write(bucket, self.parts[part].algorithm.gradient(self._space, message, exchange))

    def transact(self, index: int, payload: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Run one transaction; return a copy of the vector that the worker pulls."""
        part, bucket = self._part_of[index], self.buckets[index]
        algorithm, space = self.parts[part].algorithm, self._space
        center = {"center": self.centers[part].read(bucket)}
        before = np.array(algorithm.publish(space, center, exchange)) if algorithm.reads_before else payload
        message = payload
        if algorithm.reads_before:
            message, _ = algorithm.message(space, payload, {}, before, exchange)
            if exchange.presence:
                message = self._of_present(part, bucket, message, exchange)
        moved = algorithm.move(space, center, message, exchange)["center"]
        if moved is not center["center"]:
            self.centers[part].write(bucket, moved)
        return np.array(algorithm.publish(space, {"center": moved}, exchange)) if algorithm.reads_after else before

    def _of_present(self, part: int, bucket: Bucket, message: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return a message with zeros for the tensors for which the worker is absent."""
        specs, layout, present = self.parts[part].layout.specs, self.centers[part].layout, message.copy()
        for start, stop, weight in layout.constant_ranges(bucket, lambda i: exchange.presence.get(specs[i].name, 1.0)):
            if not weight:
                present[start:stop] = 0
        return present


def empty(bucket: Bucket) -> np.ndarray:
    """Return an array for the values of a bucket."""
    return np.empty(bucket.size, bucket.kind.split()[0])


def _pieces(parts: Sequence[ExchangedTensors], shares: Sequence[Layout]) -> Iterator[_Arena]:
    """Yield the arenas in the order in which a center allocates them."""
    position = 0
    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        itemsizes = {bucket.kind: bucket.itemsize for bucket in share.buckets}
        for of_center in (True, False) if part.optimized else (True,):
            for kind, size in share.arenas.items():
                stop = position + size * itemsizes.get(kind, 1)
                yield _Arena(index, of_center, kind, position, stop)
                position = -(-stop // _ALIGNMENT) * _ALIGNMENT
