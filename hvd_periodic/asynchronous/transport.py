"""The interface of workers to an asynchronous center, and the transport through memory that all workers share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors
from hvd_periodic.comm.transports import SharedMemory
from hvd_periodic.outer.framework import OuterOptimizer

_LOOK = 0.005
"""Seconds between two looks whether a group of workers is closed."""


class Transport(ABC):
    """A worker's connection to the one center.

    Attributes:
        description: describes the transport, for the log.
        missed: the staleness of the last exchange: pushes of other workers since this worker took the center before.
        relative_speed: the speed of this worker relative to the fastest, as of the last exchange; 0: not known yet.
        cut: the factor to which the message of this worker was reduced in the last round; None if it was not.
        holds_center: the optimizer of the center is bound to the center, or to a share, in this process.
    """

    description: str
    holds_center = True
    missed = 0
    relative_speed = 0.0
    cut: float | None = None

    @abstractmethod
    def exchange(self, exchange: Exchange, payloads: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Run one transaction per bucket, in order; yield the vectors that the worker pulls.

        If an optimizer moves the center, all payloads of that part are consumed before its first result is yielded.
        """

    @abstractmethod
    def take(self) -> None:
        """Note that this worker takes the center without a push."""

    @abstractmethod
    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """As :meth:`.Ledger.gather`, by a clock that all workers share."""

    def wait_for_group(self, grace: float) -> None:
        """Join a group after a push; wait until it is closed, so that all pushes of its members are in the center."""
        group, left = self.gather(0, grace)
        while left:
            time.sleep(min(left, _LOOK))
            group, left = self.gather(group, grace)

    @abstractmethod
    def read(self, index: int) -> np.ndarray:
        """Return a copy of a bucket of a vector that is kept with the center, or of the ledger, by its number."""

    @abstractmethod
    def write(self, buckets: Iterator[np.ndarray], optimizer_state: Any = None) -> None:
        """Set all that is kept with the center, and the state of its optimizer (None: a new state); on one rank."""

    @abstractmethod
    def optimizer_state(self) -> Any:
        """Return a copy of the state of the center's optimizer."""

    def end(self) -> None:
        """Tell the other ranks that this worker, whose process ends without finalize(), exchanges no more."""

    def pause(self) -> None:
        """Expect no messages for some time."""

    @abstractmethod
    def close(self) -> None:
        """Release everything once all ranks are done."""


_STEPPED, _HEADER = 1, 8
"""A header of 64-bit integers: the position of the mark that the center's optimizer has stepped, and the size."""


class MemoryTransport(Transport):
    """Every worker performs the whole exchange itself, in memory that all workers see, under a lock per bucket.

    If an optimizer moves the center, one lock covers all its buckets, and its state is in the same memory.

    Args:
        allocate: returns shared memory of a given number of bytes.
        parts: tensors that are exchanged.
        worker: the rank of this worker, and the number of workers.
        optimizer: optimizer of the center, if there is one.
        shapes: shape and dtype of the arrays of its state.
        use_locking: whether transactions exclude each other. Without locking, additions that collide may be lost.
        center: memory for the center, which all workers share. Default: part of the allocated memory.
    """

    def __init__(
        self,
        allocate: Callable[[int], SharedMemory],
        parts: Sequence[ExchangedTensors],
        worker: tuple[int, int],
        optimizer: OuterOptimizer,
        shapes: Sequence[tuple[tuple[int, ...], str]],
        use_locking: bool,
        center: np.ndarray | None = None,
    ) -> None:
        shares = [part.layout for part in parts]
        self._optimizer = optimizer
        self._use_locking = use_locking
        self._rank, workers = worker
        header = 8 * _HEADER
        end = header + (CenterInMemory.nbytes(parts, shares, workers) if center is None else 0)
        sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        offsets = [end + 64]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 64) * 64)
        self._memory = allocate(offsets[-1])
        self.description = self._memory.description
        buffer = self._memory.buffer
        self._header = buffer[:header].view(np.int64)
        self._center = CenterInMemory(parts, shares, workers, buffer[header:end] if center is None else center)
        self._count, self._optimized = self._center.count, self._center.optimized
        self._state = [
            buffer[start : start + size].view(dtype).reshape(shape)
            for (shape, dtype), size, start in zip(shapes, sizes, offsets[:-1], strict=True)
        ]
        bind(optimizer, self._center)

    def exchange(self, exchange: Exchange, payloads: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Run the transactions in shared memory, bucket by bucket."""
        with self._memory.lock(self._count):
            self.missed, self.relative_speed = self._center.ledger.begin(self._rank, exchange.speed)
        exchange = replace(exchange, staleness=self.missed)
        if self._optimized:
            yield from self._step(payloads, exchange)
        for index in range(self._optimized, self._count):
            payload = next(payloads)
            with self._locked(index):
                pulled = self._center.transact(index, payload, exchange)
            yield pulled

    def take(self) -> None:
        """Note it in the ledger."""
        with self._memory.lock(self._count):
            self._center.ledger.take([self._rank])

    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """Ask the ledger, by the clock of the host."""
        with self._memory.lock(self._count):
            return self._center.ledger.gather(group, time.monotonic(), grace)

    def read(self, index: int) -> np.ndarray:
        """Copy a bucket under its lock."""
        with self._locked(index):
            return self._center.read(index)

    def write(self, buckets: Iterator[np.ndarray], optimizer_state: Any = None) -> None:
        """Copy all buckets and the state of the optimizer under one lock."""
        with self._memory.lock(0, self._count + 1):
            for index, values in enumerate(buckets):
                self._center.write(index, values)
            self._header[_STEPPED] = optimizer_state is not None
            if optimizer_state is not None:
                self._optimizer.load(optimizer_state)
                self._optimizer.push(self._state)

    def optimizer_state(self) -> Any:
        """Return the state from the shared memory."""
        with self._memory.lock(0, max(self._optimized, 1)):
            if not self._header[_STEPPED]:
                return None
            self._optimizer.pull(self._state)
            return self._optimizer.state()

    def close(self) -> None:
        """Release the memory."""
        del self._center, self._header, self._state
        self._memory.close()

    def _step(self, payloads: Iterator[np.ndarray], exchange: Exchange) -> Iterator[np.ndarray]:
        pulled = []
        messages = [next(payloads) for _ in range(self._optimized)]
        with self._memory.lock(0, self._optimized):
            for index, message in enumerate(messages):
                self._center.set_total(index, message, exchange)
            if self._header[_STEPPED]:
                self._optimizer.pull(self._state)
            else:
                self._optimizer.reset()
            self._optimizer.step()
            self._optimizer.push(self._state)
            self._header[_STEPPED] = 1
            for index in range(self._optimized):
                pulled.append(self._center.read(index))
        yield from pulled

    def _locked(self, index: int) -> AbstractContextManager[object]:
        return self._memory.lock(self._center.lock_of(index)) if self._use_locking else nullcontext()


def bind(optimizer: OuterOptimizer, held: CenterInMemory) -> None:
    """Bind the optimizer to a center, if the algorithm has one."""
    if held.total is not None:
        optimizer.bind_host(held.vectors[0]["center"], held.total, held.parts[0].layout)
