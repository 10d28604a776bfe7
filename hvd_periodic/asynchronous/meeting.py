"""The side of rounds that workers see, whatever carries their messages: they come, and get a verdict."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors
from hvd_periodic.asynchronous.closing import Closed, Contribution
from hvd_periodic.asynchronous.transport import Transport
from hvd_periodic.comm.base import DifferentCallsError
from hvd_periodic.comm.handshake import Record, integers, unpack_records

NOTHING, TAKEN, MOVED, FAILED, AGAIN, IN_VAIN = range(6)
"""What has become of a round for a worker: nothing moved, as nobody had anything to contribute; nor did the center, but
this worker, which is left out, takes it; the center moved; the round did not close; this worker has to come again, as
the center has moved since it saw it, or as it has taken back its message; or it is in finalize(), and waits for one
that waits for all in another call."""

PULLS = (TAKEN, MOVED)
"""After these, the worker pulls vectors."""

VERDICT = 8
"""Integers of the verdict on a round before the members, their records and the workers that were given up, or the
reason why it did not close: what has become of it, its number, the number of members, the staleness of the worker; as
float64 the norm of its message, the factor to which that was reduced, and the norm of the mean, each NaN if there is
none; and the number of workers that were given up."""

TEXT = 1024
"""Bytes of the reason why a worker cannot go on."""

LOOK = 0.1
"""Seconds between two looks for ranks that have died."""


@dataclass(frozen=True)
class Round:
    """A round that has closed, as each of those in it knows it.

    Attributes:
        number: its number, from 1, among those that have moved the center.
        members: the workers that took part.
        records: their records, in the same order.
        staleness: rounds that closed between the one that this worker was in before, and this one.
        moved: whether the center has moved.
        norms: ``message_norm`` of this worker, and ``mean_norm``, where norms are bounded.
        given_up: the workers that will not come again.
    """

    number: int
    members: Sequence[int]
    records: Sequence[Record]
    staleness: int
    moved: bool
    norms: Mapping[str, float] = field(default_factory=dict)
    given_up: Sequence[int] = ()


class Meeting(Transport):
    """Workers meet in rounds.

    Attributes:
        round: the last round in which this worker was.
        waited: seconds for which it waited for the close, the way of its messages included.
        message_norm: the norm of the message with which this worker comes, if it measures that; otherwise NaN.
        fetched_buckets: number of buckets, the first ones, that workers ask for before they form their messages.
        ranks: global ranks of the workers, for messages.
        workers: number of workers.
        root: the worker whose learning rates count.
        interrupt: the KeyboardInterrupt that came when a round already closed with this worker; None if there is none.
    """

    def _prepare(self, parts: Sequence[ExchangedTensors], ranks: Sequence[int], root: int) -> None:
        """Set the attributes."""
        self.round = Round(0, [], [], 0, moved=False)
        self.waited = 0.0
        self.interrupt: KeyboardInterrupt | None = None
        self._begun = False
        self.message_norm = math.nan
        self.fetched_buckets = len(parts[0].layout.buckets) if parts[0].asks_for_center else 0
        self.ranks, self.root = list(ranks), root
        self.workers = len(self.ranks)
        self._record = Record(0, 0)
        uses_rates = parts[0].algorithm.uses_learning_rate
        self._rates = len(parts[0].layout.specs) if uses_rates else 0

    def introduce(self, record: Record) -> None:
        """Set the record with which this worker comes to the next round."""
        self._record = record

    def exchange(self, exchange: Exchange, payloads: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Come to a round, wait for its close, and yield the vectors to pull; none if nothing has moved.

        After the pull, the caller has to call :meth:`conclude`.

        Raises:
            RuntimeError: no round closes any more; or an interrupt has ended the previous exchange halfway.
            KeyboardInterrupt: in the wait; the message has been taken back.
        """
        self.waited = 0.0
        verdict, pulled = self._meet(exchange, payloads)
        self._note(verdict)
        yield from pulled

    def exchange_from_center(
        self, exchange: Exchange, form: Callable[[Sequence[np.ndarray]], Iterator[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        """As :meth:`exchange`, of messages that are formed from the center as it is when the round closes.

        If a round closes without this worker after it has read the center, the worker tries again: it reads the
        center, forms its message and comes to the next round.

        Args:
            exchange: the exchange.
            form: returns what this worker sends, given the buckets that workers ask for; called at every try.

        Raises:
            RuntimeError, KeyboardInterrupt: as :meth:`exchange`.
        """
        self.waited = 0.0
        while True:
            seen, centers = self._see()
            self.message_norm = math.nan
            verdict, pulled = self._meet(exchange, form(centers), seen)
            if verdict[0] != AGAIN:
                break
        self._note(verdict)
        if verdict[0] in PULLS:
            yield from centers
        yield from pulled

    def _meet(
        self, exchange: Exchange, payloads: Iterator[np.ndarray], seen: int = -1
    ) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Come to a round, and wait for its close; return the verdict, and the vectors to pull.

        An interrupt in the wait takes the message back, and is raised. If the round closes with the message
        nevertheless, the exchange goes on, and :meth:`raise_interrupt` raises it afterwards.
        """
        if self._begun:
            error = RuntimeError(
                "An interrupt has ended the previous exchange of this rank halfway, and its replica may hold a part of "
                "the result: start again from a checkpoint"
            )
            self.fail(str(error))
            raise error
        # Copies: a front end may form the next one in the same memory.
        copies = [np.array(payload) for payload in payloads]
        sent = Contribution(self._record, list(exchange.rates), copies, seen, self.message_norm)
        came, self._begun, self.interrupt = time.perf_counter(), True, None
        try:
            answer = self._come(sent)
        except KeyboardInterrupt as interrupt:
            answer = self._take_back()
            if answer[0][0] == AGAIN:
                self._begun = False
                raise
            self.interrupt = interrupt
        self.waited += time.perf_counter() - came
        self._begun = answer[0][0] in PULLS
        return answer

    @property
    def at_rest(self) -> bool:
        """Whether no round has this worker's message or a result that it has not pulled."""
        return not self._begun

    def conclude(self) -> None:
        """Note that this worker has pulled the result of its round, and counted that."""
        self._begun = False

    def raise_interrupt(self) -> None:
        """Raise the interrupt that came when a round already closed with this worker, if there is one."""
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt

    @abstractmethod
    def _come(self, sent: Contribution) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Come to a round with what this worker has; return the verdict, and the vectors to pull."""

    @abstractmethod
    def _take_back(self) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Wait for the round no longer; return the verdict AGAIN, or the result if it closes with this worker."""

    @abstractmethod
    def _see(self) -> tuple[int, list[np.ndarray]]:
        """Return the number of the last round, and the buckets that workers ask for."""

    @abstractmethod
    def fail(self, text: str) -> None:
        """Tell all workers, as they come, that this one cannot go on."""

    @abstractmethod
    def apart(self, starts: bool) -> None:
        """Tell that this worker is in another call, or no longer."""

    @abstractmethod
    def replay(self, members: Sequence[Sequence[int]]) -> None:
        """Let the next rounds close with exactly these workers each; called on all ranks."""

    @abstractmethod
    def replayed(self) -> list[list[int]]:
        """Return the workers of the rounds that are still to be replayed."""

    def sizes(self) -> tuple[int, int]:
        """Return the number of integers of what a worker says, and of the verdict on a round."""
        width = len(integers(Record(0, 0)))
        return width + self._rates + 2, VERDICT + self.workers * (1 + width) + TEXT // 8

    def in_words(self, sent: Contribution) -> np.ndarray:
        """Return what a worker says besides its payloads, as integers."""
        words = np.array([*integers(sent.record), sent.seen], np.int64)
        return np.concatenate([words, np.array([sent.norm, *sent.rates], np.float64).view(np.int64)])

    def from_words(self, words: np.ndarray, payloads: list[np.ndarray]) -> Contribution:
        """Return what a worker has sent, given its integers and payloads."""
        width = len(integers(Record(0, 0)))
        (record,), _ = unpack_records(words[:width])
        norm, *rates = words[width + 1 :].view(np.float64).tolist()
        return Contribution(record, rates, payloads, int(words[width]), norm)

    def _note(self, verdict: np.ndarray) -> None:
        self.round = self._read(verdict)
        self.missed = self.round.staleness

    def _read(self, verdict: np.ndarray) -> Round:
        """Return the round that a verdict is about.

        Raises:
            RuntimeError: it did not close; or will not, as ranks are in different calls.
        """
        what, number, count, staleness = verdict[:4].tolist()
        rest = verdict[VERDICT:]
        if what in (FAILED, IN_VAIN):
            text = from_bytes(rest)
            raise RuntimeError(text) if what == FAILED else DifferentCallsError(text)
        told = verdict[4 : VERDICT - 1].view(np.float64).tolist()
        norm, cut, mean = (None if math.isnan(each) else each for each in told)
        self.cut = cut
        norms = {key: each for key, each in (("message_norm", norm), ("mean_norm", mean)) if each is not None}
        width = len(integers(Record(0, 0)))
        end = count * (1 + width)
        records, _ = unpack_records(rest[count:end])
        given_up = rest[end : end + int(verdict[VERDICT - 1])].tolist()
        return Round(number, rest[:count].tolist(), records, staleness, what == MOVED, norms, given_up)


def verdicts(
    closed: Closed, members: Sequence[int], records: Sequence[Record], number: int, given_up: Sequence[int]
) -> list[list[int]]:
    """Return the verdict on a round for each of its members, in their order, as integers.

    Args:
        closed: its result.
        members: those who took part.
        records: what they came with.
        number: the number of the last round that moved the center.
        given_up: the workers that will not come again.
    """
    told = [len(given_up), *members, *(word for record in records for word in integers(record)), *given_up]
    found = []
    for place, record in enumerate(records):
        what = MOVED if closed.moved else TAKEN if record.left_out else NOTHING
        norms = np.array([closed.norms[place], closed.cuts[place], closed.mean_norm])
        found.append([what, number, len(members), closed.staleness[place], *norms.view(np.int64).tolist(), *told])
    return found


def dismissal(what: int, text: str) -> list[int]:
    """Return the verdict, as integers, that no round closes for a worker any more, and why."""
    return [what, *[0] * (VERDICT - 1), *in_bytes(text).view(np.int64).tolist()]


def in_bytes(text: str) -> np.ndarray:
    """Return a text as bytes of a fixed number, cut if it is longer; ``?`` for lone surrogates."""
    data = np.zeros(TEXT, np.uint8)
    encoded = text.encode(errors="replace")[: TEXT - 1]
    data[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return data


def from_bytes(data: np.ndarray) -> str:
    """Return the text of :func:`in_bytes`, without a character that was cut in the middle."""
    return data.tobytes().split(b"\0", 1)[0].decode(errors="ignore")
