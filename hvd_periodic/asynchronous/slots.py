"""Vectors in shared memory that workers change without waiting for one that is stopped, or killed, in the middle.

A *unit* is what changes together, such as a bucket of the center with its momentum and its counts. It lies in a *slot*.
A worker copies the unit to a spare slot, computes there, and then swaps the slots, provided that nobody has done so
since it began to copy; otherwise it begins again. Nobody writes into a slot in which a unit lies. So a worker that goes
on after others have changed the unit changes nothing and begins again, and one that never goes on has changed nothing.

A worker holds the lock of its spare slot, which the system releases if the process ends. It writes there only if no
unit lies there according to the log, see below, as read while it holds the lock: nobody else could propose that slot
since.

What is compared and swapped is the version of a unit, through a log to which workers append what they propose: *version
v of the unit is replaced by what is in slot s*. The operating system appends one proposal after the other. Of those for
one version the first holds, and all workers that read the log agree which one that is. (A log decides among any number
of processes, where reads and writes of memory cannot: Herlihy 1991, Wait-Free Synchronization, ACM TOPLAS 13.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from hvd_periodic.comm.transports import LONG, SHORT, SharedMemory
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Bucket, Layout

T = TypeVar("T")

logger = logging.getLogger("hvd_periodic")

PATIENCE = 0.1
"""Seconds for which a worker waits for its turn while a unit of one bucket, or less, does not change."""

_TIMES = 20
"""A worker waits at least so many times as long as its own last change of the unit has kept its thread busy."""

_SLOT_LOCKS = 2**32
"""Number of the lock of the first slot; the locks below it are for turns."""

_KEPT = 2**13
"""Records of the log that a worker reads before it notes what it knows, and lets the system forget them."""

_SLOT_BITS = 22
"""Low bits of a noted word, which hold a slot, of four million; those above hold a version, of two trillion."""

ALIGNMENT = 64
"""Bytes: the size of a cache line and of the widest vector register."""


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up so that what follows is aligned."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PlacedStore:
    """A store of buckets that lie in different places, from one transaction to the next.

    Attributes:
        places: the memory of each bucket that has a place now, by its index.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places: dict[int, np.ndarray] = {}

    def read(self, bucket: Bucket) -> np.ndarray:
        """Return a view of a bucket."""
        return self.places[bucket.index]

    def write(self, bucket: Bucket, value: Any) -> None:
        """Copy a flat vector into a bucket."""
        self.places[bucket.index][:] = value


class Versions:
    """The version and the slot of every unit, on which all workers agree.

    A worker follows the log from its beginning, and the log is forgotten behind those who follow. One that has been
    stopped for long resumes from what another one has noted.

    Args:
        memory: has the log.
        notes: 64-bit integers, initially zero: for each worker how many records it has read, then version and slot of
            every unit; only that worker writes them.
        worker: the rank of this worker.
    """

    def __init__(self, memory: SharedMemory, notes: np.ndarray, worker: int) -> None:
        self._memory, self._notes, self._worker = memory, notes, worker
        self._units = [(0, unit) for unit in range(notes.shape[1] - 1)]
        self._read = self._noted = 0

    def now(self, unit: int) -> tuple[int, int]:
        """Return the version of a unit, and the slot in which it lies."""
        while not self._follow():
            self._resume()
        return self._units[unit]

    def slots(self, units: Sequence[int]) -> set[int]:
        """Return the slots in which some units lie."""
        self.now(units[0])
        return {self._units[unit][1] for unit in units}

    def propose(self, unit: int, version: int, slot: int) -> None:
        """Append that this slot shall replace a version."""
        self._memory.append(_record(unit, version, slot))

    def _follow(self) -> bool:
        """Read the rest of the log; return False at a record that has been forgotten, or is not complete yet."""
        while records := self._memory.records(self._read):
            for record in records:
                unit, version, slot = record[0] - 1, record[1], record[2]
                if record != _record(unit, version, slot):
                    return False
                if self._units[unit][0] == version:
                    self._units[unit] = self._read + 1, slot
                self._read += 1  # The last step: an interrupt in between lets the record be read again.
        return True

    def tidy(self) -> None:
        """Note what this worker knows, so that nobody needs the records before; now and then, and holding no lock."""
        if self._read - self._noted < _KEPT:
            return
        mine = self._notes[self._worker]
        for unit, (version, slot) in enumerate(self._units):
            mine[1 + unit] = version << _SLOT_BITS | slot
        fence()
        mine[0] = self._noted = self._read
        fence()
        self._memory.forget(self._read)

    def _resume(self) -> None:
        """Go on from the notes of the worker that has read most, if that is more than this one has."""
        most = max(self._notes, key=lambda notes: int(notes[0]))
        read = int(most[0])
        if read <= self._read:
            return
        fence()
        words = [int(word) for word in most[1:]]
        self._units = [(word >> _SLOT_BITS, word & (1 << _SLOT_BITS) - 1) for word in words]
        self._read = read


