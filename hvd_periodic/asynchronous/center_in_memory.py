"""The center in the memory of its holder, and the transactions on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.asynchronous.ledger import Ledger, ledger_bucket
from hvd_periodic.asynchronous.slots import ALIGNMENT, PlacedStore, aligned
from hvd_periodic.centers.by_range import ByRange
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.space import ArraySpace
from hvd_periodic.vectors.store import FlatStore
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.encoded import Encoded
from hvd_periodic.wires.plain import Plain


@dataclass(frozen=True)
class ExchangedTensors:
    """Tensors that are exchanged together, as all ranks know them.

    Attributes:
        layout: layout of the whole; the first word of a kind is the numpy name of the dtype.
        algorithm: computes a transaction.
        optimized: an outer optimizer moves the center.
        staleness_power: power p of the discount of stale messages.
        sends_messages: workers send messages, whatever the algorithm reads to form them; otherwise, they send their
            replicas if it reads the center.
        bounds: bounds on the norms of messages in rounds, and of their mean, if there are any.
        wire: encoding of the messages that workers send to rounds.
    """

    layout: Layout
    algorithm: Algorithm
    optimized: bool = False
    staleness_power: float = 0.0
    sends_messages: bool = False
    bounds: NormBounds | None = None
    wire: Wire = Plain()  # noqa: RUF009

    @property
    def forms_messages(self) -> bool:
        """Whether messages are formed from the center as it is: where that is, of the replicas that workers send."""
        return self.algorithm.reads_before and not self.sends_messages

    @property
    def asks_for_center(self) -> bool:
        """Whether workers form the messages that they encode from the center as it is, for which they ask before."""
        return self.forms_messages and isinstance(self.wire, Encoded)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the vectors that are kept with the center, itself the first."""
        kept = [] if self.optimized else self.algorithm.init_center(ArraySpace(), np.zeros(1))
        return ("center", *(key for key in kept if key != "center"))

    def new_payload(self, bucket: Bucket) -> np.ndarray:
        """Return an array for what a worker sends of a bucket."""
        return (
            np.empty(self.wire.packed_size(bucket.size), np.uint8) if isinstance(self.wire, Encoded) else empty(bucket)
        )

    def discount(self, exchange: Exchange) -> float:
        """Return the factor of a message that is staler than those of equal workers in turn.

        (1 + max(0, s − (n − 1)))^−p, with the staleness s; the power is that of Xie, Koyejo, Gupta 2019, arXiv
        1903.03934.
        """
        return float((1 + max(0, exchange.staleness - (exchange.size - 1))) ** -self.staleness_power)


def numbered(parts: Sequence[ExchangedTensors], layouts: Sequence[Layout]) -> list[tuple[int, str, Bucket]]:
    """Return part, name and bucket of all vectors that are kept with the center, in the order of their numbers.

    The buckets of the center itself come first, so that they have the numbers of the buckets that are exchanged. The
    number after the last one is that of the ledger.
    """
    places = [
        (part, key, bucket)
        for part, (tensors, layout) in enumerate(zip(parts, layouts, strict=True))
        for key in tensors.keys
        for bucket in layout.buckets
    ]
    return sorted(places, key=lambda place: place[1] != "center")


class _Arena(NamedTuple):
    """Bytes of a flat array: a vector of a part, by its name, or the gradients for its optimizer."""

    part: int
    key: str
    kind: str
    start: int
    stop: int


_REDUCTIONS = {"sum": np.add, "max": np.maximum}

_TOTAL, _LEDGER = " total", " ledger"
"""Names of arenas that are no vectors of an algorithm."""


