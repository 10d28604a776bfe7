"""The vectors of tensors that are exchanged together: of the center, and of the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.centers.outbox import UNSENT, Outbox
from hvd_periodic.comm.base import Communicator
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire
from hvd_periodic.wires.plain import Plain

V = TypeVar("V")

IN_FLIGHT = 2
"""Buckets under way at once: one travels while the next is computed."""

_FETCHED = 2 * IN_FLIGHT
"""The working buffer of a bucket of the center that is not here; the others are two per bucket under way."""


_TOTAL = "total"
"""Names what an outer optimizer finds its gradient in."""


class GroupVectors(Generic[V]):
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
        first = self._read(values.layout.buckets[0], slot=0)
        self.share, self.center_state = self._new_center(first)
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
            self.snapshot = replica.new_resting_store(values.layout, f"{name}.snapshot")
        self._lasting = lasting
        self._blocks = [
            replica.blocks(bucket) if placement.everywhere else (bucket,) for bucket in values.layout.buckets
        ]
        self._spent, self.total = self._new_total()

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

    def join(self, communicator: Communicator, root: int) -> bool:
        """Be exchanged with other ranks than before; return whether this rank holds another part of the center.

        What it holds stays what it is, or is made anew, of zeros. The worker's vectors stay.
        """
        buckets = self.values.layout.buckets
        held = [self.placement.bounds(bucket) for bucket in buckets]
        self.placement.join(communicator, root)
        if self.outbox.unsent_sums is not None:
            self.outbox.join(communicator)
        if [self.placement.bounds(bucket) for bucket in buckets] == held:
            return False
        for key in (*self.center_state, _TOTAL):
            self._replica.drop_store(f"{self.name}.{key}")
        self.share, self.center_state = self._new_center(self._read(buckets[0], slot=0))
        self._spent, self.total = self._new_total()
        return True

    def _new_center(self, first: V) -> tuple[Layout, dict[str, Store[V]]]:
        """Return this rank's share, and zeros for each vector of the center; ``first`` is a part of the replica."""
        share = self.placement.share(self.values.layout)
        keys = self.initial_center(first)
        return share, {key: self._replica.new_resting_store(share, f"{self.name}.{key}") for key in keys}

    def _new_total(self) -> tuple[str | None, Store[V] | None]:
        """Return which vector of the worker lends its memory to the total, if one does; and the total."""
        if self._outer is None:
            return None, None
        here = not self.center.away
        if self.travelling is not None and here:
            return None, self.travelling
        lent = self.share is self.values.layout and not self._lasting and not self.outbox.wire.lossy
        spent = self.algorithm.consumed_state if lent and here else None
        if spent is not None:
            return spent, self.worker[spent]
        return None, self._replica.new_resting_store(self.share, f"{self.name}.{_TOTAL}")

    def start_from(self, bucket: Bucket, center: V) -> None:
        """Set a bucket of the replica to its center, and of the worker's vectors to those of the start of training."""
        self.values.write(bucket, center)
        self._write(self.worker, bucket, {}, self.algorithm.init_worker(self._replica.space, center))

    def set_share(self, key: str, bucket: Bucket, vector: V) -> None:
        """Set this rank's share of a bucket of a vector of the center, given the whole bucket."""
        start, stop = self.placement.bounds(bucket)
        if stop > start:
            self.center_state[key].write(self._share_of(bucket), cast(Any, vector)[start:stop])

    def fetch(self, communicator: Communicator, bucket: Bucket, prefix: str, key: str = "center") -> V:
        """Return a whole bucket of a vector of the center; collective, unless the center is everywhere."""
        return self._spread(communicator, bucket, self.center_state[key].read(self._share_of(bucket)), prefix)

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
        return self._spread(communicator, bucket, self.algorithm.publish(self._replica.space, center, exchange), prefix)

    def _spread(self, communicator: Communicator, bucket: Bucket, share: V, prefix: str) -> V:
        out = None
        if not self.placement.everywhere:
            out = self._replica.scratch(bucket, _FETCHED)
            out = self.values.read(bucket) if out is None else out
        name = f"{prefix}.{self.name}.{bucket.index}.center"
        return cast(V, self.placement.fetch(communicator, share, bucket, name, out))

    def _read(self, bucket: Bucket, slot: int) -> V:
        return self.values.read(bucket, out=self._replica.scratch(bucket, slot))

    def _read_all(self, stores: Mapping[str, Store[V]], bucket: Bucket) -> State[V]:
        return {key: store.read(bucket) for key, store in stores.items()}

    def _view_all(self, stores: Mapping[str, Store[V]], bucket: Bucket) -> State[V]:
        """Return the vectors of a bucket; their memory, where that is at hand."""
        views = {key: store.view(bucket) for key, store in stores.items()}
        return {key: stores[key].read(bucket) if view is None else view for key, view in views.items()}

    def _write(self, stores: Mapping[str, Store[V]], bucket: Bucket, old: State[V], new: State[V]) -> None:
        """Write vectors, but for those that are the views which were read."""
        for key, value in new.items():
            if value is not old.get(key) or stores[key].away:
                stores[key].write(bucket, value)

    def _settled(self, stores: Mapping[str, Store[V]], bucket: Bucket, old: State[V], new: State[V]) -> State[V]:
        """Return vectors as others may have them: those that are the views which were read, are read."""
        return {
            key: stores[key].read(bucket) if value is old.get(key) and not stores[key].away else value
            for key, value in new.items()
        }

    def _share_of(self, place: Bucket) -> Bucket:
        """Return what this rank holds of a bucket, or of a part of it where it holds all."""
        return place if self.placement.everywhere else self.share.buckets[place.index]
