"""The interface of workers to an asynchronous center, and the transport through memory that all workers share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors
from hvd_periodic.asynchronous.ledger import Ledger
from hvd_periodic.asynchronous.slots import PlacedStore, Slots, aligned
from hvd_periodic.asynchronous.stepped_center import SteppedCenter
from hvd_periodic.comm.transports import SharedMemory
from hvd_periodic.outer.framework import OuterOptimizer

T = TypeVar("T")

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

    @property
    def at_rest(self) -> bool:
        """Whether other workers wait for nothing of an exchange that was interrupted."""
        return False

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

    def stay_out(self, starts: bool) -> None:
        """Tell the other ranks that this worker does not exchange from now on, though its process lives; or again."""

    def apart(self, starts: bool) -> None:
        """Tell that this worker is in another call, in which it waits for all others, or no longer."""

    def show(self) -> None:
        """Bring the file of the center up to date: a worker may have ended between a push and its copy."""

    def pause(self) -> None:
        """Expect no messages for some time."""

    @abstractmethod
    def close(self) -> None:
        """Release everything once all ranks are done."""


class MemoryTransport(Transport):
    """Every worker performs the whole exchange itself, in memory that all workers see.

    A bucket of the center with all its vectors is a unit of :class:`.Slots`, and so is the ledger: a worker that is
    stopped or killed in the middle of a transaction is in nobody's way. If an optimizer moves the center, all its
    buckets are one unit, with the optimizer's state.

    Args:
        allocate: returns shared memory of a given number of bytes, and more that has no memory at first.
        parts: tensors that are exchanged.
        worker: the rank of this worker, and the number of workers.
        optimizer: optimizer of the center, if there is one.
        shapes: shape and dtype of the arrays of its state.
        use_locking: whether transactions wait for each other. Without it, those that collide are computed again, unless
            an optimizer moves the center.
        center: memory of a file that shows the center. Default: there is none.
    """

    def __init__(
        self,
        allocate: Callable[[int, int], SharedMemory],
        parts: Sequence[ExchangedTensors],
        worker: tuple[int, int],
        optimizer: OuterOptimizer,
        shapes: Sequence[tuple[tuple[int, ...], str]],
        use_locking: bool,
        center: np.ndarray | None = None,
    ) -> None:
        shares = [part.layout for part in parts]
        self._rank, workers = worker
        self._center = CenterInMemory(parts, shares, workers)
        self._shown = None if center is None else CenterInMemory(parts, shares, workers, center)
        self._count, self._optimized = self._center.count, self._center.optimized
        self._ledger_size = Ledger.size(self._count, workers)
        units = [*CenterInMemory.sizes(parts, shares), aligned(8 * self._ledger_size)]
        self._stepped: SteppedCenter | None = None
        if self._optimized:
            self._stepped = SteppedCenter(parts[0], workers, optimizer, shapes)
            units[: self._optimized] = [self._stepped.nbytes, *[0] * (self._optimized - 1)]
        large = workers if self._stepped is not None else 0
        self._memory = allocate(*Slots.nbytes(units, workers, large))
        self.description = self._memory.description
        self._slots = Slots(self._memory, units, worker, use_locking, large)

    def exchange(self, exchange: Exchange, payloads: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Run the transactions in shared memory, bucket by bucket."""
        told = self._in_ledger(lambda ledger: ledger.begin(self._rank, exchange.speed))
        self.missed, self.relative_speed = told
        exchange = replace(exchange, staleness=self.missed)
        if self._stepped is not None:
            yield from self._step(self._stepped, payloads, exchange)
        for index in range(self._optimized, self._count):
            yield self._transact(index, next(payloads), exchange)

    def take(self) -> None:
        """Note it in the ledger."""
        self._in_ledger(lambda ledger: ledger.take([self._rank]))

    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """Ask the ledger, by the clock of the host."""
        now = time.monotonic()
        if group:
            words = self._slots.read(self._count, self._words_of_ledger)
            return Ledger(self._count, words).gather(group, now, grace)
        return self._in_ledger(lambda ledger: ledger.gather(group, now, grace))

    def read(self, index: int) -> np.ndarray:
        """Copy a bucket; of the ledger also the counts that lie with the buckets of the center."""
        unit = self._unit(index)
        if unit < self._count:
            return self._read(unit, lambda _: self._center.read(index))
        with self._slots.turn(unit):
            words = self._slots.read(unit, self._words_of_ledger)
        for bucket in range(self._optimized, self._count):
            words[bucket] = self._read(bucket, lambda window: int(window[0]))
        return words

    def write(self, buckets: Iterator[np.ndarray], optimizer_state: Any = None) -> None:
        """Set unit by unit."""
        stepped, first = self._stepped, [next(buckets) for _ in range(self._optimized)]
        if stepped is not None:
            self._change_memory(0, lambda memory: stepped.write(memory, first, optimizer_state))
        for index, values in enumerate(buckets, self._optimized):
            self._write(index, values)

    def optimizer_state(self) -> Any:
        """Return the state, from a copy of the shared memory."""
        if self._stepped is None:
            return None
        with self._slots.turn(0):
            return self._stepped.state(self._slots.read(0, np.copy))

    def close(self) -> None:
        """Release the memory."""
        del self._center, self._stepped, self._slots, self._shown
        self._memory.close()

    def _step(self, stepped: SteppedCenter, payloads: Iterator[np.ndarray], exchange: Exchange) -> Iterator[np.ndarray]:
        for index in range(self._optimized):
            stepped.set_gradient(index, next(payloads), exchange)
        self._change_memory(0, stepped.step)
        for index in range(self._optimized):
            yield stepped.read(index)

    def _transact(self, index: int, payload: np.ndarray, exchange: Exchange) -> np.ndarray:
        def transact(window: np.ndarray) -> np.ndarray:
            self._center.ledger.windows[index] = window[0]
            pulled = self._center.transact(index, payload, exchange)
            window[0] = self._center.ledger.windows[index]
            return pulled

        return self._change(index, transact)

    def _write(self, index: int, values: np.ndarray) -> None:
        unit = self._unit(index)
        if unit < self._count:
            self._change(unit, lambda _: self._center.write(index, values))
        else:
            self._in_ledger(lambda ledger: np.copyto(ledger.memory, values))
            for bucket in range(self._optimized, self._count):
                self._change(bucket, partial(np.copyto, src=values[bucket]))

    def _unit(self, index: int) -> int:
        """Return the unit in which a bucket lies."""
        unit = self._center.lock_of(index)
        return 0 if unit < self._optimized else unit

    def _place(self, unit: int, memory: np.ndarray) -> np.ndarray:
        """Let the center lie in the memory of a unit; return the count of its window, if it has one."""
        if unit or self._stepped is None:
            return self._center.place(unit, memory)
        cast(PlacedStore, self._center.vectors[0]["center"]).places = self._stepped.places(memory)
        return memory

    def _change(self, unit: int, function: Callable[[np.ndarray], T]) -> T:
        """Change a unit of the center, which lies in place inside the function; it gets the count of the window."""
        return self._change_memory(unit, lambda memory: function(self._place(unit, memory)))

    def _change_memory(self, unit: int, function: Callable[[np.ndarray], T]) -> T:
        """Change the memory of a unit of the center, and the file."""
        with self._slots.turn(unit):
            result = self._slots.change(unit, function)
            if self._shown is not None:
                self._show(unit, self._shown)
        return result

    def _read(self, unit: int, function: Callable[[np.ndarray], T]) -> T:
        with self._slots.turn(unit):
            return self._slots.read(unit, lambda memory: function(self._place(unit, memory)))

    def show(self) -> None:
        """Copy all units to the file, if there is one."""
        if self._shown is not None:
            for unit in sorted({self._unit(index) for index in range(self._count)}):
                self._show(unit, self._shown)

    def _show(self, unit: int, shown: CenterInMemory) -> None:
        """Copy a unit to the file; once more if the unit has changed meanwhile, as others may have copied it before."""
        indices = [index for index in range(self._count) if self._unit(index) == unit]

        def show(memory: np.ndarray) -> None:
            self._place(unit, memory)
            for index in indices:
                shown.write(index, self._center.read(index))

        version = -1
        while version != (version := self._slots.versions.now(unit)[0]):
            self._slots.read(unit, show)

    def _words_of_ledger(self, memory: np.ndarray) -> np.ndarray:
        words: np.ndarray = memory.view(np.int64)[: self._ledger_size].copy()
        return words

    def _in_ledger(self, function: Callable[[Ledger], T]) -> T:
        with self._slots.turn(self._count):
            return self._slots.change(
                self._count, lambda memory: function(Ledger(self._count, memory.view(np.int64)[: self._ledger_size]))
            )