class CenterInMemory:
    """One holder's share of the center, of the vectors that an algorithm keeps with it, and a ledger of pushes.

    Buckets are numbered across all parts, see :func:`numbered`. A transaction on a bucket takes the worker's replica x,
    or its message if the algorithm forms the message without the center, and returns the center that the worker then
    pulls:

        m  = message(x, publish(c))           unless the worker forms it, such as one that is bounded
        c' = move(c, m)              with c and x of one worker alone; n in the rates is the number of all workers
        returned: publish(c), or publish(c') if the algorithm pulls the moved center

    A worker that is absent for a tensor pulls it, and its message is 0.

    Args:
        parts: tensors that are exchanged.
        shares: the layout of this holder's share of each part.
        workers: number of workers.
        buffer: ``uint8`` memory of :meth:`nbytes`. Default: the vectors, and the count of the window of each bucket,
            lie where :meth:`place` says.

    Attributes:
        buckets: the shares of all buckets, by number; the last one is the ledger.
        count: number of buckets that are exchanged, the first ones.
        optimized: number of buckets, the first ones, that an outer optimizer moves.
        ledger: counts pushes.
    """

    def __init__(
        self,
        parts: Sequence[ExchangedTensors],
        shares: Sequence[Layout],
        workers: int,
        buffer: np.ndarray | None = None,
    ) -> None:
        self.space = ArraySpace()
        self.parts = list(parts)
        self._places = numbered(parts, shares)
        self.count = sum(len(share.buckets) for share in shares)
        self.optimized = len(shares[0].buckets) if parts[0].optimized else 0
        self.vectors: list[dict[str, FlatStore[Any] | PlacedStore]] = [{} for _ in parts]
        """The vectors of every part, by name."""
        self.total: FlatStore[Any] | None = None
        """The gradient for the outer optimizer, if one moves the center in the buffer; of the first part only."""
        self._by_range = [ByRange(part.algorithm, cast(Any, self), part.layout) for part in parts]
        pieces, words = _pieces(parts, shares, workers), Ledger.size(self.count, workers)

        def arena(kind: str, size: int) -> np.ndarray:
            piece = next(pieces)
            return cast(np.ndarray, buffer)[piece.start : piece.stop].view(kind.split()[0])

        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            for key in part.keys:
                self.vectors[index][key] = PlacedStore(share) if buffer is None else FlatStore(share, arena)
            if part.optimized and buffer is not None:
                self.total = FlatStore(share, arena)
        self.ledger = Ledger(self.count, np.zeros(words, np.int64) if buffer is None else arena("int64", words))
        of_ledger = ledger_bucket(len(self._places), self.ledger.memory.size)
        self.buckets = [*(bucket for _, _, bucket in self._places), of_ledger]

    @staticmethod
    def nbytes(parts: Sequence[ExchangedTensors], shares: Sequence[Layout], workers: int) -> int:
        """Return the number of bytes that shares of these parts take."""
        return max(piece.stop for piece in _pieces(parts, shares, workers))

    @staticmethod
    def arenas(
        parts: Sequence[ExchangedTensors], shares: Sequence[Layout], workers: int
    ) -> Iterator[tuple[int, str, int]]:
        """Yield part, kind and first byte of every flat array of the center itself."""
        for piece in _pieces(parts, shares, workers):
            if piece.key == "center":
                yield piece.part, piece.kind, piece.start

    @staticmethod
    def sizes(parts: Sequence[ExchangedTensors], shares: Sequence[Layout]) -> list[int]:
        """Return, for every bucket of the center, the bytes that :meth:`place` needs."""
        places = [(parts[part], bucket) for part, key, bucket in numbered(parts, shares) if key == "center"]
        return [aligned(bucket.nbytes) * len(part.keys) + ALIGNMENT for part, bucket in places]

    def place(self, index: int, memory: np.ndarray) -> np.ndarray:
        """Let all vectors of a bucket of the center lie in some memory; return the count of its window there."""
        part, _, bucket = self._places[index]
        stores, width = self.vectors[part], aligned(bucket.nbytes)
        for start, key in zip(range(0, memory.size, width or 1), self.parts[part].keys, strict=False):
            vector = memory[start : start + bucket.nbytes].view(bucket.kind.split()[0])
            cast(PlacedStore, stores[key]).places[bucket.index] = vector
        window: np.ndarray = memory[-ALIGNMENT:].view(np.int64)[:1]
        return window

    def bind(self, optimizer: OuterOptimizer) -> None:
        """Let an optimizer move the center in the buffer by the total, if the algorithm has one."""
        if self.total is not None:
            optimizer.bind_host(cast(FlatStore[Any], self.vectors[0]["center"]), self.total, self.parts[0].layout)

    def lock_of(self, index: int) -> int:
        """Return the number of the lock of a bucket: all vectors of a bucket of the center have the lock of that."""
        if index >= len(self._places):
            return self.count
        part, _, bucket = self._places[index]
        return self._first(part) + bucket.index

    def read(self, index: int) -> np.ndarray:
        """Return a copy of a bucket."""
        if index >= len(self._places):
            return self.ledger.memory.copy()
        part, key, bucket = self._places[index]
        return np.array(self.vectors[part][key].read(bucket))

    def published(self, index: int, exchange: Exchange) -> np.ndarray:
        """Return a copy of what workers see of a bucket that is exchanged."""
        return np.array(self._published(index, exchange))

    def _published(self, index: int, exchange: Exchange) -> np.ndarray:
        part, _, bucket = self._places[index]
        center = {key: store.read(bucket) for key, store in self.vectors[part].items()}
        return np.asarray(self.parts[part].algorithm.publish(self.space, center, exchange))

    def write(self, index: int, values: np.ndarray) -> None:
        """Set a bucket."""
        if index >= len(self._places):
            self.ledger.memory[:] = values
            return
        part, key, bucket = self._places[index]
        self.vectors[part][key].write(bucket, values)

    def set_total(self, index: int, message: np.ndarray, exchange: Exchange) -> None:
        """Store the gradient for the outer optimizer."""
        part, _, bucket = self._places[index]
        if self.total is not None:
            self.total.write(bucket, self.parts[part].algorithm.gradient(self.space, message, exchange))

    def transact(self, index: int, payload: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Run one transaction; return a copy of the vector that the worker pulls. The payload keeps its values."""
        part, _, bucket = self._places[index]
        tensors, space, stores = self.parts[part], self.space, self.vectors[part]
        algorithm, center = tensors.algorithm, {key: store.read(bucket) for key, store in stores.items()}
        before = np.array(algorithm.publish(space, center, exchange)) if algorithm.reads_before else payload
        message = payload
        if tensors.forms_messages:
            message, _ = algorithm.message(space, payload, {}, before, exchange)
            if exchange.presence:
                message = self._by_range[part].weighed(bucket, message, exchange, stores["center"].layout)
        discount = tensors.discount(exchange)
        if discount != 1:
            message = space.scale(discount, message)
        elif message is payload:
            message = np.array(payload)  # `move` may overwrite it.
        exchange = replace(exchange, completes=self.ledger.completes(index, exchange.size))
        return self._move(part, bucket, center, message, exchange, before)

    def new_payload(self, index: int) -> np.ndarray:
        """Return an array for what a worker sends to a round on a bucket."""
        return self.parts[self._places[index][0]].new_payload(self.buckets[index])

    def message(self, index: int, payload: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return the message of a worker in a round on a bucket, without weight, given what it has sent."""
        part, _, bucket = self._places[index]
        tensors = self.parts[part]
        if isinstance(tensors.wire, Encoded):
            return tensors.wire.unpack(self.space.coding, payload, bucket.size).astype(empty(bucket).dtype)
        if not tensors.forms_messages:
            return payload
        before = self._published(index, exchange)
        return np.asarray(tensors.algorithm.message(self.space, payload, {}, before, exchange)[0])

    def total_of_round(
        self, index: int, payloads: Sequence[np.ndarray | None], exchanges: Sequence[Exchange]
    ) -> np.ndarray | None:
        """Return the total of a round on a bucket, of messages in the order of the workers; None if nobody counts.

        Args:
            index: number of the bucket.
            payloads: what the workers who take part have sent; None for one that does not count.
            exchanges: what the algorithm knows about each of them, with its weight, and the factor that reduces its
                message of the first part.
        """
        part, space = self._places[index][0], self.space
        algorithm = self.parts[part].algorithm
        total: np.ndarray | None = None
        for payload, exchange in zip(payloads, exchanges, strict=True):
            if payload is None:
                continue
            message = self.message(index, payload, exchange)
            message = message if exchange.cut is None or part else space.scale(exchange.cut, message)
            message = algorithm.weighed(space, message, exchange)
            if total is None:
                total = np.array(message)
            else:
                _REDUCTIONS[algorithm.reduction](total, message, out=total)
        return total

    def close(self, index: int, total: np.ndarray | None, exchange: Exchange) -> np.ndarray:
        """Move a bucket by the total of a round; return a copy of the vector that all who take part pull.

        If an outer optimizer moves the center, its gradient is stored, and the vector is that before its step.
        """
        part, _, bucket = self._places[index]
        space, stores = self.space, self.vectors[part]
        algorithm, center = self.parts[part].algorithm, {key: store.read(bucket) for key, store in stores.items()}
        before = np.array(algorithm.publish(space, center, exchange))
        if total is None:
            return before
        if index < self.optimized:
            self.set_total(index, total, exchange)
            return before
        return self._move(part, bucket, center, total, exchange, before)

    def _move(
        self, part: int, bucket: Bucket, center: State[Any], message: np.ndarray, exchange: Exchange, before: np.ndarray
    ) -> np.ndarray:
        """Move the vectors of a bucket; return what workers pull: a copy of what they see then, or saw before."""
        algorithm, moved = self.parts[part].algorithm, self._moved(part, bucket, center, message, exchange)
        for key, vector in moved.items():
            if vector is not center[key]:
                self.vectors[part][key].write(bucket, vector)
        return np.array(algorithm.publish(self.space, center | moved, exchange)) if algorithm.reads_after else before

    def _moved(
        self, part: int, bucket: Bucket, center: State[Any], message: np.ndarray, exchange: Exchange
    ) -> State[Any]:
        """Return the changes to the vectors of a bucket, range by range if the algorithm uses learning rates."""
        algorithm, rates = self.parts[part].algorithm, exchange.rates
        if not algorithm.uses_learning_rate:
            return algorithm.move(self.space, center, message, exchange)
        layout, alone = self.vectors[part]["center"].layout, replace(exchange, presence={})
        return self._by_range[part].move(layout, bucket, center, message, alone, LearningRates(lambda: rates))

    def _first(self, part: int) -> int:
        """Return the number of the first bucket of a part."""
        return sum(len(self.vectors[before]["center"].layout.buckets) for before in range(part))


def empty(bucket: Bucket) -> np.ndarray:
    """Return an array for the values of a bucket."""
    return np.empty(bucket.size, bucket.kind.split()[0])


def _pieces(parts: Sequence[ExchangedTensors], shares: Sequence[Layout], workers: int) -> Iterator[_Arena]:
    """Yield the arenas in the order in which a center allocates them."""
    position = 0

    def arena(part: int, key: str, kind: str, nbytes: int) -> _Arena:
        nonlocal position
        start = position
        position = aligned(start + nbytes)
        return _Arena(part, key, kind, start, start + nbytes)

    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        itemsizes = {bucket.kind: bucket.itemsize for bucket in share.buckets}
        for key in (*part.keys, *([_TOTAL] if part.optimized else [])):
            for kind, size in share.arenas.items():
                yield arena(index, key, kind, size * itemsizes.get(kind, 1))
    yield arena(-1, _LEDGER, "int64", 8 * Ledger.size(sum(len(share.buckets) for share in shares), workers))
