"""Tensors that are exchanged together by one algorithm: the parameters, or statistics of one kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Exchange, State
from hvd_periodic.centers.group_vectors import IN_FLIGHT, GroupVectors
from hvd_periodic.comm.base import Communicator
from hvd_periodic.outer.divided import Divided
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Bucket

V = TypeVar("V")


@dataclass
class Block(Generic[V]):
    """A part of a bucket that is computed at once.

    Attributes:
        place: its elements.
        x: the replica.
        in_place: ``x`` is the memory of the replica itself.
        worker: the worker's own vectors.
        seen: what the message is to know of the center; anything, where it needs nothing.
    """

    place: Bucket
    x: V
    in_place: bool
    worker: State[V]
    seen: V


@dataclass
class Pending(Generic[V]):
    """The exchange of one bucket that has begun.

    Attributes:
        bucket: which.
        blocks: what the message was formed from.
        lent: the message, where that lies in the memory in which an outer optimizer finds its gradient.
        wait: waits for the total of the messages, of this rank's share at least.
    """

    bucket: Bucket
    blocks: list[Block[V]]
    lent: V | None
    wait: Callable[[], V]


class TensorGroup(GroupVectors[V]):
    """Exchanges the vectors of a group, bucket by bucket: one travels while the next is computed.

    A bucket is computed in blocks, which stay in the processor's cache from the first verb to the last, and in the
    memory of the replica itself where that is possible.
    """

    def exchange(self, communicator: Communicator, exchange: Exchange, prefix: str, of: Fragment | None = None) -> int:
        """Exchange all, or a fragment; return the bytes sent.

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
                for place in self._blocks[bucket.index]:
                    center = self.handed_out(communicator, place, exchange, prefix)
                    self._pull(self._block(bucket, place), center, exchange)
                sent += self.placement.bytes_to_publish(bucket.nbytes)
        return sent

    def begin(
        self, bucket: Bucket, communicator: Communicator, exchange: Exchange, prefix: str
    ) -> tuple[Pending[V], int]:
        """Let the message of a bucket travel; return what :meth:`finish` takes, and the bytes handed to collectives."""
        pulls, lossy, handed_out = not self.algorithm.reads_after, self.outbox.wire.lossy, 0
        if self.algorithm.reads_before:
            handed_out = self.placement.bytes_to_publish(bucket.nbytes)
        blocks, formed, room = [], [], self._room(bucket)
        for place in self._blocks[bucket.index]:
            block = self._block(bucket, place)
            if self.algorithm.reads_before:
                block.seen = self.handed_out(communicator, place, exchange, prefix)
            formed.append(self._form(bucket, block, exchange, room))
            if pulls and not lossy:
                self._pull(block, block.seen, exchange)
            blocks.append(block)
        message = formed[0] if len(blocks) == 1 else room
        message = self._replica.space.concatenate(formed) if message is None else message
        shared = self.travelling is self.total or (self._spent is not None and len(blocks) > 1 and room is not None)
        lent = message if shared else blocks[0].worker.get(self._spent or "")
        sent = self.outbox.send(communicator, bucket, message, f"{prefix}.{self.name}.{bucket.index}")
        for block in blocks:
            if pulls and lossy:
                decoded = None if sent.decoded is None else _part(sent.decoded, bucket, block.place)
                self._pull(block, block.seen, exchange, decoded)
            if self._lasting:
                self._forget_spent(block)
        return Pending(bucket, blocks, lent, sent.wait), sent.nbytes + handed_out

    def finish(self, pending: Pending[V], communicator: Communicator, exchange: Exchange, prefix: str) -> int:
        """Move the center by what has come of a bucket, and let the replica pull; return the bytes handed on."""
        pulls = self.total is None and self.algorithm.reads_after
        for block, moved in self._moves(pending, exchange):
            if pulls:
                # Not read again: a store may keep what is written of a tensor until its last bucket is there.
                handed_out = self.handed_out(communicator, block.place, exchange, prefix, moved)
                self._pull(block, handed_out, exchange)
        return self.placement.bytes_to_publish(pending.bucket.nbytes) if pulls else 0

    def arrive(self, pending: Pending[V], exchange: Exchange) -> None:
        """Wait for the total of a bucket, and move this rank's share of the center by it.

        Where an outer optimizer moves the center, it finds its gradient in ``total`` afterwards.
        """
        for _ in self._moves(pending, exchange):
            pass

    def move_by_outer_optimizer(self, fragment: int = 0) -> None:
        """Let the outer optimizer of a fragment step, if there is one: the gradient of all its elements is there."""
        if self._outer is not None:
            (self._outer.parts[fragment] if isinstance(self._outer, Divided) else self._outer).step()

    def pull_late(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Let a replica that has gone on since its message was formed pull a bucket of what the center hands out."""
        if self.snapshot is None:
            self.pull(bucket, center, exchange)
            return
        algorithm, space = self.algorithm, self._replica.space
        room = cast(Any, self._replica.scratch(bucket, _slot(bucket) + 1))
        for place in self._blocks[bucket.index]:
            block, snapshot = self._block(bucket, place), self.snapshot.read(place)
            cached = None if room is None else room[: place.size]  # The same memory for all blocks.
            then = space.copy(snapshot, out=cached)
            pulled, changed = algorithm.pull(space, then, block.worker, _part(center, bucket, place), exchange)
            self._set(block, algorithm.catch_up(space, block.x, snapshot, pulled, out=cached))
            self._write(self.worker, place, block.worker, changed)

    @property
    def sends_once(self) -> bool:
        """Whether an exchange sends each message as it is, and nothing besides."""
        return self.placement.everywhere and not self.outbox.wire.lossy and not self._lasting

    def preview(self, bucket: Bucket, exchange: Exchange) -> V:
        """Return the message of a bucket, as an exchange would form it; changes nothing. Of a center on every rank."""
        space, slot = self._replica.space, _slot(bucket)
        x, worker = self._read(bucket, slot), self._read_all(self.worker, bucket)
        copies = {key: space.copy(vector) for key, vector in worker.items()}
        seen = x
        if self.algorithm.reads_before:
            seen = self.algorithm.publish(space, self._read_all(self.center_state, bucket), exchange)
        out = self._replica.scratch(bucket, slot + 1)
        return self.algorithm.message(space, x, copies, seen, exchange, out=out)[0]

    def payload(self, bucket: Bucket, exchange: Exchange) -> V:
        """Return what an asynchronous transaction takes: the replica, or the message if that needs no center."""
        x = self._read(bucket, _slot(bucket))
        if self.algorithm.reads_before:
            return x
        worker, out = self._read_all(self.worker, bucket), self._replica.scratch(bucket, _slot(bucket) + 1)
        message, changed = self.algorithm.message(self._replica.space, x, worker, x, exchange, out=out)
        self._write(self.worker, bucket, worker, changed)
        return message

    def pull(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Let the replica pull a bucket of what the center hands out."""
        for place in self._blocks[bucket.index]:
            self._pull(self._block(bucket, place), _part(center, bucket, place), exchange)

    def _block(self, bucket: Bucket, place: Bucket) -> Block[V]:
        """Return what is here of a part of a bucket."""
        x = self.values.view(place)
        in_place = x is not None
        if x is None:
            room = self._replica.scratch(bucket, _slot(bucket))
            x = self.values.read(place, out=None if room is None else _part(room, bucket, place))
        return Block(place, x, in_place, self._read_all(self.worker, place), seen=x)

    def _room(self, bucket: Bucket) -> V | None:
        """Return where the message of a bucket is put together; the memory of what it uses up, where that serves."""
        spent = self.algorithm.consumed_state
        if self.travelling is not None:
            return self.travelling.read(bucket)
        if spent is not None and len(self._blocks[bucket.index]) > 1:
            return self.worker[spent].view(bucket)
        return self._replica.scratch(bucket, _slot(bucket) + 1)

    def _form(self, bucket: Bucket, block: Block[V], exchange: Exchange, room: V | None) -> V:
        """Return the message of a block; in the room, where a bucket has several or that of the whole has to last."""
        algorithm, place, worker = self.algorithm, block.place, block.worker
        if self.snapshot is not None:
            self.snapshot.write(place, block.x)
        part = None if room is None else _part(room, bucket, place)
        space = self._replica.space
        message, changed = algorithm.message(space, block.x, worker, block.seen, exchange, out=part)
        message = algorithm.weighed(space, message, exchange)
        self._write(self.worker, place, worker, changed)
        block.worker = worker | changed
        lasts = self.travelling is not None
        there = message is part or (not lasts and message is block.worker.get(algorithm.consumed_state or ""))
        if part is not None and (lasts or place is not bucket) and not there:
            cast(Any, part)[...] = message
        return cast(V, part) if lasts else message

    def _moves(self, pending: Pending[V], exchange: Exchange) -> Iterator[tuple[Block[V], State[V] | None]]:
        """Move this rank's share of the center, block by block; yield what the center becomes there, if it moved."""
        bucket, total = pending.bucket, pending.wait()
        if self.total is not None:
            self._keep_gradient(pending, total, exchange)
            return
        for block in pending.blocks:
            share, moved = self._share_of(block.place), None
            if share.size:
                center = self._view_all(self.center_state, share)
                changed = self._move(share, center, _part(total, bucket, block.place), exchange)
                if self.center_state:
                    self._write(self.center_state, share, center, changed)
                moved = self._settled(self.center_state, share, center, center | changed)
            yield block, moved

    def _keep_gradient(self, pending: Pending[V], total: V, exchange: Exchange) -> None:
        """Let the outer optimizer find its gradient."""
        share = self._share_of(pending.bucket)
        if self.total is None or not share.size:
            return
        gradient = self.algorithm.gradient(self._replica.space, total, exchange)
        if self.outbox.wire.lossy or gradient is not pending.lent:
            self.total.write(share, gradient)

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

    def _pull(self, block: Block[V], center: V, exchange: Exchange, sent: V | None = None) -> None:
        """Let the replica pull; by what was ``sent``, where that is a part of the message, and the rest is its own."""
        algorithm, space = self.algorithm, self._replica.space
        if sent is None or algorithm.uses_error_feedback:
            values, changed = algorithm.pull(space, block.x, block.worker, center, exchange)
        else:
            values, changed = algorithm.pull_sent(space, block.x, block.worker, center, sent, exchange)
        self._set(block, values)
        self._write(self.worker, block.place, block.worker, changed)
        if not self._lasting:
            self._forget_spent(block)

    def _set(self, block: Block[V], values: V) -> None:
        """Set the values of the replica."""
        if not block.in_place:
            self.values.write(block.place, values)
        elif values is not block.x:
            cast(Any, block.x)[:] = values

    def _forget_spent(self, block: Block[V]) -> None:
        """Set to zeros what a message has used up."""
        spent = self.algorithm.consumed_state
        if spent is not None:
            zeros = self._replica.space.zeros_like(block.worker[spent], out=block.worker[spent])
            self._write(self.worker, block.place, block.worker, {spent: zeros})


def _part(vector: V, bucket: Bucket, place: Bucket) -> V:
    """Return a part of a vector, given what that is a part of."""
    if place is bucket:
        return vector
    return cast(V, cast(Any, vector)[place.start - bucket.start : place.stop - bucket.start])


def _slot(bucket: Bucket) -> int:
    """Return the first working buffer of a bucket: there are two for each that is under way."""
    return 2 * (bucket.index % IN_FLIGHT)


def _cut(state: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {key: vector[start:stop] for key, vector in state.items()}


def all_buckets(groups: Iterable[TensorGroup[V]]) -> Iterator[tuple[TensorGroup[V], Bucket]]:
    """Yield the buckets of all groups, in the order in which they are counted."""
    return ((group, bucket) for group in groups for bucket in group.values.layout.buckets)
