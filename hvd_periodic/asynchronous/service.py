"""The transport through messages: each holder of the center serves it from a separate thread."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory, ExchangedTensors, empty, numbered
from hvd_periodic.asynchronous.ledger import Ledger, ledger_bucket
from hvd_periodic.asynchronous.transport import Transport
from hvd_periodic.asynchronous.wire_formats import States
from hvd_periodic.checkpoints.tree import Leaves
from hvd_periodic.comm.transports import LONG, SHORT, Messages, PeerLostError, Request
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.participation.present import presence_from_array, presence_to_array
from hvd_periodic.vectors.layout import Bucket

REQUEST, ANSWER, _STATE_BYTES, _PAYLOAD = 0, 1, 2, 8
"""Tags of a request, of its answer, and of an optimizer's state; the tag of bucket i is ``_PAYLOAD + 2 i``, the tag of
its reply one more."""

_BEGIN, _READ, _WRITE, _STATE, _LOAD, _PRESENCE, _RATES, _TAKE, _GATHER, _POST = range(10)
"""Requests, of six 64-bit integers: operation, bucket or holder, gradients, workers, and as float64 period and speed.

``_BEGIN`` describes the exchange of the payloads to follow; the first holder answers with the staleness of the push and
the relative speed of the worker, as float64.
Before it come ``_PRESENCE`` if the worker may be absent for some tensors, then its presence; and ``_RATES`` if the
algorithm uses the worker's learning rates, then a float64 for every tensor of the first part. The answer to ``_STATE``
is the number of bytes of the state, then the state; in ``_LOAD``, that number is in place of the bucket. ``_GATHER``
has a group in place of the bucket, and the grace in that of the period; the answer is the ledger's, as float64.
``_POST`` has a number of bytes in place of the bucket: those that the worker posts, after the number of the call."""

_PAUSE = 0.05
"""Seconds between two polls for messages while the service is paused."""

Bounds = Callable[[Bucket], list[tuple[int, int]]]
"""Returns the first and the past-the-last element of a bucket for each holder."""


class ServiceTransport(Transport):
    """Every holder of the center, the root or all ranks, serves its share from a thread.

    A bucket is one message each way, and one transaction at the holder. If an optimizer moves the center, a holder
    steps and replies once all messages of one worker have come, and serves others until then.

    Args:
        requests: messages from workers.
        replies: messages from holders; separate, because a rank may be both.
        parts: tensors that are exchanged.
        workers: number of workers.
        holders: the ranks that hold the center; the first of them tells the staleness of a push.
        bounds: returns the bounds of each holder's share of a bucket.
        optimizer: optimizer of the center, if there is one.
        leaves: handles the tensors in the state of the optimizer.
        center: memory for this rank's share of the center. Default: allocated here.
    """

    def __init__(
        self,
        requests: Messages,
        replies: Messages,
        parts: Sequence[ExchangedTensors],
        workers: int,
        holders: Sequence[int],
        bounds: Bounds,
        optimizer: OuterOptimizer,
        leaves: Leaves,
        center: np.ndarray | None = None,
    ) -> None:
        self._requests, self._replies = requests, replies
        self._rank = requests.rank
        self._holders = list(holders)
        self._buckets = [bucket for _, _, bucket in numbered(parts, [part.layout for part in parts])]
        self._bounds = [bounds(bucket) for bucket in self._buckets]
        self._count = sum(len(part.layout.buckets) for part in parts)
        size = Ledger.size(self._count, workers)  # Every holder has its own ledger.
        self._buckets.append(ledger_bucket(len(self._buckets), size))
        self._bounds.append([(0, size) for _ in self._holders])
        self._states = States(parts, leaves)
        self._names = [spec.name for part in parts for spec in part.layout.specs]
        place = self._holders.index(self._rank) if self._rank in self._holders else None

        def owned(bucket: Bucket) -> tuple[int, int]:
            return (0, 0) if place is None else bounds(bucket)[place]

        shares = [part.layout.share(owned) for part in parts]
        if center is None:
            center = np.zeros(CenterInMemory.nbytes(parts, shares, workers), np.uint8)
        shard = CenterInMemory(parts, shares, workers, center)
        self._optimized = shard.optimized
        shard.bind(optimizer)
        self.holds_center = place is not None
        self._service = None if place is None else self._start(shard, optimizer)
        where = f"rank {holders[0]}" if len(self._holders) == 1 else "every rank"
        self.description = f"messages to a service thread on {where}"

    def _start(self, shard: CenterInMemory, optimizer: OuterOptimizer) -> Service:
        """Start to serve this rank's share."""
        return Service(self._requests, self._replies, shard, optimizer, self._states)

    def exchange(self, exchange: Exchange, payloads: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Send bucket by bucket, and receive the buckets that the worker pulls."""
        told = self._begin(exchange)
        optimized = [next(payloads) for _ in range(self._optimized)]
        if optimized:
            yield from self._step(optimized)
        for index in range(self._optimized, self._count):
            yield self._transact(index, next(payloads))
        self.missed, self.relative_speed = told()

    def take(self) -> None:
        """Tell every holder, which has noted it when this worker's next push arrives."""
        for holder in self._holders:
            if holder == self._rank:
                self._own.take(self._rank)
            else:
                self._request(holder, _TAKE)

    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """Ask the first holder, by its clock."""
        first = self._holders[0]
        if first == self._rank:
            return self._own.gather(group, grace)
        told = np.empty(2, np.float64)
        answer = self._replies.receive(told, first, ANSWER)
        self._request(first, _GATHER, group, grace)
        answer.wait()
        return int(told[0]), float(told[1])

    def read(self, index: int) -> np.ndarray:
        """Ask every holder for its share of a bucket."""
        values = empty(self._buckets[index])
        for holder, start, stop in self._slices(index):
            if holder == self._rank:
                values[start:stop] = self._own.read(index)
            else:
                reply = self._replies.receive(values[start:stop], holder, payload_tag(index) + 1)
                self._request(holder, _READ, index)
                reply.wait()
            if stop - start == values.size:  # The other holders have nothing, or ledgers that count the same.
                break
        return values

    def write(self, buckets: Iterator[np.ndarray], optimizer_state: Any = None) -> None:
        """Send every holder its share of all buckets, then the state of the optimizer."""
        for index, values in enumerate(buckets):
            for holder, start, stop in self._slices(index):
                part = np.ascontiguousarray(values[start:stop])
                if holder == self._rank:
                    self._own.write(index, part)
                else:
                    self._request(holder, _WRITE, index)
                    self._requests.send(part, holder, payload_tag(index)).wait()
                    self._answer(holder)
        states = [optimizer_state] * len(self._holders)
        if len(states) > 1 and optimizer_state is not None:
            states = optimizer_state["sharded"]
        for holder, state in zip(self._holders, states, strict=True):
            if holder == self._rank:
                self._own.load(state)
            else:
                data = self._states.pack(state)
                self._request(holder, _LOAD, data.size)
                self._requests.send(data, holder, _STATE_BYTES).wait()
                self._answer(holder)

    def post(self, call: int, data: bytes, reader: int) -> bool:
        """Send some bytes to one holder, which keeps them for itself; wait until it has them."""
        if reader == self._rank:
            self._own.post(self._rank, call, data)
        else:
            message = np.frombuffer(call.to_bytes(8, "little") + data, np.uint8)
            self._request(reader, _POST, message.size)
            self._requests.send(message, reader, ANSWER).wait()
            self._answer(reader)
        return True

    def posted(self, call: int) -> dict[int, bytes]:
        """Return what workers have posted to this rank in a call."""
        return {} if self._service is None else self._service.posted(call)

    def optimizer_state(self) -> Any:
        """Ask every holder for the optimizer state of its share."""
        states = []
        for holder in self._holders:
            if holder == self._rank:
                states.append(self._own.state())
            else:
                self._request(holder, _STATE)
                data = self._states.allocate(self._answer(holder))
                self._replies.receive(data, holder, _STATE_BYTES).wait()
                states.append(self._states.unpack(data))
        if all(state is None for state in states):
            return None
        return states[0] if len(states) == 1 else {"sharded": states}

    def pause(self) -> None:
        """Poll for messages less often, until one arrives."""
        if self._service is not None:
            self._service.paused = True

    def close(self) -> None:
        """Stop the thread."""
        if self._service is not None:
            self._service.stop()
        self._requests.close()
        self._replies.close()

    @property
    def _own(self) -> Service:
        if self._service is None:
            raise RuntimeError("This rank does not hold the center")
        return self._service

    def _begin(self, exchange: Exchange) -> Callable[[], tuple[int, float]]:
        """Announce the payloads of an exchange; return a function that waits for what :meth:`Ledger.begin` returns."""
        sent, own = [], (0, 0.0)
        for place, holder in enumerate(self._holders):
            if holder != self._rank:
                if exchange.presence:
                    self._request(holder, _PRESENCE)
                    self._requests.send(presence_to_array(exchange.presence, self._names), holder, ANSWER).wait()
                if exchange.rates:
                    self._request(holder, _RATES)
                    self._requests.send(np.array(exchange.rates, np.float64), holder, ANSWER).wait()
                header = np.array([_BEGIN, place, exchange.gradients, exchange.size, 0, 0], np.int64)
                header[4:].view(np.float64)[:] = exchange.period, exchange.speed
                sent.append(self._requests.send(header, holder, REQUEST))
            else:
                own = self._own.begin(self._rank, exchange)
        first = self._holders[0]
        if first != self._rank:
            told = np.empty(2, np.float64)
            reply = self._replies.receive(told, first, ANSWER)

        def wait() -> tuple[int, float]:
            for request in sent:
                request.wait()
            if first == self._rank:
                return own
            reply.wait()
            return int(told[0]), float(told[1])

        return wait

    def _transact(self, index: int, payload: np.ndarray) -> np.ndarray:
        pulled = np.empty_like(payload)
        requests = self._exchange_with_others(index, payload, pulled)
        for holder, start, stop in self._slices(index):
            if holder == self._rank:
                pulled[start:stop] = self._own.transact(index, payload[start:stop], self._rank)
        for request in requests:
            request.wait()
        return pulled

    def _step(self, payloads: list[np.ndarray]) -> Iterator[np.ndarray]:
        pulled = [np.empty_like(payload) for payload in payloads]
        requests = [self._exchange_with_others(index, payloads[index], pulled[index]) for index in range(len(payloads))]
        for place, holder in enumerate(self._holders):
            if holder == self._rank:
                parts = [payload[slice(*self._bounds[i][place])] for i, payload in enumerate(payloads)]
                for i, part in enumerate(self._own.step(parts, self._rank)):
                    pulled[i][slice(*self._bounds[i][place])] = part
        for index, pending in enumerate(requests):
            for request in pending:
                request.wait()
            yield pulled[index]

    def _exchange_with_others(self, index: int, payload: np.ndarray, pulled: np.ndarray) -> list[Request]:
        requests = []
        for holder, start, stop in self._slices(index):
            if holder != self._rank:
                requests.append(self._replies.receive(pulled[start:stop], holder, payload_tag(index) + 1))
                requests.append(self._requests.send(payload[start:stop], holder, payload_tag(index)))
        return requests

    def _slices(self, index: int) -> Iterator[tuple[int, int, int]]:
        for holder, (start, stop) in zip(self._holders, self._bounds[index], strict=True):
            if stop > start:
                yield holder, start, stop

    def _request(self, holder: int, operation: int, index: int = 0, seconds: float = 0.0) -> None:
        header = np.array([operation, index, 0, 0, 0, 0], np.int64)
        header[4:].view(np.float64)[0] = seconds
        self._requests.send(header, holder, REQUEST).wait()

    def _answer(self, holder: int) -> int:
        answer = np.empty(1, np.int64)
        self._replies.receive(answer, holder, ANSWER).wait()
        return int(answer[0])


class Service:
    """A holder's share, and the thread that runs the transactions of other ranks on it."""

    def __init__(
        self,
        requests: Messages,
        replies: Messages,
        center: CenterInMemory,
        optimizer: OuterOptimizer,
        states: States,
    ) -> None:
        self._center, self._states = center, states
        self._names = [spec.name for part in center.parts for spec in part.layout.specs]
        self._requests, self._replies = requests, replies
        self._optimizer = optimizer
        self._first = next((i for i in range(center.optimized) if center.buckets[i].size), -1)
        self._stepped = False
        self._exchanges: dict[int, Exchange] = {}
        self._presence: dict[int, Mapping[str, float | None]] = {}
        self._rates: dict[int, list[float]] = {}
        self._posted: dict[int, tuple[int, bytes]] = {}
        self._sending: list[tuple[Request, np.ndarray]] = []
        self._coming: dict[int, tuple[list[Request], Callable[[], None]]] = {}
        """By worker: messages that belong together, and what is done with them."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.paused = False
        self._thread = threading.Thread(target=self._run, name="hvd_periodic service", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once no rank sends any more."""
        self._stopping.set()
        self._thread.join()

    def begin(self, worker: int, exchange: Exchange) -> tuple[int, float]:
        """Count a push of a worker, and note what is known of it; return its staleness and relative speed."""
        with self._lock:
            staleness, relative_speed = self._center.ledger.begin(worker, exchange.speed)
            self._exchanges[worker] = replace(exchange, staleness=staleness)
            return staleness, relative_speed

    def take(self, worker: int) -> None:
        """Note that a worker takes the center without a push."""
        with self._lock:
            self._center.ledger.take([worker])

    def gather(self, group: int, grace: float) -> tuple[int, float]:
        """As :meth:`.Ledger.gather`."""
        with self._lock:
            return self._center.ledger.gather(group, time.monotonic(), grace)

    def post(self, worker: int, call: int, data: bytes) -> None:
        """Keep what a worker shows in a call."""
        with self._lock:
            self._posted[worker] = call, data

    def posted(self, call: int) -> dict[int, bytes]:
        """Return what workers have shown in a call."""
        with self._lock:
            return {worker: data for worker, (of_call, data) in self._posted.items() if of_call == call}

    def transact(self, index: int, payload: np.ndarray, worker: int) -> np.ndarray:
        """Run one transaction of a worker."""
        with self._lock:
            return self._center.transact(index, payload, self._exchanges[worker])

    def step(self, messages: Sequence[np.ndarray], worker: int) -> list[np.ndarray]:
        """Apply the messages of one worker with the optimizer; return copies of the center."""
        with self._lock:
            exchange = self._exchanges[worker]
            for index, message in enumerate(messages):
                self._center.set_total(index, message, exchange)
            self._optimizer.step()
            self._stepped = True
            return [self._center.read(index) for index in range(self._center.optimized)]

    def read(self, index: int) -> np.ndarray:
        """Return a copy of a bucket."""
        with self._lock:
            return self._center.read(index)

    def write(self, index: int, values: np.ndarray) -> None:
        """Set a bucket."""
        with self._lock:
            self._center.write(index, values)

    def state(self) -> Any:
        """Return a copy of the optimizer's state; None before its first step."""
        with self._lock:
            return self._optimizer.state() if self._stepped else None

    def load(self, state: Any) -> None:
        """Set the optimizer's state after the buckets have been written; None: a new state."""
        with self._lock:
            self._stepped = state is not None
            if state is not None:
                self._optimizer.load(state)
            elif self._center.optimized:
                self._optimizer.reset()

    def _run(self) -> None:
        """Serve until stopped."""
        try:
            idle = time.monotonic()
            while self._requests.alive():
                if self._serve() or self.attend():
                    idle, self.paused = time.monotonic(), False
                    continue
                self._sending = [sent for sent in self._sending if not sent[0].done()]
                if self._stopping.is_set() and not self._sending:
                    return
                waiting = self.busy or self._sending or time.monotonic() - idle < LONG
                self._requests.pause(SHORT if waiting else _PAUSE if self.paused else LONG)
        except BaseException:
            # The other ranks would wait forever for replies.
            traceback.print_exc()
            self._requests.abort()

    def attend(self) -> bool:
        """Do what is due besides serving messages; return whether anything was."""
        complete = [worker for worker, (requests, _) in self._coming.items() if all(each.done() for each in requests)]
        for worker in complete:
            with suppress(PeerLostError):  # It has died in the middle of a request, which then changes nothing.
                self._take(worker)
        return bool(complete)

    def _take(self, worker: int) -> None:
        """Receive what is coming from a worker, and do with it what has to be done.

        Raises:
            PeerLostError: the worker has died.
        """
        requests, function = self._coming.pop(worker)
        for request in requests:
            request.wait()
        function()

    @property
    def busy(self) -> bool:
        """Whether messages are on their way."""
        return bool(self._coming)

    def _serve(self) -> bool:
        """Serve one message, if there is one."""
        arrival = self._requests.next(self._allocate)
        if arrival is None:
            return False
        try:
            if arrival.tag == REQUEST:
                self._answer(arrival.source, arrival.data)
            else:
                self._serve_payload(arrival.source, (arrival.tag - _PAYLOAD) // 2, arrival.data)
        except PeerLostError:  # It died in the middle of a request, which then changes nothing.
            pass
        return True

    def _allocate(self, tag: int) -> np.ndarray:
        """Return memory for a request, or for a payload.

        Raises:
            ValueError: a worker sends neither with this tag.
        """
        if tag == REQUEST:
            return np.empty(6, np.int64)
        index, reply = divmod(tag - _PAYLOAD, 2)
        if reply or not 0 <= index < self._center.count:
            raise ValueError(f"it sent message {tag} to a center of {self._center.count} buckets")
        return empty(self._center.buckets[index])

    def _serve_payload(self, source: int, index: int, payload: np.ndarray) -> None:
        if index == self._first:
            self._serve_step(source, payload)
        else:
            self._send(self.transact(index, payload, source), source, payload_tag(index) + 1)

    def _serve_step(self, source: int, first: np.ndarray) -> None:
        count = self._center.optimized
        messages = [first if i == self._first else empty(self._center.buckets[i]) for i in range(count)]

        def step() -> None:
            for index, part in enumerate(self.step(messages, source)):
                if part.size:
                    self._send(part, source, payload_tag(index) + 1)

        rest = [(i, message) for i, message in enumerate(messages) if i != self._first and message.size]
        self._coming[source] = [self._requests.receive(out, source, payload_tag(i)) for i, out in rest], step

    def _answer(self, source: int, header: np.ndarray) -> None:
        operation, index = int(header[0]), int(header[1])
        if operation in (_RATES, _BEGIN) and source in self._coming:  # Presence or rates, all of which it has sent.
            self._take(source)
        if operation == _BEGIN:
            period, speed = header[4:].view(np.float64).tolist()
            presence, rates = self._presence.pop(source, {}), self._rates.pop(source, [])
            exchange = Exchange(int(header[3]), period, int(header[2]), presence=presence, rates=rates, speed=speed)
            told = self.begin(source, exchange)
            if index == 0:
                self._send(np.array(told, np.float64), source, ANSWER)
        elif operation == _READ:
            self._send(self.read(index), source, payload_tag(index) + 1)
        elif operation == _STATE:
            state = self._states.pack(self.state())
            self._send(np.array([state.size]), source, ANSWER)
            self._send(state, source, _STATE_BYTES)
        elif operation == _WRITE:
            payload = empty(self._center.buckets[index])
            self._requests.receive(payload, source, payload_tag(index)).wait()
            self.write(index, payload)
            self._send(np.zeros(1, np.int64), source, ANSWER)
        elif operation == _PRESENCE:
            weights = np.empty(len(self._names))

            def note_presence() -> None:
                self._presence[source] = presence_from_array(weights, self._names)

            self._coming[source] = [self._requests.receive(weights, source, ANSWER)], note_presence
        elif operation == _TAKE:
            self.take(source)
        elif operation == _GATHER:
            told = self.gather(index, float(header[4:].view(np.float64)[0]))
            self._send(np.array(told, np.float64), source, ANSWER)
        elif operation == _RATES:
            of_tensors = np.empty(len(self._center.parts[0].layout.specs), np.float64)

            def note_rates() -> None:
                self._rates[source] = of_tensors.tolist()

            self._coming[source] = [self._requests.receive(of_tensors, source, ANSWER)], note_rates
        elif operation == _POST:
            message = np.empty(index, np.uint8)

            def note_post() -> None:
                self.post(source, int.from_bytes(message[:8].tobytes(), "little"), message[8:].tobytes())
                self._send(np.zeros(1, np.int64), source, ANSWER)

            self._coming[source] = [self._requests.receive(message, source, ANSWER)], note_post
        elif operation == _LOAD:
            data = self._states.allocate(index)
            self._requests.receive(data, source, _STATE_BYTES).wait()
            self.load(self._states.unpack(data))
            self._send(np.zeros(1, np.int64), source, ANSWER)

    def _send(self, data: np.ndarray, destination: int, tag: int) -> None:
        self._sending.append((self._replies.send(data, destination, tag), data))


def payload_tag(index: int) -> int:
    """Return the tag of the message with a bucket; that of its reply is one more."""
    return _PAYLOAD + 2 * index
