"""Rounds in memory that all workers share: any that waits closes them, so one that is stopped or killed blocks none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.agreed import Agreed
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors
from hvd_periodic.asynchronous.closing import Closing, Contribution
from hvd_periodic.asynchronous.meeting import (
    AGAIN,
    FAILED,
    IN_VAIN,
    LOOK,
    PULLS,
    Meeting,
    dismissal,
    from_bytes,
    in_bytes,
    verdicts,
)
from hvd_periodic.asynchronous.rounds import GAP, Rounds
from hvd_periodic.asynchronous.slots import Slots, aligned
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.transports import LONG, SHORT, NoSharedMemoryError, SharedMemory
from hvd_periodic.logs import logger
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.ranks import titled

T = TypeVar("T")

_Result = tuple[np.ndarray, Iterator[np.ndarray]]
"""The verdict on a round, and the vectors to pull."""

_CENTER, _AGREED = 0, 1
"""Units of the slots."""

_AGAIN = -1
"""In place of a slot: the worker has to come again."""

_COUNT, _STEPPED, _NUMBER, _WORDS = range(4)
"""First integers of the unit of the center: how many rounds have closed, whether its optimizer has stepped, the number
of the last round that moved it; and how many these integers are. The verdicts on the last round follow, of all workers.
"""


class _UnchangedError(Exception):
    """There is nothing to change in a unit."""


class RoundsInMemory(Meeting):
    """Workers meet in memory that all of them share, and each of those who wait closes rounds.

    What a round needs is in two units of :class:`.Slots`, and in the memory of each worker's message, which that worker
    writes before it comes. A round closes in three steps, each of which is taken by any worker that waits:

        decide   agreed: with whom it closes
        move     center: the center moves by their messages, and gets the count of the round; whoever does this, the
                 bytes are the same
        tell     agreed: the members do not wait any more, and have a result, in the slot where the center lies now

    A worker that is stopped or killed before the log has its step has changed nothing, and another one takes the step;
    one that goes on later finds that it has been taken. The slot of a result is kept until all members have read it:
    others may close rounds before a member goes on.

    Args:
        allocate: as for a transport through memory.
        parts: tensors that are exchanged.
        ranks: global ranks of the workers, for messages.
        rank: this worker.
        root: the worker whose learning rates count.
        optimizer: optimizer of the center, if there is one.
        shapes: shape and dtype of the arrays of its state.
        rounds: decides who takes part, by the clock of the host.
        dead_ranks: returns the workers that are known to be dead.
    """

    def __init__(
        self,
        allocate: Callable[[int, int], SharedMemory],
        parts: Sequence[ExchangedTensors],
        ranks: Sequence[int],
        rank: int,
        root: int,
        optimizer: OuterOptimizer,
        shapes: Sequence[tuple[tuple[int, ...], str]],
        rounds: Rounds,
        dead_ranks: Callable[[], Sequence[int]],
    ) -> None:
        self._prepare(parts, ranks, root)
        self._rank, self._rounds, self._dead_ranks, self._looked = rank, rounds, dead_ranks, 0.0
        self._parts, self._shares, self._shapes = list(parts), [part.layout for part in parts], shapes
        own = np.zeros(CenterInMemory.nbytes(parts, self._shares, self.workers), np.uint8)
        self._own, self._image, self._optimizer = self._center_in(own), own, optimizer
        self._own.bind(optimizer)
        self._closing = Closing(self._own, optimizer, self.workers, root)
        self._starts = self._places()
        payloads = [self._own.new_payload(index) for index in range(self._own.count)]
        self._sizes = [(8 * self.sizes()[0], "int64"), *((each.nbytes, each.dtype.str) for each in payloads)]
        self._room = sum(aligned(nbytes) for nbytes, _ in self._sizes)
        units = [self._starts[-1], Agreed.nbytes(self.workers)]
        # Each worker may be stopped in a slot, and keep another one with a result that it has not taken.
        large = 2 * self.workers
        self._messages = allocate(self.workers * self._room, 0)
        try:
            self._memory = allocate(*Slots.nbytes(units, self.workers, large))
        except NoSharedMemoryError:
            self._messages.close()
            raise
        self._slots = Slots(self._memory, units, (rank, self.workers), True, large, self._kept)
        self._followed = -1, Agreed()
        self._result: _Result | None = None
        self.description = f"{self._memory.description}, in which those who wait close them"

    def _center_in(self, buffer: np.ndarray) -> CenterInMemory:
        return CenterInMemory(self._parts, self._shares, self.workers, buffer)

    def _places(self) -> list[int]:
        """Return where the parts of the unit of the center begin, and where the last one ends.

        They are the integers, the center, the arrays of its optimizer's state, and the vectors that members pull.
        """
        self._arrays = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in self._shapes]
        pulled = [bucket.nbytes for bucket in self._own.buckets[: self._own.count]]
        self._words = _WORDS + self.workers * self.sizes()[1]
        return [0, *accumulate(aligned(each) for each in (8 * self._words, self._image.size, *self._arrays, *pulled))]

    def _parts_of(self, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Return the integers, the center as bytes, the state of its optimizer, and the vectors that members pull."""
        words, center, *rest = (memory[start:stop] for start, stop in pairwise(self._starts))
        state, pulled = rest[: len(self._arrays)], rest[len(self._arrays) :]
        return (
            words[: 8 * self._words].view(np.int64),
            center[: self._image.size],
            [
                each[:nbytes].view(dtype).reshape(shape)
                for (shape, dtype), nbytes, each in zip(self._shapes, self._arrays, state, strict=True)
            ],
            [
                each[: bucket.nbytes].view(bucket.kind.split()[0])
                for bucket, each in zip(self._own.buckets, pulled, strict=False)
            ],
        )

    def _come(self, sent: Contribution) -> _Result:
        """Write the message, come, and close rounds until this worker has a result."""
        self._result = None
        self._finish_closing()
        for out, data in zip(self._message(self._rank), (self.in_words(sent), *sent.payloads), strict=True):
            out[:] = data
        leaving, pause = sent.record.purpose == Purpose.LEAVE, SHORT
        self._agree(lambda agreed: self._note_arrival(agreed, leaving, sent.seen))
        while True:
            agreed = self._agreed()
            if self._rank in agreed.results:
                return self._taken(agreed.results[self._rank])
            if agreed.members is None and self._rounds.failure is not None:
                self._agree(lambda _: self._rounds.dismiss([self._rank]))
                return np.array(dismissal(FAILED, self._rounds.failure), np.int64), iter(())
            if agreed.members is None and (why := self._rounds.in_vain().get(self._rank)):
                left = list[bool]()
                self._agree(partial(self._leave_in_vain, left))
                if left[-1]:
                    return np.array(dismissal(IN_VAIN, why), np.int64), iter(())
            if agreed.members is None and self._rank in self._rounds.given_up:  # It was stopped while it waited.
                self._agree(lambda _: self._rounds.come(self._rank))
            elif self._close_what_is_due(agreed):
                pause = SHORT
            else:
                before = time.monotonic()
                time.sleep(pause)
                pause = min(2 * pause, LONG)
                if time.monotonic() - before > GAP:  # It was stopped; if all were, nobody is late.
                    self._rounds.awake_since = time.monotonic()

    def _leave_in_vain(self, left: list[bool], agreed: Agreed) -> None:
        """Stop waiting, unless a round closes with this worker after all; append whether it has."""
        left.append(agreed.members is None and self._rank in self._rounds.in_vain())
        if left[-1]:
            self._rounds.dismiss([self._rank])
            self._rounds.stay_out(self._rank, True)

    def _take_back(self) -> _Result:
        """Wait no longer; return the verdict AGAIN, or the result if a round closes with this worker."""
        if self._result is None:
            self._agree(self._stop_waiting)
            self._finish_closing()
            self._result = self._taken(self._agreed().results.get(self._rank, _AGAIN))
        self._agree(lambda agreed: agreed.results.pop(self._rank, None))
        return self._result

    def _stop_waiting(self, agreed: Agreed) -> None:
        if self._rank not in (agreed.members or ()):
            self._rounds.dismiss([self._rank])

    def _note_arrival(self, agreed: Agreed, leaving: bool, seen: int) -> None:
        if seen in (-1, agreed.number):
            agreed.seen[self._rank] = seen
            self._rounds.come(self._rank, leaving)
        else:
            agreed.results[self._rank] = _AGAIN

    def _message(self, worker: int) -> list[np.ndarray]:
        """Return the memory of what a worker says, and of its payloads."""
        starts = accumulate((aligned(nbytes) for nbytes, _ in self._sizes), initial=worker * self._room)
        buffer = self._messages.buffer
        return [buffer[start : start + n].view(dtype) for start, (n, dtype) in zip(starts, self._sizes, strict=False)]

    def _taken(self, slot: int) -> _Result:
        """Return the verdict and the vectors to pull, from the slot of a result, which is kept no longer."""
        verdict, pulled = np.array([AGAIN]), list[np.ndarray]()
        if slot != _AGAIN:
            words, _, _, vectors = self._parts_of(self._slots.slot(slot, _CENTER))
            verdict = np.array(words[_WORDS:].reshape(self.workers, -1)[self._rank])
            if verdict[0] in PULLS:
                pulled = [np.array(vector) for vector in vectors[self.fetched_buckets :]]
        self._result = verdict, iter(pulled)
        self._agree(lambda agreed: agreed.results.pop(self._rank, None))
        return self._result

    def _see(self) -> tuple[int, list[np.ndarray]]:
        """Return the number of the last round, and the buckets that workers ask for."""
        self._finish_closing()
        exchange = Exchange(self.workers, period=1)

        def look(memory: np.ndarray) -> tuple[int, list[np.ndarray]]:
            words, image, *_ = self._parts_of(memory)
            center = self._center_in(image)
            return int(words[_NUMBER]), [center.published(i, exchange) for i in range(self.fetched_buckets)]

        return self._slots.read(_CENTER, look)

    def _agreed(self) -> Agreed:
        """Return the state that all share, and update ``_rounds`` to match it."""
        if self._followed[0] != (version := self._slots.versions.now(_AGREED)[0]):
            self._followed = version, Agreed.read(self._slots.read(_AGREED, np.copy))
        agreed = self._followed[1]
        if agreed.rounds is not None:
            self._rounds.load(agreed.rounds)
        return agreed

    def _kept(self) -> set[int]:
        """Return the slots of results that have not been taken."""
        return set(Agreed.read(self._slots.read(_AGREED, np.copy)).results.values())

    def _agree(self, function: Callable[[Agreed], object]) -> None:
        """Update the state that all share, ``_rounds`` included.

        The function is called again, on the newer state, if another worker has changed that first.
        """

        def change(memory: np.ndarray) -> None:
            before = Agreed.read(memory)
            agreed = Agreed.read(memory)
            if agreed.rounds is not None:
                self._rounds.load(agreed.rounds)
            function(agreed)
            agreed.rounds = json.loads(json.dumps(self._rounds.save()))
            if agreed == before:
                raise _UnchangedError
            agreed.write(memory)

        with self._slots.turn(_AGREED), suppress(_UnchangedError):
            self._slots.change(_AGREED, change)

    def _close_what_is_due(self, agreed: Agreed) -> bool:
        """Take the next step of closing a round, given what all agree on; return whether there was one."""
        if agreed.members is not None:
            self._move_and_tell(agreed)
            return True
        if time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            self._give_up(self._dead_ranks())
            agreed = self._agreed()
        members, known = self._rounds.members(), agreed.rounds
        given_up = set(self._rounds.given_up) - set(known["_gone"] if known else ())
        if members is None and not given_up and self._rounds.failure is None:
            return False
        self._agree(self._decide)
        self._log_given_up(given_up)
        return True

    def _give_up(self, workers: Sequence[int]) -> None:
        """Wait for dead workers no longer."""
        new = set(workers) - set(self._rounds.given_up)
        if new:
            self._agree(lambda agreed: self._forget(agreed, new))
            self._log_given_up(new)

    def _forget(self, agreed: Agreed, workers: set[int]) -> None:
        self._rounds.gone(workers)
        for worker in workers:
            agreed.results.pop(worker, None)

    def _log_given_up(self, workers: set[int]) -> None:
        for worker in sorted(workers):
            logger.warning(
                "Rank %d has died or been given up: rounds close without it, and the center keeps what it has sent "
                "in earlier ones",
                self.ranks[worker],
            )

    def _decide(self, agreed: Agreed) -> None:
        """Decide with whom a round closes, if one is due.

        Those whose messages are from a center that has moved since have to come again. Only a worker that is leaving,
        or is not in a replayed round, can have waited while others closed.
        """
        members = None if agreed.members is not None else self._rounds.members()
        if members is None:
            return
        late = [worker for worker in members if agreed.seen.get(worker, -1) not in (-1, agreed.number)]
        self._rounds.dismiss(late)
        agreed.results.update(dict.fromkeys(late, _AGAIN))
        if not late:
            agreed.members, agreed.given_up = list(members), self._rounds.given_up

    def _finish_closing(self) -> None:
        """Take the rest of the steps of a round that has been decided, if there is one."""
        while (agreed := self._agreed()).members is not None:
            self._move_and_tell(agreed)

    def _move_and_tell(self, agreed: Agreed) -> None:
        """Move the center, if nobody has, and tell the members."""
        with self._slots.turn(_CENTER):
            if self._slots.read(_CENTER, self._closings) <= agreed.closings and self._is_open(agreed):
                with suppress(_UnchangedError):
                    self._slots.change(_CENTER, partial(self._move, agreed=agreed))
        # As long as the members have not been told, the center cannot move again.
        slot = self._slots.versions.now(_CENTER)[1]
        number = self._slots.read(_CENTER, lambda memory: int(self._parts_of(memory)[0][_NUMBER]))
        self._agree(partial(self._tell, told=agreed, slot=slot, number=number))

    def _is_open(self, agreed: Agreed) -> bool:
        return self._agreed().closings == agreed.closings

    def _closings(self, memory: np.ndarray) -> int:
        return int(self._parts_of(memory)[0][_COUNT])

    def _move(self, memory: np.ndarray, agreed: Agreed) -> None:
        """Move the center by the messages of the members of the round that is decided.

        Raises:
            _UnchangedError: another worker has done so; members may then be writing their next messages.
        """
        words, image, state, vectors = self._parts_of(memory)
        if words[_COUNT] > agreed.closings:
            raise _UnchangedError
        members = agreed.members or []
        try:
            taking = [self._sent(worker) for worker in members]
            self._image[:] = image
            if self._own.optimized:
                self._restore(state if words[_STEPPED] else None)
            closed = self._closing.close(members, taking)
        except Exception as error:
            if self._slots.read(_CENTER, self._closings) > agreed.closings:
                raise _UnchangedError from error
            raise
        image[:] = self._image
        if closed.moved and self._own.optimized:
            self._optimizer.push(state)
            words[_STEPPED] = True
        for out, vector in zip(vectors, closed.pulled, strict=False):
            out[:] = vector
        words[_COUNT], words[_NUMBER] = agreed.closings + 1, self._own.ledger.rounds[0]
        table = words[_WORDS:].reshape(self.workers, -1)
        records = [each.record for each in taking]
        found = verdicts(closed, members, records, int(words[_NUMBER]), agreed.given_up)
        for worker, verdict in zip(members, found, strict=True):
            table[worker, : len(verdict)] = verdict

    def _sent(self, worker: int) -> Contribution:
        """Return the message of a worker, whose vectors are in shared memory: another one may read them, too."""
        words, *payloads = self._message(worker)
        return self.from_words(np.array(words), payloads)

    def _restore(self, state: Sequence[np.ndarray] | None) -> None:
        if state is None:
            self._optimizer.reset()
        else:
            self._optimizer.pull(state)

    def _tell(self, agreed: Agreed, told: Agreed, slot: int, number: int) -> None:
        """Let the members of a round that has closed have the result, if nobody has told them."""
        if agreed.closings != told.closings or agreed.members is None:
            return
        self._rounds.close(agreed.members)
        agreed.results.update(dict.fromkeys(agreed.members, slot))
        agreed.closings, agreed.number, agreed.members = agreed.closings + 1, number, None

    def fail(self, text: str) -> None:
        """Let no round close any more."""
        reason = from_bytes(in_bytes(f"{titled([self.ranks[self._rank]])} cannot go on: {text}"))
        self._agree(lambda _: self._rounds.fail(reason))

    def apart(self, starts: bool) -> None:
        """Note that this worker is in another call, or no longer."""
        self._agree(lambda _: self._rounds.apart(self._rank, starts))

    def stay_out(self, starts: bool) -> None:
        """Note that this worker comes to no round from now on, or again."""
        self._agree(lambda _: self._rounds.stay_out(self._rank, starts))

    def replay(self, members: Sequence[Sequence[int]]) -> None:
        """Note it in this process: whoever decides has been called."""
        self._rounds.replayed.extend(list(each) for each in members)

    def replayed(self) -> list[list[int]]:
        """Return what is left to be replayed."""
        self._agreed()
        return self._rounds.still_replayed

    def take(self) -> None:
        """Note it in the ledger."""
        self._set(lambda center: center.ledger.take([self._rank]))

    def _set(self, function: Callable[[CenterInMemory], T]) -> None:
        with self._slots.turn(_CENTER):
            self._slots.change(_CENTER, lambda memory: function(self._center_in(self._parts_of(memory)[1])))

    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """Return that a group is closed: workers meet in rounds instead."""
        return max(group, 1), 0.0

    def read(self, index: int) -> np.ndarray:
        """Copy a bucket."""
        return self._slots.read(_CENTER, lambda memory: self._center_in(self._parts_of(memory)[1]).read(index))

    def write(self, buckets: Iterator[np.ndarray], optimizer_state: Any = None) -> None:
        """Set the center; on one rank, while no round is open."""
        values = list(buckets)

        def write(memory: np.ndarray) -> int:
            words, image, state, _ = self._parts_of(memory)
            center = self._center_in(image)
            for index, of_bucket in enumerate(values):
                center.write(index, of_bucket)
            words[_STEPPED] = optimizer_state is not None
            if optimizer_state is not None:
                self._optimizer.load(optimizer_state)
                self._optimizer.push(state)
            words[_NUMBER] = center.ledger.rounds[0]
            return int(words[_NUMBER])

        with self._slots.turn(_CENTER):
            number = self._slots.change(_CENTER, write)
        self._agree(lambda agreed: setattr(agreed, "number", number))

    def optimizer_state(self) -> Any:
        """Return the state, from a copy of the shared memory."""
        words, _, state, _ = self._parts_of(self._slots.read(_CENTER, np.copy))
        if not words[_STEPPED]:
            return None
        self._optimizer.pull(state)
        return self._optimizer.state()

    def close(self) -> None:
        """Release the memory."""
        del self._slots
        self._memory.close()
        self._messages.close()