def _record(unit: int, version: int, slot: int) -> list[int]:
    """Return a record of the log; its last word tells it from what is forgotten, or not complete."""
    return [unit + 1, version, slot, ~(unit + 1 ^ version ^ slot)]


_ordered = threading.Lock()


def fence() -> None:
    """Order reads and writes of memory before this call and after it, for other processors: a lock does."""
    for _ in range(2):
        with _ordered:
            pass


class Slots:
    """Units in shared memory, which workers change by swapping slots.

    Slots of about one size are a class; it has a spare slot for every worker besides those of its units.

    Args:
        memory: the shared memory, of as many bytes as :meth:`nbytes` says, initially zero.
        sizes: bytes of each unit.
        worker: the rank of this worker, and the number of workers.
        in_turn: workers wait for each other as long as the unit changes meanwhile. Without it, they may compute in
            vain; the results are right either way.
        large: the first unit is a class of its own with so many spare slots, of which all but one get memory when a
            worker first finds none that is free. 0: it is not.
        kept: returns slots with former versions of the first unit, if that is large, which somebody still needs.
    """

    def __init__(
        self,
        memory: SharedMemory,
        sizes: Sequence[int],
        worker: tuple[int, int],
        in_turn: bool = True,
        large: int = 0,
        kept: Callable[[], set[int]] = set,
    ) -> None:
        self._memory, self._in_turn, self._large, self._kept = memory, in_turn, large, kept
        self._rank, self._workers = worker
        self._sizes = list(sizes)
        self._plan = _Plan(sizes, self._workers, large)
        starts = self._plan.starts
        notes, *self._slots = (memory.buffer[start:stop] for start, stop in pairwise(starts))
        words = notes[: 8 * self._workers * (1 + len(sizes))].view(np.int64)
        self.versions = Versions(memory, words.reshape(self._workers, -1), self._rank)
        self._with_memory = {slot for slot in range(len(self._slots)) if starts[slot + 2] <= self._plan.reserved}
        self._busy = [0.0] * len(sizes)
        self._stuck: set[int] = set()
        self._told = False

    @staticmethod
    def nbytes(sizes: Sequence[int], workers: int, large: int = 0) -> tuple[int, int]:
        """Return the bytes that units of these sizes take at first, and those that they may take later."""
        plan = _Plan(sizes, workers, large)
        return plan.reserved, plan.starts[-1] - plan.reserved

    def change(self, unit: int, function: Callable[[np.ndarray], T]) -> T:
        """Change a unit; return what the function returned for the version that it changed.

        Args:
            unit: number of the unit.
            function: changes the bytes of a copy, and returns nothing that shares memory with it. It is called again
                with another copy if another worker has changed the unit meanwhile.
        """
        with self._spare(unit) as slot:
            memory, changes = self._parts(unit, slot)
            while True:
                since = time.thread_time()
                version = self._copy(unit, slot)
                result = function(memory)
                changes[self._rank] += 1
                mine = int(changes[self._rank])
                fence()
                self.versions.propose(unit, version, slot)
                self._busy[unit] = time.thread_time() - since
                # It counts the changes of every worker, also those that others have replaced since.
                if self._look(unit, lambda parts: int(parts[1][self._rank])) == mine:
                    return result

    def read(self, unit: int, function: Callable[[np.ndarray], T]) -> T:
        """Return what a function returns for the bytes of a unit: a copy, as it may be called on others in vain."""
        return self._look(unit, lambda parts: function(parts[0]))

    @contextmanager
    def turn(self, unit: int) -> Iterator[None]:
        """Wait, asleep, until this worker is the only one to change a unit, or none of the others makes progress."""
        number = self._wait(unit) if self._in_turn or (self._large and unit == 0) else None
        try:
            yield
        finally:
            if number is not None:
                self._memory.unlock(number)
        self.versions.tidy()

    @contextmanager
    def _spare(self, unit: int) -> Iterator[int]:
        """Hold a slot, of the class of a unit, in which no unit lies."""
        slot = self._take(unit)
        try:
            yield slot
        finally:
            self._memory.unlock(_SLOT_LOCKS + slot)

    def _take(self, unit: int) -> int:
        """Lock a slot of the class of a unit in which no unit lies, and which has memory."""
        kind = self._plan.classes[unit]
        units, slots = self._plan.units[kind], self._plan.slots[kind]
        while True:
            used = self._used(units)
            for slot in slots:
                if slot in used or not self._memory.try_lock(_SLOT_LOCKS + slot):
                    continue
                if slot not in self._used(units) and self._has_memory(slot):
                    return slot
                self._memory.unlock(_SLOT_LOCKS + slot)
            time.sleep(LONG)

    def _used(self, units: Sequence[int]) -> set[int]:
        """Return the slots in which some units lie, or have lain if they are kept; in this order."""
        used = self.versions.slots(units)
        return used | self._kept() if self._large and units[0] == 0 else used

    def _has_memory(self, slot: int) -> bool:
        """Return whether a slot has memory; provide it if there is any left."""
        if slot in self._with_memory:
            return True
        found = self._memory.reserve(*self._plan.starts[slot + 1 : slot + 3])
        if found:
            self._with_memory.add(slot)
        elif not self._told:
            self._told = True
            logger.warning(
                "Rank %d waits for pushes of others to end: shared memory has no room for another copy of the center",
                self._rank,
            )
        return found

    def _copy(self, unit: int, slot: int) -> int:
        """Copy a unit to a slot; return the version that was copied."""
        size = self._sizes[unit] + 8 * self._workers
        while True:
            now = self.versions.now(unit)
            self._slots[slot][:size] = self._slots[now[1]][:size]
            fence()
            if self.versions.now(unit) == now:
                return now[0]

    def _look(self, unit: int, function: Callable[[tuple[np.ndarray, np.ndarray]], T]) -> T:
        """Return what a function returns for the parts of one version of a unit."""
        while True:
            version, slot = self.versions.now(unit)
            result = function(self._parts(unit, slot))
            fence()
            if self.versions.now(unit)[0] == version:
                return result

    def slot(self, slot: int, unit: int) -> np.ndarray:
        """Return the bytes of a unit that lie in a slot which is kept."""
        return self._parts(unit, slot)[0]

    def _parts(self, unit: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of a unit in a slot, and how often each worker has changed it."""
        size, memory = self._sizes[unit], self._slots[slot]
        return memory[:size], memory[size : size + 8 * self._workers].view(np.int64)

    def _wait(self, unit: int) -> int:
        """Return a lock that this worker holds now: the first whose holder is not stuck."""
        number = unit
        while not self._memory.try_lock(number):
            if number not in self._stuck and self._wait_for(number, unit):
                return number
            self._stuck.add(number)
            number += len(self._sizes)
        self._stuck.discard(number)
        return number

    def _wait_for(self, number: int, unit: int) -> bool:
        """Wait for a lock; return False if its holder is stuck.

        It is if the unit does not change, and also after a time in which every worker has had its turn: others, who
        wait no longer, may be changing the unit.
        """
        patience = max(PATIENCE * max(1, self._sizes[unit] / DEFAULT_BUCKET_BYTES), _TIMES * self._busy[unit])
        pause, version, begun = SHORT, self.versions.now(unit)[0], time.monotonic()
        since = begun
        while True:
            time.sleep(pause)
            if self._memory.try_lock(number):
                return True
            pause, now = min(2 * pause, LONG), time.monotonic()
            if now - since >= patience:
                last, version, since = version, self.versions.now(unit)[0], now
                if version == last or now - begun >= self._workers * patience:
                    return False


class _Plan:
    """The places of slots.

    A class is closed where room for one more slot per worker is less than what smaller units would leave unused.

    Attributes:
        classes: the class of every unit.
        units: the units of every class.
        slots: the slots of every class.
        starts: where the notes begin, then every slot, and where the last one ends.
        reserved: where what has memory from the start ends.
    """

    def __init__(self, sizes: Sequence[int], workers: int, large: int) -> None:
        self.classes, widths = [0] * len(sizes), list[int]()
        order = sorted(range(int(large > 0), len(sizes)), key=lambda unit: -sizes[unit])
        for place, unit in enumerate(order):
            left = len(order) - place
            if not widths or (widths[-1] - sizes[unit]) * left > workers * sizes[unit]:
                widths.append(sizes[unit])
            self.classes[unit] = len(widths) - 1
        if large:
            self.classes[0] = len(widths)
            widths.append(sizes[0])
        spares = [workers] * len(widths)
        if large:
            spares[-1] = large
        kinds = [*self.classes, *(kind for kind, spare in enumerate(spares) for _ in range(spare))]
        self.units = [[unit for unit, each in enumerate(self.classes) if each == kind] for kind in range(len(widths))]
        self.slots = [[slot for slot, each in enumerate(kinds) if each == kind] for kind in range(len(widths))]
        self.starts = [0]
        for nbytes in (8 * workers * (1 + len(sizes)), *(widths[kind] + 8 * workers for kind in kinds)):
            self.starts.append(self.starts[-1] + aligned(nbytes))
        self.reserved = self.starts[-large] if large else self.starts[-1]
