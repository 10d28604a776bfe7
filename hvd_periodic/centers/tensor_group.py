"""Tensors that are exchanged together by one algorithm: the parameters, or statistics of one kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.by_range import ByRange
from hvd_periodic.centers.error_feedback import RESIDUAL, ErrorFeedback, Packed
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.norm_bounds import NormBounds, NormLimiter
from hvd_periodic.comm.membership import Membership
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")

IN_FLIGHT = 2
"""Number of buckets in flight: one travels while the next is computed."""

_FETCHED = 2 * IN_FLIGHT
"""Slot of the scratch buffer for a fetched bucket of the center; the slots before it are two per bucket in flight."""

_TAKEN = "taken"
"""Name of the worker's vector that holds what it last took, if the algorithm itself keeps none."""

_TOTAL = "total"
"""Name of the store from which an outer optimizer takes its gradient."""


@dataclass
class Block(Generic[V]):
    """A part of a bucket that is computed in one go.

    Attributes:
        part: its elements.
        x: the replica.
        in_place: ``x`` is the memory of the replica itself.
        worker: the worker's vectors.
        published: the published center; the replica if the message does not need the center.
    """

    part: Bucket
    x: V
    in_place: bool
    worker: State[V]
    published: V


@dataclass
class Pending(Generic[V]):
    """A bucket whose exchange is in flight.

    Attributes:
        bucket: the bucket.
        blocks: the blocks from which its message was formed.
        lent: the message, if it is in the memory from which an outer optimizer takes its gradient.
        wait: waits for the total of the messages, or this rank's shard of it.
    """

    bucket: Bucket
    blocks: list[Block[V]]
    lent: V | None
    wait: Callable[[], V]

    def forget_replica(self) -> None:
        """Keep nothing of the replica and of the worker's vectors, which change while the message travels."""
        for block in self.blocks:
            block.x, block.published, block.worker = cast(Any, None), cast(Any, None), {}


