"""The transport of rounds: workers send what they have to the root, which closes rounds and answers those in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors, empty
from hvd_periodic.asynchronous.closing import Closing, Contribution
from hvd_periodic.asynchronous.meeting import (
    AGAIN,
    FAILED,
    IN_VAIN,
    LOOK,
    PULLS,
    TEXT,
    Meeting,
    dismissal,
    from_bytes,
    in_bytes,
    verdicts,
)
from hvd_periodic.asynchronous.rounds import Rounds
from hvd_periodic.asynchronous.service import ANSWER, Service, ServiceTransport, payload_tag
from hvd_periodic.asynchronous.wire_formats import States
from hvd_periodic.checkpoints.tree import Leaves
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.transports import LONG, SHORT, Messages, PeerLostError, Request
from hvd_periodic.logs import logger
from hvd_periodic.outer.framework import OuterOptimizer

_COME, _FAIL, _APART, _BACK, _OUT, _SEE, _TAKE_BACK = range(16, 23)
"""Requests besides those of a service: a worker comes with what it has; it cannot go on; it is in another call, or
back; it comes to no round (1 in place of the bucket), or again (0, answered); it asks for the center as it is; it takes
back its message, unless a round has closed with that. What it has to say and its payloads follow the first at once,
without an answer in between. The answer to the center is the number of the last round, then the buckets that workers
ask for; the last has no answer but the verdict, which comes once."""


class HubTransport(Meeting, ServiceTransport):
    """Workers meet in rounds at the root, which holds the center.

    A round needs all that a worker has: who is stopped in the middle of sending keeps nobody waiting.

    Args:
        requests: as for a service.
        replies: likewise.
        parts: tensors that are exchanged.
        ranks: global ranks of the workers, for messages.
        root: the worker that holds the center.
        optimizer: optimizer of the center, if there is one.
        leaves: handles the tensors in the state of the optimizer.
        rounds: decides who takes part; used on the root.
        dead_ranks: returns the workers that are known to be dead.
    """

    def __init__(
        self,
        requests: Messages,
        replies: Messages,
        parts: Sequence[ExchangedTensors],
        ranks: Sequence[int],
        root: int,
        optimizer: OuterOptimizer,
        leaves: Leaves,
        rounds: Rounds,
        dead_ranks: Callable[[], Sequence[int]],
    ) -> None:
        self._prepare(parts, ranks, root)
        self.rounds, self.dead_ranks = rounds, dead_ranks
        super().__init__(
            *(requests, replies, parts, self.workers, [root]),
            bounds=lambda bucket: [(0, bucket.size)],
            optimizer=optimizer,
            leaves=leaves,
        )
        self._under_way: tuple[np.ndarray, list[Request], Request] | None = None
        self.description = f"messages to rank {self.ranks[root]}, which closes rounds"

    def _start(self, shard: CenterInMemory, optimizer: OuterOptimizer) -> Service:
        return Hub(self._requests, self._replies, shard, optimizer, self._states, self)

    def _come(self, sent: Contribution) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Come to a round with what this worker has; return the verdict, and the vectors to pull."""
        if self._rank == self.root:
            return self._hub.attend_round(self._rank, sent, self._while_waiting)
        return self._send(sent)

    def _take_back(self) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Wait no longer; return the verdict AGAIN, or the result if a round has closed with this worker.

        Raises:
            KeyboardInterrupt: the interrupt came before the whole message was on its way.
        """
        if self._rank == self.root:
            self._hub.take_back(self._rank)
            return self._hub.own_result()
        if self._under_way is None:
            raise KeyboardInterrupt
        verdict, sending, answer = self._under_way
        self._wait(sending)
        self._request(self.root, _TAKE_BACK)
        self._wait([answer])
        return verdict, self._pulled(verdict)

    def _see(self) -> tuple[int, list[np.ndarray]]:
        """Return the number of the last round, and the buckets that workers ask for."""
        if self._rank == self.root:
            return self._hub.see()
        number, centers = np.empty(1, np.int64), [empty(bucket) for bucket in self._buckets[: self.fetched_buckets]]
        answers = [self._replies.receive(number, self.root, ANSWER)]
        answers += [self._replies.receive(out, self.root, payload_tag(i) + 1) for i, out in enumerate(centers)]
        self._request(self.root, _SEE)
        self._wait(answers)
        return int(number[0]), centers

    def fail(self, text: str) -> None:
        """Tell all workers, as they come, that this one cannot go on."""
        if self._rank == self.root:
            self._hub.fail(self._rank, text)
            return
        self._request(self.root, _FAIL)
        self._requests.send(in_bytes(text), self.root, ANSWER).wait()

    def apart(self, starts: bool) -> None:
        """Tell the root that this worker is in another call, or no longer."""
        if self._rank == self.root:
            self._hub.set_apart(self._rank, starts)
        else:
            self._request(self.root, _APART if starts else _BACK)

    def stay_out(self, starts: bool) -> None:
        """Tell the root that this worker comes to no round from now on, though its process answers others; or again.

        In the latter case, wait until the root knows.
        """
        if self._rank == self.root:
            self._hub.set_out(self._rank, starts)
        elif self.root not in self.dead_ranks():
            self._request(self.root, _OUT, int(starts))
            if not starts:
                self._wait([self._replies.receive(np.empty(1, np.int64), self.root, ANSWER)])

    def replay(self, members: Sequence[Sequence[int]]) -> None:
        """Note it; that of the root counts."""
        self.rounds.replayed.extend(list(each) for each in members)

    def replayed(self) -> list[list[int]]:
        """Return what is left to be replayed."""
        return self.rounds.still_replayed

    @property
    def _hub(self) -> Hub:
        return cast(Hub, self._own)

    def _send(self, sent: Contribution) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Send what this worker has; return the verdict, and the vectors to pull."""
        self._under_way = None
        verdict = np.empty(self.sizes()[1], np.int64)
        answer = self._replies.receive(verdict, self.root, ANSWER)
        self._request(self.root, _COME)
        sending = [self._requests.send(self.in_words(sent), self.root, ANSWER)]
        sending += [self._requests.send(each, self.root, payload_tag(i)) for i, each in enumerate(sent.payloads)]
        self._under_way = verdict, sending, answer
        self._wait([*sending, answer])
        return verdict, self._pulled(verdict)

    def _pulled(self, verdict: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the vectors to pull after a verdict."""
        rest = range(self.fetched_buckets, self._count)
        buffers = [empty(self._buckets[i]) for i in rest] if verdict[0] in PULLS else []
        tags = (payload_tag(i) + 1 for i in rest)
        receiving = [self._replies.receive(out, self.root, tag) for out, tag in zip(buffers, tags, strict=False)]
        for request, out in zip(receiving, buffers, strict=True):
            self._wait([request])
            yield out

    def _wait(self, requests: Sequence[Request]) -> None:
        for request in requests:
            looked = time.monotonic()
            while not request.done():
                time.sleep(SHORT if time.monotonic() - looked < LONG else LONG)
                if time.monotonic() - looked > LOOK:
                    self._while_waiting()
                    looked = time.monotonic() - LONG
            try:
                request.wait()
            except PeerLostError as error:
                raise self._root_has_ended() from error

    def _while_waiting(self) -> None:
        """Raise a RuntimeError if the wait for the root cannot end."""
        if not self._requests.alive() or self.root in self.dead_ranks():
            raise self._root_has_ended()

    def _root_has_ended(self) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.ranks[self.root]}, which held the center, has ended: start again from a checkpoint"
        )


class Hub(Service):
    """The center, and the thread that closes rounds.

    Args:
        requests: as for a service.
        replies: likewise.
        center: likewise.
        optimizer: likewise.
        states: likewise.
        transport: what the root itself uses, and what tells how large messages are.
    """

    def __init__(
        self,
        requests: Messages,
        replies: Messages,
        center: CenterInMemory,
        optimizer: OuterOptimizer,
        states: States,
        transport: HubTransport,
    ) -> None:
        self._transport, self._rounds = transport, transport.rounds
        self._contributions: dict[int, Contribution] = {}
        self._own: tuple[np.ndarray, list[np.ndarray]] = np.empty(0, np.int64), []
        self._closed = threading.Event()
        self._looked = 0.0
        self._given_up: set[int] = set()
        self._abandoned: list[object] = []
        self._closing = Closing(center, optimizer, transport.workers, transport.root)
        super().__init__(requests, replies, center, optimizer, states)

    def attend_round(
        self, worker: int, sent: Contribution, check: Callable[[], None]
    ) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Come to a round as the worker of this process; return the verdict, and the vectors to pull."""
        self._own = np.array([AGAIN]), []
        self._closed.clear()
        self._come(worker, sent)
        while not self._closed.wait(LOOK):
            check()
        return self.own_result()

    def own_result(self) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Return the verdict on the last round of the worker of this process, and the vectors to pull."""
        verdict, pulled = self._own
        return verdict, iter(pulled)

    def take_back(self, worker: int) -> None:
        """Let a worker come again, unless a round has closed with its message."""
        with self._lock:
            if worker in self._contributions:
                self._let_come_again([worker])

    def see(self) -> tuple[int, list[np.ndarray]]:
        """Return the number of the last round, and the buckets of the center that workers ask for."""
        with self._lock:
            exchange = Exchange(self._transport.workers, period=1)
            fetched = [self._center.published(i, exchange) for i in range(self._transport.fetched_buckets)]
            return self._last_round, fetched

    def fail(self, worker: int, text: str) -> None:
        """Let no round close any more, because of a worker."""
        with self._lock:
            self._rounds.fail(f"Rank {self._transport.ranks[worker]} cannot go on: {text}")

    def set_apart(self, worker: int, starts: bool) -> None:
        """Note that a worker is in another call, or no longer."""
        with self._lock:
            self._rounds.apart(worker, starts)

    def set_out(self, worker: int, starts: bool) -> None:
        """Note that a worker comes to no round from now on, or again."""
        with self._lock:
            self._rounds.stay_out(worker, starts)

    def attend(self) -> bool:
        """Take what has come completely, and close a round if one is due."""
        super().attend()
        with self._lock:
            self._look_for_dead_ranks()
            members = self._rounds.members()
            self._log_given_up()
            if self._rounds.failure is not None:
                return self._dismiss(FAILED, dict.fromkeys(self._rounds.waiting, self._rounds.failure))
            if in_vain := self._rounds.in_vain():
                for worker in in_vain:
                    self._rounds.stay_out(worker, True)
                return self._dismiss(IN_VAIN, in_vain)
            if members is None:
                return False
            if not self._send_back(members):
                self._close(members)
            return True

    def _answer(self, source: int, header: np.ndarray) -> None:
        operation = int(header[0])
        if operation == _COME:
            words = np.empty(self._transport.sizes()[0], np.int64)
            payloads = [self._center.new_payload(index) for index in range(self._center.count)]
            requests = [self._requests.receive(words, source, ANSWER)]
            requests += [self._requests.receive(out, source, payload_tag(i)) for i, out in enumerate(payloads)]
            self._coming[source] = requests, lambda: self._come(source, self._transport.from_words(words, payloads))
        elif operation == _FAIL:
            text = np.empty(TEXT, np.uint8)
            self._requests.receive(text, source, ANSWER).wait()
            self.fail(source, from_bytes(text))
        elif operation in (_APART, _BACK):
            self.set_apart(source, operation == _APART)
        elif operation == _OUT:
            self.set_out(source, starts := bool(header[1]))
            if not starts:
                self._send(np.zeros(1, np.int64), source, ANSWER)
        elif operation == _SEE:
            number, centers = self.see()
            self._send(np.array([number], np.int64), source, ANSWER)
            for index, center in enumerate(centers):
                self._send(center, source, payload_tag(index) + 1)
        elif operation == _TAKE_BACK:
            if source in self._coming:  # It has sent all of that.
                self._take(source)
            self.take_back(source)
        else:
            super()._answer(source, header)

    def _come(self, worker: int, sent: Contribution) -> None:
        with self._lock:
            self._contributions[worker] = sent
            self._rounds.come(worker, sent.record.purpose == Purpose.LEAVE)
            self._send_back([worker])

    @property
    def _last_round(self) -> int:
        return int(self._center.ledger.rounds[0])

    def _send_back(self, workers: Sequence[int]) -> bool:
        """Let those come again whose messages are from a center that has moved since; return whether there are any.

        Of those who wait for a round, only workers that are leaving, or not in a replayed round, have missed others.
        """
        late = [worker for worker in workers if self._contributions[worker].seen not in (-1, self._last_round)]
        self._let_come_again(late)
        return bool(late)

    def _let_come_again(self, workers: Sequence[int]) -> None:
        for worker in workers:
            del self._contributions[worker]
            self._tell(worker, [AGAIN], [])
        self._rounds.dismiss(workers)

    def _look_for_dead_ranks(self) -> None:
        """Stop waiting for ranks that have died."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        self._rounds.gone(self._transport.dead_ranks())

    def _log_given_up(self) -> None:
        """Log that rounds close without some ranks from now on, and forget what these have sent."""
        for worker in self._rounds.given_up:
            if worker not in self._given_up:
                self._given_up.add(worker)
                self._contributions.pop(worker, None)
                if worker in self._coming:  # The memory stays: what is under way over MPI is written into it.
                    self._abandoned.append(self._coming.pop(worker))
                logger.warning(
                    "Rank %d has died or been given up: rounds close without it, and the center keeps what it has sent "
                    "in earlier ones",
                    self._transport.ranks[worker],
                )

    def _close(self, members: Sequence[int]) -> None:
        """Close a round, and answer its members."""
        taking = [self._contributions.pop(worker) for worker in members]
        closed = self._closing.close(members, taking)
        self._stepped |= closed.moved and self._center.optimized > 0
        self._rounds.close(members)
        records = [each.record for each in taking]
        answers = verdicts(closed, members, records, self._last_round, self._rounds.given_up)
        for worker, verdict in zip(members, answers, strict=True):
            self._tell(worker, verdict, closed.pulled if verdict[0] in PULLS else [])

    def _dismiss(self, what: int, waiting: Mapping[int, str]) -> bool:
        """Tell workers that wait why they wait in vain; return whether there are any."""
        for worker, text in waiting.items():
            self._contributions.pop(worker, None)
            self._tell(worker, dismissal(what, text), [])
        self._rounds.dismiss(waiting)
        return bool(waiting)

    def _tell(self, worker: int, verdict: Sequence[int], pulled: Sequence[np.ndarray]) -> None:
        words = np.zeros(self._transport.sizes()[1], np.int64)
        words[: len(verdict)] = verdict
        fetched = self._transport.fetched_buckets  # Workers have these.
        if worker == self._transport.root:
            self._own = words, [np.array(vector) for vector in pulled[fetched:]]
            self._closed.set()
            return
        self._send(words, worker, ANSWER)
        for index, vector in enumerate(pulled[fetched:], fetched):
            self._send(vector, worker, payload_tag(index) + 1)
