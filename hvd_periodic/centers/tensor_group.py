"""Tensors that are exchanged together by one algorithm: the parameters, or statistics of one kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.outbox import UNSENT, Outbox
from hvd_periodic.comm.base import Communicator
from hvd_periodic.outer.divided import Divided
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")

IN_FLIGHT = 2
"""Buckets under way at once: one travels while the next is computed."""

_FETCHED = 2 * IN_FLIGHT
"""The working buffer of a bucket of the center that is not here; the others are two per bucket under way."""


@dataclass
class Pending(Generic[V]):
    """The exchange of one bucket that has begun.

    Attributes:
        bucket: which.
        x: the replica that the message was formed from.
        worker: the worker's own vectors.
        wait: waits for the total of the messages, of this rank's share at least.
    """

    bucket: Bucket
    x: V
    worker: State[V]
    wait: Callable[[], V]


class TensorGroup(Generic[V]):
    """Values, an algorithm, the center with all that belongs to it, and the worker's own vectors.

    Args:
        name: names the group in collectives and in saved states.
        values: the tensors of this rank, with at least one element.
        algorithm: what an exchange makes of them.
        replica: lends working buffers.
        placement: where the center lives.
        outer: the optimizer of the framework that moves the center, if one does.
        rates: the learning rates, for algorithms that ask for them.
        every: takes part in every such exchange.
        lasting: local steps go on while an exchange is under way: what travels is apart from what they change.
        wire: how messages are encoded.
        communicator: the ranks, for wires that divide work between them.

    Attributes:
        center_state: the center and what belongs to it, by name, this rank's share.
        worker: the worker's own vectors by name. All vectors are zeros until :meth:`reset`.
        total: where an outer optimizer finds its gradient: of this rank's share.
        outbox: sends the messages.
        travelling: the messages that are under way, where exchanges last and no wire has encoded them.
        snapshot: the replica that they were formed from, where a late pull needs it.
    """

    def __init__(
        self,
        name: str,
        values: Store[V],
        algorithm: Algorithm,
        replica: Replica[V],
        placement: Placement,
        outer: OuterOptimizer | None = None,
        rates: LearningRates | None = None,
        every: int = 1,
        lasting: bool = False,
        wire: Wire = Plain(),  # noqa: B008
        communicator: Communicator | None = None,
    ) -> None:
        self.name, self.values, self.algorithm, self.placement = name, values, algorithm, placement
        self.every = every
        self._replica, self._outer, self._rates = replica, outer, rates
        self.share = placement.share(values.layout)
        first = self._read(values.layout.buckets[0], slot=0)
        self.center_state: dict[str, Store[V]] = {
            key: replica.new_store(self.share, f"{name}.{key}") for key in self.initial_center(first)
        }
        self.worker: dict[str, Store[V]] = {
            key: replica.new_store(values.layout, f"{name}.{key}")
            for key in algorithm.init_worker(replica.space, first)
        }
        self.outbox = Outbox(name, values.layout, placement, replica, algorithm, wire, communicator, lasting)
        if self.outbox.unsent is not None:
            self.worker[UNSENT] = self.outbox.unsent
        self.travelling: Store[V] | None = None
        self.snapshot: Store[V] | None = None
        if lasting and not wire.lossy:
            self.travelling = replica.new_store(values.layout, f"{name}.travelling")
        if lasting and algorithm.reads_after:
            self.snapshot = replica.new_store(values.layout, f"{name}.snapshot")
        self._lasting = lasting
        lent = outer is not None and self.share is values.layout and not lasting and not wire.lossy
        self._spent = algorithm.spent if lent else None
        self.total: Store[V] | None = None
        if outer is not None and self.travelling is not None:
            self.total = self.travelling
        elif outer is not None:
            self.total = self.worker[self._spent] if self._spent else replica.new_store(self.share, f"{name}.total")

    @property
    def center(self) -> Store[V]:
        """This rank's share of the center."""
        return self.center_state["center"]

    def due(self, rounds: int) -> bool:
        """Return whether the group takes part in the exchange after so many."""
        return (rounds + 1) % self.every == 0

    @property
    def vectors(self) -> dict[str, Store[V]]:
        """All vectors of the center and of the worker, by name."""
        return {**self.center_state, **self.worker}

    def reset(self) -> None:
        """Set all vectors to those of the start of training."""
        space = self._replica.space
        for bucket in self.values.layout.buckets:
            x = self._read(bucket, slot=0)
            for key, vector in self.initial_center(x).items():
                self.set_share(key, bucket, vector)
            self._write(self.worker, bucket, {}, self.algorithm.init_worker(space, x))
        self.outbox.forget()

    def set_share(self, key: str, bucket: Bucket, vector: V) -> None:
        """Set this rank's share of a bucket of a vector of the center, given the whole bucket."""
        start, stop = self.placement.bounds(bucket)
        if stop > start:
            self.center_state[key].write(self._share_of(bucket), cast(Any, vector)[start:stop])

    def fetch(self, communicator: Communicator, bucket: Bucket, prefix: str, key: str = "center") -> V:
        """Return a whole bucket of a vector of the center; collective, unless the center is everywhere."""
        return self._spread(communicator, bucket, self.center_state[key].read(self._share_of(bucket)), prefix)

    def exchange(self, communicator: Communicator, exchange: Exchange, prefix: str, of: Fragment | None = None) -> int:
        """Exchange all, or a fragment, one bucket travelling while the next is computed; return the bytes sent.

        With an outer optimizer, all totals come first, then its step, then the pulls.
        """
        sent = 0
        under_way: deque[Pending[V]] = deque()
        part = of or Fragment(0, self.values.layout.buckets)
        for bucket in part.buckets:
            if len(under_way) == IN_FLIGHT:
                sent += self.finish(under_way.popleft(), communicator, exchange, prefix)
            pending, bytes_sent = self.begin(bucket, communicator, exchange, prefix)
            under_way.append(pending)
            sent += bytes_sent
        while under_way:
            sent += self.finish(under_way.popleft(), communicator, exchange, prefix)
        if self._outer is not None:
            self.move_by_outer_optimizer(part.index)
            for bucket in part.buckets:
                self.pull(bucket, self.handed_out(communicator, bucket, exchange, prefix), exchange)
                sent += self.placement.bytes_to_hand_out(bucket.nbytes)
        return sent

    def begin(
        self, bucket: Bucket, communicator: Communicator, exchange: Exchange, prefix: str
    ) -> tuple[Pending[V], int]:
        """Let the message of a bucket travel; return what :meth:`finish` takes, and the bytes handed to collectives."""
        algorithm, slot, handed_out = self.algorithm, 2 * (bucket.index % IN_FLIGHT), 0
        x, worker = self._read(bucket, slot), self._read_all(self.worker, bucket)
        if self.snapshot is not None:
            x = self._kept(self.snapshot, bucket, x)
        center = x
        if algorithm.reads_before:
            center = self.handed_out(communicator, bucket, exchange, prefix)
            handed_out = self.placement.bytes_to_hand_out(bucket.nbytes)
        message, changed = algorithm.message(
            self._replica.space, x, worker, center, exchange, out=self._replica.scratch(bucket, slot + 1)
        )
        self._write(self.worker, bucket, worker, changed)
        worker |= changed
        if self.travelling is not None:
            message = self._kept(self.travelling, bucket, message)
        sent = self.outbox.send(communicator, bucket, message, f"{prefix}.{self.name}.{bucket.index}")
        if not algorithm.reads_after:
            self._pull(bucket, x, worker, center, exchange, sent.decoded)
        if self._lasting:
            self._forget_spent(bucket, worker)
        return Pending(bucket, x, worker, sent.wait), sent.nbytes + handed_out

    def finish(self, pending: Pending[V], communicator: Communicator, exchange: Exchange, prefix: str) -> int:
        """Move the center by what has come of a bucket, and let the replica pull; return the bytes handed on."""
        bucket, moved = pending.bucket, self.arrive(pending, exchange)
        if self.total is not None or not self.algorithm.reads_after:
            return 0
        # Not read again: a store may keep what is written of a tensor until its last bucket is there.
        handed_out = self.handed_out(communicator, bucket, exchange, prefix, moved)
        self._pull(bucket, pending.x, pending.worker, handed_out, exchange)
        return self.placement.bytes_to_hand_out(bucket.nbytes)

    def arrive(self, pending: Pending[V], exchange: Exchange) -> State[V] | None:
        """Wait for the total of a bucket, and move this rank's share of the center by it; return that, if it moved.

        Where an outer optimizer moves the center, it finds its gradient in ``total`` afterwards.
        """
        bucket, total = pending.bucket, pending.wait()
        share, (start, stop) = self._share_of(bucket), self.placement.bounds(bucket)
        if stop == start:
            return None
        if self.total is not None:
            gradient = self.algorithm.gradient(self._replica.space, total, exchange)
            lent = total if self.travelling is not None else pending.worker.get(self._spent or "")
            if self.outbox.wire.lossy or gradient is not lent:
                self.total.write(share, gradient)
            return None
        center = self._read_all(self.center_state, share)
        moved = center | self._move(share, center, total, exchange)
        if self.center_state:
            self._write(self.center_state, share, center, moved)
        return moved

    def move_by_outer_optimizer(self, fragment: int = 0) -> None:
        """Let the outer optimizer of a fragment step, if there is one: the gradient of all its elements is there."""
        if self._outer is not None:
            (self._outer.parts[fragment] if isinstance(self._outer, Divided) else self._outer).step()

    def pull_late(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Let a replica that has gone on since its message was formed pull a bucket of what the center hands out."""
        if self.snapshot is None:
            self.pull(bucket, center, exchange)
            return
        algorithm, space, slot = self.algorithm, self._replica.space, 2 * (bucket.index % IN_FLIGHT)
        snapshot, worker = self.snapshot.read(bucket), self._read_all(self.worker, bucket)
        then = space.copy(snapshot, out=self._replica.scratch(bucket, slot + 1))
        pulled, changed = algorithm.pull(space, then, worker, center, exchange)
        self.values.write(bucket, algorithm.catch_up(space, self._read(bucket, slot), snapshot, pulled))
        self._write(self.worker, bucket, worker, changed)

    def payload(self, bucket: Bucket, exchange: Exchange) -> V:
        """Return what an asynchronous transaction takes: the replica, or the message if that needs no center."""
        slot = 2 * (bucket.index % IN_FLIGHT)
        x = self._read(bucket, slot)
        if self.algorithm.reads_before:
            return x
        worker, out = self._read_all(self.worker, bucket), self._replica.scratch(bucket, slot + 1)
        message, changed = self.algorithm.message(self._replica.space, x, worker, x, exchange, out=out)
        self._write(self.worker, bucket, worker, changed)
        return message

    def pull(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Let the replica pull a bucket of what the center hands out."""
        x = self._read(bucket, slot=2 * (bucket.index % IN_FLIGHT))
        self._pull(bucket, x, self._read_all(self.worker, bucket), center, exchange)

    def initial_center(self, x: V) -> State[V]:
        """Return the vectors of the center when training starts from a replica."""
        state = self.algorithm.init_center(self._replica.space, x)
        return {"center": state["center"]} if self._outer is not None else state

    def handed_out(
        self,
        communicator: Communicator,
        bucket: Bucket,
        exchange: Exchange,
        prefix: str,
        center: State[V] | None = None,
    ) -> V:
        """Return a whole bucket of what the center hands out."""
        if center is None:
            center = self._read_all(self.center_state, self._share_of(bucket))
        return self._spread(
            communicator, bucket, self.algorithm.hand_out(self._replica.space, center, exchange), prefix
        )

    def _spread(self, communicator: Communicator, bucket: Bucket, share: V, prefix: str) -> V:
        out = None
        if not self.placement.everywhere:
            out = self._replica.scratch(bucket, _FETCHED)
            out = self.values.read(bucket) if out is None else out
        name = f"{prefix}.{self.name}.{bucket.index}.center"
        return cast(V, self.placement.fetch(communicator, share, bucket, name, out))

    def _move(self, share: Bucket, center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return what changes of the center's vectors: of stretches of equal learning rate one by one."""
        space, whole = self._replica.space, cast(Any, total)
        if self._rates is None:
            return self.algorithm.move(space, center, total, exchange)
        stretches = list(self._rates.stretches(self.share, share))
        if len(stretches) == 1:
            return self.algorithm.move(space, center, total, replace(exchange, learning_rate=stretches[0][2]))
        moved = [
            self.algorithm.move(
                space, _cut(center, start, stop), whole[start:stop], replace(exchange, learning_rate=rate)
            )
            for start, stop, rate in stretches
        ]
        return {key: space.concatenate([part[key] for part in moved]) for key in moved[0]}

    def _read(self, bucket: Bucket, slot: int) -> V:
        return self.values.read(bucket, out=self._replica.scratch(bucket, slot))

    def _read_all(self, stores: Mapping[str, Store[V]], bucket: Bucket) -> State[V]:
        return {key: store.read(bucket) for key, store in stores.items()}

    def _write(self, stores: Mapping[str, Store[V]], bucket: Bucket, old: State[V], new: State[V]) -> None:
        """Write vectors, but for those that are the views which were read."""
        for key, value in new.items():
            if value is not old.get(key):
                stores[key].write(bucket, value)

    def _pull(
        self, bucket: Bucket, x: V, worker: State[V], center: V, exchange: Exchange, sent: V | None = None
    ) -> None:
        """Let the replica pull; by what was ``sent``, where that is a part of the message, and the rest is its own."""
        algorithm, space = self.algorithm, self._replica.space
        if sent is None or algorithm.keeps_error:
            values, changed = algorithm.pull(space, x, worker, center, exchange)
        else:
            values, changed = algorithm.pull_sent(space, x, worker, center, sent, exchange)
        self.values.write(bucket, values)
        self._write(self.worker, bucket, worker, changed)
        if not self._lasting:
            self._forget_spent(bucket, worker)

    def _forget_spent(self, bucket: Bucket, worker: State[V]) -> None:
        """Set to zeros what a message has used up."""
        spent = self.algorithm.spent
        if spent is not None:
            zeros = self._replica.space.zeros_like(worker[spent], out=worker[spent])
            self._write(self.worker, bucket, worker, {spent: zeros})

    def _kept(self, store: Store[V], bucket: Bucket, value: V) -> V:
        """Return a copy of a vector that stays as it is until the next exchange."""
        store.write(bucket, value)
        return store.read(bucket)

    def _share_of(self, bucket: Bucket) -> Bucket:
        return self.share.buckets[bucket.index]


def _cut(state: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {key: vector[start:stop] for key, vector in state.items()}


def all_buckets(groups: Iterable[TensorGroup[V]]) -> Iterator[tuple[TensorGroup[V], Bucket]]:
    """Yield the buckets of all groups, in the order in which they are counted."""
    return ((group, bucket) for group in groups for bucket in group.values.layout.buckets)