class TensorGroup(Generic[V]):
    """Holds a group of tensors with its algorithm, center and worker's vectors, and exchanges it bucket by bucket.

    One bucket travels while the next is computed. A bucket is computed in blocks, which stay in the processor's cache
    from the first verb to the last, and in the memory of the replica itself if possible.

    Args:
        name: name of the group in collectives and in saved states.
        values: the tensors of this rank, with at least one element.
        algorithm: the computation of an exchange.
        replica: provides scratch buffers.
        placement: where the center lives.
        membership: the ranks that exchange.
        outer: the framework optimizer that moves the center, if one does.
        rates: the learning rates, for algorithms that use them.
        overlapped: local steps continue while an exchange is in flight, so that its messages need their own memory.
        wire: encoding of the messages.
        error_decay: β, the part of what the wire did not send that is added to the next message.
        bounds: bounds on norms, if there are any.
        keeps_taken: a worker forms its messages from the center as it last took it, which may be an older one.

    Attributes:
        taken: name of the worker's vector that is set to the replica after every pull; None if there is none.
        center_state: this rank's shard of the center and its vectors, by name.
        worker: the worker's vectors, by name. All vectors are zeros until :meth:`reset`.
        total: this rank's shard of the gradient for an outer optimizer; None without one.
        error_feedback: sends the messages, and keeps the parts that the wire did not send.
        limiter: keeps the messages and their mean within bounds, if there are any.
        limits_mean: all messages of an exchange have to be in flight before the first total is used.
        messages: the messages in flight, if all are at once, no wire has encoded them, and the replica would otherwise
            form them in memory that is used again.
        snapshot: the replica from which these were formed, if a late pull needs it.
    """

    def __init__(
        self,
        name: str,
        values: Store[V],
        algorithm: Algorithm,
        replica: Replica[V],
        placement: Placement,
        membership: Membership,
        outer: OuterOptimizer | None = None,
        rates: LearningRates | None = None,
        overlapped: bool = False,
        wire: Wire = Plain(),  # noqa: B008
        error_decay: float = 1.0,
        bounds: NormBounds | None = None,
        keeps_taken: bool = False,
    ) -> None:
        self.taken = _TAKEN if keeps_taken else algorithm.taken_state
        self._keeps_taken = keeps_taken
        self.name, self.values, self.algorithm, self.placement = name, values, algorithm, placement
        self._replica, self._membership, self._outer, self._rates = replica, membership, outer, rates
        self._by_range = ByRange(algorithm, replica, values.layout)
        first = self._read(values.layout.buckets[0], slot=0)
        self.shard, self.center_state = self._new_center(first)
        self.worker: dict[str, Store[V]] = {
            key: replica.new_store(values.layout, f"{name}.{key}") for key in self._initial_worker(first)
        }
        lasting = overlapped or not placement.reduces
        self.error_feedback = ErrorFeedback(
            name, values.layout, placement, replica, algorithm, wire, membership.communicator, lasting, error_decay
        )
        if self.error_feedback.residual is not None:
            self.worker[RESIDUAL] = self.error_feedback.residual
        self.limiter = None if bounds is None else NormLimiter(bounds, self, replica, membership)
        self.limits_mean = bounds is not None and bounds.mean is not None
        at_once = overlapped or self.limits_mean
        self.messages: Store[V] | None = None
        self.snapshot: Store[V] | None = None
        if at_once and not wire.lossy and replica.reuses_memory:
            self.messages = replica.new_store(values.layout, f"{name}.travelling")
        if overlapped and algorithm.reads_after:
            self.snapshot = replica.new_snapshot_store(values.layout, f"{name}.snapshot")
        self._overlapped = overlapped
        # Forming a message may overwrite the worker's vectors, but keeps none besides the one that it consumes.
        self._forms_once = self.worker.keys() <= {algorithm.consumed_state}
        self._blocks = [
            replica.blocks(bucket) if placement.everywhere else (bucket,) for bucket in values.layout.buckets
        ]
        self._consumed, self.total = self._new_total()

    @property
    def center(self) -> Store[V]:
        """This rank's shard of the center."""
        return self.center_state["center"]

    @property
    def vectors(self) -> dict[str, Store[V]]:
        """All vectors of the center and of the worker, by name."""
        return {**self.center_state, **self.worker}

    def reset(self) -> None:
        """Set all vectors to their values at the start of training."""
        for bucket in self.values.layout.buckets:
            x = self._read(bucket, slot=0)
            for key, vector in self.initial_center(x).items():
                self.set_shard(key, bucket, vector)
            self._write(self.worker, bucket, {}, self._initial_worker(x))
        self.error_feedback.reset()

    def join(self) -> bool:
        """Exchange with the current members from now on; return whether this rank holds another shard of the center.

        The shard keeps its values; another shard starts with zeros. The worker's vectors keep theirs.
        """
        buckets = self.values.layout.buckets
        held = [self.placement.bounds(bucket) for bucket in buckets]
        self.placement.join(self._membership.communicator, self._membership.root)
        if self.error_feedback.second_hop_residual is not None or self.error_feedback.untouched is not None:
            self.error_feedback.join(self._membership.communicator)
            self.error_feedback.touch()
        if [self.placement.bounds(bucket) for bucket in buckets] == held:
            return False
        for key in (*self.center_state, _TOTAL):
            self._replica.drop_store(f"{self.name}.{key}")
        self.shard, self.center_state = self._new_center(self._read(buckets[0], slot=0))
        self._consumed, self.total = self._new_total()
        return True

    def _new_center(self, first: V) -> tuple[Layout, dict[str, Store[V]]]:
        """Return this rank's shard, and zeros for each vector of the center; ``first`` is a part of the replica."""
        shard = self.placement.share(self.values.layout)
        keys = self.initial_center(first)
        return shard, {key: self._replica.new_offloaded_store(shard, f"{self.name}.{key}") for key in keys}

    def _new_total(self) -> tuple[str | None, Store[V] | None]:
        """Return the name of the worker's vector that lends its memory to the total, if one does, and the total."""
        if self._outer is None:
            return None, None
        here = not self.center.offloaded
        whole = self.shard is self.values.layout
        if self.messages is not None and here and whole:
            return None, self.messages
        lent = whole and not (self._overlapped or self.limits_mean) and not self.error_feedback.wire.lossy
        consumed = self.algorithm.consumed_state if lent and here else None
        if consumed is not None:
            return consumed, self.worker[consumed]
        return None, self._replica.new_offloaded_store(self.shard, f"{self.name}.{_TOTAL}")

    def start_from(self, bucket: Bucket, center: V) -> None:
        """Set a bucket of the replica to the center, and the worker's vectors to their values at the start."""
        self.values.write(bucket, center)
        self._write(self.worker, bucket, {}, self._initial_worker(center))
        self.error_feedback.touch(bucket)

    def set_shard(self, key: str, bucket: Bucket, vector: V) -> None:
        """Set this rank's shard of a bucket of a vector of the center, given the whole bucket."""
        start, stop = self.placement.bounds(bucket)
        if stop > start:
            self.center_state[key].write(self._shard_of(bucket), cast(Any, vector)[start:stop])

    def fetch(self, bucket: Bucket, key: str = "center") -> V:
        """Return a whole bucket of a vector of the center; collective, unless the center is everywhere."""
        shard = self.center_state[key].read(self._shard_of(bucket))
        return self._gather(bucket, shard, self.placement.of_vector(key))

    def initial_center(self, x: V) -> State[V]:
        """Return the vectors of the center when training starts from a replica."""
        state = self.algorithm.init_center(self._replica.space, x)
        return {"center": state["center"]} if self._outer is not None else state

    def _initial_worker(self, x: V) -> State[V]:
        """Return the worker's vectors when training starts from a replica."""
        space = self._replica.space
        state = self.algorithm.init_worker(space, x)
        return state | {_TAKEN: space.copy(x)} if self._keeps_taken else state

    def published_center(self, bucket: Bucket, exchange: Exchange, center: State[V] | None = None) -> V:
        """Return a whole bucket of the published center; collective, unless the center is everywhere."""
        if center is None:
            center = self._read_all(self.center_state, self._shard_of(bucket))
        return self._gather(bucket, self.algorithm.publish(self._replica.space, center, exchange))

    def exchange(self, exchange: Exchange, of: Fragment | None = None) -> int:
        """Exchange all buckets, or those of a fragment; return the bytes sent.

        With an outer optimizer, all totals come first, then its step, then the pulls.
        """
        sent = 0
        in_flight: deque[Pending[V]] = deque()
        fragment = of or Fragment(0, self.values.layout.buckets)
        if self.limiter is not None:
            exchange, sent = self.limiter.limit_message(exchange, fragment.buckets)
        for bucket in fragment.buckets:
            if len(in_flight) == IN_FLIGHT:
                sent += self.finish(in_flight.popleft(), exchange)
            pending, bytes_sent = self.begin(bucket, exchange)
            in_flight.append(pending)
            sent += bytes_sent
        while in_flight:
            sent += self.finish(in_flight.popleft(), exchange)
        if self._outer is not None:
            self.step_outer_optimizer(exchange, fragment.index)
            for bucket in fragment.buckets:
                for part in self._blocks[bucket.index]:
                    center = self.published_center(part, exchange)
                    self._pull(self._block(bucket, part), center, exchange)
                sent += self.placement.bytes_to_publish(bucket.nbytes)
        return sent

    def begin(self, bucket: Bucket, exchange: Exchange) -> tuple[Pending[V], int]:
        """Send the message of a bucket; return the argument of :meth:`finish`, and the bytes handed to collectives."""
        pulls, lossy, published_bytes = not self.algorithm.reads_after, self.error_feedback.wire.lossy, 0
        if self.algorithm.reads_before:
            published_bytes = self.placement.bytes_to_publish(bucket.nbytes)
        arrived = self._forms_once and bucket.index in self.error_feedback.received_totals
        blocks, formed, buffer = [], [], self._message_buffer(bucket)
        for part in self._blocks[bucket.index]:
            block = self._block(bucket, part)
            if self.algorithm.reads_before and (pulls or not arrived):
                block.published = self.published_center(part, exchange)
            if not arrived:
                formed.append(self._form_message(bucket, block, exchange, buffer))
            if pulls and not lossy:
                # By what is sent of it, if the message was cut.
                self._pull(block, block.published, exchange, None if exchange.cut is None else formed[-1])
            blocks.append(block)
        message = formed[0] if len(formed) == 1 else buffer
        message = self._replica.space.concatenate(formed) if message is None and formed else message
        in_consumed = self._consumed is not None and len(blocks) > 1 and self._replica.reuses_memory
        shared = self.messages is self.total or (in_consumed and buffer is not None)
        lent = message if shared else blocks[0].worker.get(self._consumed or "")
        weights = self._by_range.weights(self.values.layout, bucket, exchange) if exchange.presence else ()
        name = self._collective(bucket)
        communicator, message = self._membership.communicator, cast(V, message)
        sent = self.error_feedback.send(communicator, bucket, message, name, exchange, weights)
        for block in blocks:
            if pulls and lossy:
                decoded = None if sent.decoded is None else _part(sent.decoded, bucket, block.part)
                self._pull(block, block.published, exchange, decoded)
            if self._overlapped:
                self._reset_consumed_state(block)
        return Pending(bucket, blocks, lent, sent.wait), sent.nbytes + published_bytes

    def finish(self, pending: Pending[V], exchange: Exchange) -> int:
        """Wait for a bucket, move the center, and pull the replica; return the bytes handed to collectives."""
        pulls = self.total is None and self.algorithm.reads_after
        for block, moved in self._moves(pending, exchange):
            if pulls:
                # Not read again: a store may hold back the values of a tensor until its last bucket is written.
                center = self.published_center(block.part, exchange, moved)
                self._pull(block, center, exchange)
        return self.placement.bytes_to_publish(pending.bucket.nbytes) if pulls else 0

    def wait_and_update_center(self, pending: Pending[V], exchange: Exchange) -> None:
        """Wait for the total of a bucket, and move this rank's shard of the center.

        If an outer optimizer moves the center, only its gradient is written, to ``total``.
        """
        for _ in self._moves(pending, exchange):
            pass

    def step_outer_optimizer(self, exchange: Exchange, fragment: int = 0) -> None:
        """Step the outer optimizer of a fragment, if there is one; the gradients of all elements must be complete."""
        if self._outer is None:
            return
        outer = self._outer.parts[fragment] if isinstance(self._outer, PerFragmentOptimizer) else self._outer
        without = {name for name, weight in exchange.presence.items() if weight is None}
        if without:
            outer.step({i for i, spec in enumerate(self.values.layout.specs) if spec.name in without})
        else:
            outer.step()

    def pull_late(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Pull a bucket of the replica, which has taken local steps since its message was formed."""
        if self.snapshot is None:
            self.pull(bucket, center, exchange)
            return
        algorithm, space = self.algorithm, self._replica.space
        reused = self._replica.reuses_memory
        buffer = cast(Any, self._replica.scratch(bucket, _slot(bucket) + 1) if reused else None)
        for part in self._blocks[bucket.index]:
            block, snapshot = self._block(bucket, part), self.snapshot.read(part)
            cached = None if buffer is None else buffer[: part.size]  # The same memory for all blocks.
            then = space.copy(snapshot, out=cached)
            block_center = _part(center, bucket, part)
            if exchange.presence:
                pulled, changed = self._by_range.pull(part, then, block.worker, block_center, exchange)
            else:
                pulled, changed = algorithm.pull(space, then, block.worker, block_center, exchange)
            self._set(block, algorithm.catch_up(space, block.x, snapshot, pulled, out=cached))
            self._write(self.worker, part, block.worker, changed)

    @property
    def can_piggyback(self) -> bool:
        """Whether each message is sent unencoded and all at once, so that it may travel with the handshake."""
        cuts = self.limiter is not None and self.limiter.bounds.message is not None
        return self.placement.everywhere and not (self.error_feedback.wire.lossy or self._overlapped or cuts)

    def preview(self, bucket: Bucket, exchange: Exchange, published: V | None = None) -> V:
        """Return the message that an exchange would form of a bucket, without weight; changes nothing.

        Collective, unless the center is everywhere, or the published center is given.
        """
        space, slot = self._replica.space, _slot(bucket)
        x, worker = self._read(bucket, slot), self._read_all(self.worker, bucket)
        copies = {key: space.copy(vector) for key, vector in worker.items()}
        center = x
        if published is not None:
            center = published
        elif self._keeps_taken:
            center = worker[_TAKEN]
        elif self.algorithm.reads_before:
            center = self.published_center(bucket, exchange)
        out = self._replica.scratch(bucket, slot + 1)
        return self.algorithm.message(space, x, copies, center, exchange, out=out)[0]

    @property
    def needs_published(self) -> bool:
        """Whether a worker can form its message from the published center only."""
        return self.algorithm.reads_before and not self._keeps_taken

    def payload(self, bucket: Bucket, exchange: Exchange, published: V | None = None) -> V:
        """Return what a worker sends to a center elsewhere: its message, cut, or the replica if it cannot form that."""
        if published is not None:
            message = self.preview(bucket, exchange, published)
        else:
            x = self._read(bucket, _slot(bucket))
            if self.needs_published:
                return x
            worker, out = self._read_all(self.worker, bucket), self._replica.scratch(bucket, _slot(bucket) + 1)
            center = worker[_TAKEN] if self._keeps_taken else x
            message, changed = self.algorithm.message(self._replica.space, x, worker, center, exchange, out=out)
            self._write(self.worker, bucket, worker, changed)
        return message if exchange.cut is None else self._replica.space.scale(exchange.cut, message)

    def packed(self, bucket: Bucket, exchange: Exchange, published: V | None = None) -> Packed[V]:
        """Return the message of a worker to a center elsewhere, as :meth:`payload`, encoded."""
        return self.error_feedback.pack(bucket, self.payload(bucket, exchange, published), int(exchange.size))

    def pull(self, bucket: Bucket, center: V, exchange: Exchange, packed: Packed[V] | None = None) -> None:
        """Pull a bucket of the replica, given the published center: by what was sent, if that is not the message."""
        algorithm, space = self.algorithm, self._replica.space
        for part in self._blocks[bucket.index]:
            block, pulling, sent = self._block(bucket, part), _part(center, bucket, part), None
            if algorithm.uses_error_feedback:
                pass
            elif packed is not None:
                sent = _part(packed.decoded, bucket, part)
                sent = sent if exchange.cut is None else space.scale(exchange.cut, sent)
            elif exchange.cut is not None:
                copies = {key: space.copy(vector) for key, vector in block.worker.items()}
                message, _ = algorithm.message(space, block.x, copies, pulling, exchange)
                sent = space.scale(exchange.cut, message)
            self._pull(block, pulling, exchange, sent)

    def remember_taken(self) -> None:
        """Note what the replica holds after a pull, if later messages need that.

        A store may hold back the values of a tensor until its last bucket is written: not before all are.
        """
        key = self.taken
        for bucket in self.values.layout.buckets if key is not None else ():
            self.worker[key or ""].write(bucket, self._read(bucket, _slot(bucket)))

    def take_center(self, exchange: Exchange) -> None:
        """Set the replica to the published center, which every rank can read by itself."""
        for bucket in self.values.layout.buckets:
            center = {key: self.fetch(bucket, key) for key in self.center_state}
            self.pull(bucket, self.algorithm.publish(self._replica.space, center, exchange), exchange)
        self.remember_taken()

    def _collective(self, bucket: Bucket) -> str:
        """Return the name of the collective that carries the messages of a bucket."""
        return f"{self._membership.name}.{self.name}.{bucket.index}"

    def _gather(self, bucket: Bucket, shard: V, placement: Placement | None = None) -> V:
        """Return the whole bucket of which every rank passes its shard."""
        out = None
        if not self.placement.everywhere:
            out = self._replica.scratch(bucket, _FETCHED)
            out = self.values.read(bucket) if out is None else out
        communicator, name = self._membership.communicator, f"{self._collective(bucket)}.center"
        return cast(V, (placement or self.placement).fetch(communicator, shard, bucket, name, out))

    def _read(self, bucket: Bucket, slot: int) -> V:
        return self.values.read(bucket, out=self._replica.scratch(bucket, slot))

    def _read_all(self, stores: Mapping[str, Store[V]], bucket: Bucket) -> State[V]:
        return {key: store.read(bucket) for key, store in stores.items()}

    def _view_all(self, stores: Mapping[str, Store[V]], bucket: Bucket) -> State[V]:
        """Return the vectors of a bucket; views if possible."""
        views = {key: store.view(bucket) for key, store in stores.items()}
        return {key: stores[key].read(bucket) if view is None else view for key, view in views.items()}

    def _write(self, stores: Mapping[str, Store[V]], bucket: Bucket, old: State[V], new: State[V]) -> None:
        """Write vectors, except those that are the views that were read, which are up to date."""
        for key, value in new.items():
            if value is not old.get(key) or stores[key].offloaded:
                stores[key].write(bucket, value)

    def _reread(self, stores: Mapping[str, Store[V]], bucket: Bucket, old: State[V], new: State[V]) -> State[V]:
        """Return vectors that may be passed on: views that were updated in place are read again."""
        return {
            key: stores[key].read(bucket) if value is old.get(key) and not stores[key].offloaded else value
            for key, value in new.items()
        }

    def holds_part_of(self, bucket: Bucket) -> bool:
        """Return whether this rank holds any element of a bucket of the center."""
        return self._shard_of(bucket).size > 0

    def _shard_of(self, part: Bucket) -> Bucket:
        """Return this rank's shard of a bucket; the bucket itself, or the part of it, if the center is everywhere."""
        return part if self.placement.everywhere else self.shard.buckets[part.index]

    def _block(self, bucket: Bucket, part: Bucket) -> Block[V]:
        """Return a part of a bucket with the vectors of this rank."""
        x = self.values.view(part)
        in_place = x is not None
        if x is None:
            buffer = self._replica.scratch(bucket, _slot(bucket))
            x = self.values.read(part, out=None if buffer is None else _part(buffer, bucket, part))
        return Block(part, x, in_place, self._read_all(self.worker, part), published=x)

    def _message_buffer(self, bucket: Bucket) -> V | None:
        """Return the memory for the message of a bucket; of several blocks, that of the consumed state."""
        consumed = self.algorithm.consumed_state
        if self.messages is not None:
            return self.messages.read(bucket)
        if consumed is not None and len(self._blocks[bucket.index]) > 1 and self._replica.reuses_memory:
            return self.worker[consumed].view(bucket)
        return self._replica.scratch(bucket, _slot(bucket) + 1)

    def _form_message(self, bucket: Bucket, block: Block[V], exchange: Exchange, buffer: V | None) -> V:
        """Return the message of a block; in the buffer, if there are several blocks or messages stay in flight."""
        algorithm, part, worker = self.algorithm, block.part, block.worker
        if self.snapshot is not None:
            self.snapshot.write(part, block.x)
        out = None if buffer is None else _part(buffer, bucket, part)
        space = self._replica.space
        message, changed = algorithm.message(space, block.x, worker, block.published, exchange, out=out)
        message = message if exchange.cut is None else space.scale(exchange.cut, message)
        if exchange.presence:
            message = self._by_range.weighed(part, message, exchange)
        else:
            message = algorithm.weighed(space, message, exchange)
        self._write(self.worker, part, worker, changed)
        block.worker = worker | changed
        kept = self.messages is not None
        written = message is out or (not kept and message is block.worker.get(algorithm.consumed_state or ""))
        if out is not None and (kept or part is not bucket) and not written:
            cast(Any, out)[...] = message
        return cast(V, out) if kept else message

    def _moves(self, pending: Pending[V], exchange: Exchange) -> Iterator[tuple[Block[V], State[V] | None]]:
        """Move this rank's shard of the center block by block; yield each block, and its center if that has moved.

        If an outer optimizer moves the center, only its gradient is written, and nothing is yielded.
        """
        bucket, total = pending.bucket, pending.wait()
        if self.total is not None:
            shard = self._shard_of(bucket)
            if shard.size:
                gradient = self.algorithm.gradient(self._replica.space, total, exchange)
                if self.error_feedback.wire.lossy or gradient is not pending.lent:
                    self.total.write(shard, gradient)
            return
        for block in pending.blocks:
            shard, moved = self._shard_of(block.part), None
            if shard.size:
                center = self._view_all(self.center_state, shard)
                changed = self._move(shard, center, _part(total, bucket, block.part), exchange)
                if self.center_state:
                    self._write(self.center_state, shard, center, changed)
                moved = self._reread(self.center_state, shard, center, center | changed)
            yield block, moved

    def _move(self, shard: Bucket, center: State[V], total: V, exchange: Exchange) -> State[V]:
        """Return the changes to the center's vectors."""
        if self._rates is None and not exchange.presence:
            return self.algorithm.move(self._replica.space, center, total, exchange)
        return self._by_range.move(self.shard, shard, center, total, exchange, self._rates)

    def _pull(self, block: Block[V], center: V, exchange: Exchange, sent: V | None = None) -> None:
        """Pull a block of the replica; without error feedback, only by the part of the message that was ``sent``."""
        algorithm, space = self.algorithm, self._replica.space
        if exchange.presence:
            values, changed = self._by_range.pull(block.part, block.x, block.worker, center, exchange, sent)
        elif sent is None or algorithm.uses_error_feedback:
            values, changed = algorithm.pull(space, block.x, block.worker, center, exchange)
        else:
            values, changed = algorithm.pull_sent(space, block.x, block.worker, center, sent, exchange)
        self._set(block, values)
        self._write(self.worker, block.part, block.worker, changed)
        if not self._overlapped:
            self._reset_consumed_state(block)

    def _set(self, block: Block[V], values: V) -> None:
        """Set the values of the replica."""
        if not block.in_place:
            self.values.write(block.part, values)
        elif values is not block.x:
            cast(Any, block.x)[:] = values

    def _reset_consumed_state(self, block: Block[V]) -> None:
        """Set the consumed state to zeros."""
        consumed = self.algorithm.consumed_state
        if consumed is not None:
            zeros = self._replica.space.zeros_like(block.worker[consumed], out=block.worker[consumed])
            self._write(self.worker, block.part, block.worker, {consumed: zeros})


def _part(vector: V, bucket: Bucket, part: Bucket) -> V:
    """Return the part of a vector that holds a part of a bucket, given the vector of the bucket."""
    if part is bucket:
        return vector
    return cast(V, cast(Any, vector)[part.start - bucket.start : part.stop - bucket.start])


def _slot(bucket: Bucket) -> int:
    """Return the slot of the first scratch buffer of a bucket: each bucket in flight has two."""
    return 2 * (bucket.index % IN_FLIGHT)


def all_buckets(groups: Iterable[TensorGroup[V]]) -> Iterator[tuple[TensorGroup[V], Bucket]]:
    """Yield the buckets of all groups, in the order of their numbers."""
    return ((group, bucket) for group in groups for bucket in group.values.layout.buckets)
