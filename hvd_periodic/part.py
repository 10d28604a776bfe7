"""Tensors that are exchanged together by one algorithm: the parameters, or the buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.comm.base import Communicator
from hvd_periodic.layout import Bucket
from hvd_periodic.placement import Placement
from hvd_periodic.replica import Replica
from hvd_periodic.store import Store

V = TypeVar("V")

IN_FLIGHT = 2
"""Buckets under way at once: one travels while the next is computed."""

_FETCHED = 2 * IN_FLIGHT
"""The working buffer of a bucket of the center that is not here; the others are two per bucket under way."""


class Part(Generic[V]):
    """Values, an algorithm, the center, and what else the algorithm keeps of them.

    Args:
        name: names the part in collectives and in saved states.
        values: the tensors of this rank, with at least one element.
        algorithm: what an exchange makes of them.
        replica: lends working buffers, and the center optimizer.
        placement: where the center lives.

    Attributes:
        center: this rank's share of the center.
        state: the worker's own vectors, by name; they and the center are zeros until :meth:`reset`.
        total: for algorithms that optimize the center: this rank's share of the sum of the messages.
    """

    def __init__(
        self, name: str, values: Store[V], algorithm: Algorithm, replica: Replica[V], placement: Placement
    ) -> None:
        self.name = name
        self.values = values
        self.placement = placement
        self._algorithm = algorithm
        self._replica = replica
        share = placement.share(values.layout)
        self.center: Store[V] = replica.new_store(share, f"{name}.center")
        self.state: dict[str, Store[V]] = {}
        for key in algorithm.init(replica.space, self._read(values.layout.buckets[0], slot=0)):
            if key != "center":
                self.state[key] = replica.new_store(values.layout, f"{name}.{key}")
        self.total: Store[V] | None = None
        if algorithm.optimizes_center:
            whole = share is values.layout
            self.total = self.state["gradient"] if whole else replica.new_store(share, f"{name}.total")

    def reset(self) -> None:
        """Set center and state to those of the start of training."""
        for bucket in self.values.layout.buckets:
            state = self._algorithm.init(self._replica.space, self._read(bucket, slot=0))
            self.keep(bucket, state.pop("center"))
            self._write_state(bucket, {}, state)

    def keep(self, bucket: Bucket, center: V) -> None:
        """Set this rank's share of a bucket of the center, given the whole bucket."""
        start, stop = self.placement.bounds(bucket)
        if stop > start:
            self.center.write(self._share(bucket), cast(Any, center)[start:stop])

    def fetch(self, communicator: Communicator, bucket: Bucket, prefix: str) -> V:
        """Return a whole bucket of the center; collective, unless the center is everywhere."""
        return self._spread(communicator, bucket, self.center.read(self._share(bucket)), prefix)

    def _spread(self, communicator: Communicator, bucket: Bucket, share: V, prefix: str) -> V:
        out = None
        if not self.placement.everywhere:
            out = self._replica.scratch(bucket, _FETCHED)
            out = self.values.read(bucket) if out is None else out
        name = f"{prefix}.{self.name}.{bucket.index}.center"
        return cast(V, self.placement.fetch(communicator, share, bucket, name, out))

    def exchange(self, communicator: Communicator, exchange: Exchange, prefix: str) -> int:
        """Exchange all buckets, one travelling while the next is computed; return the bytes handed to collectives.

        With an optimizer on the center, all totals come first, then its step, then the pulls.
        """
        algorithm, replica, sent = self._algorithm, self._replica, 0
        in_flight: deque[tuple[Bucket, V, dict[str, V], Callable[[], V]]] = deque()

        def whole_center(bucket: Bucket, share: V | None = None) -> V:
            nonlocal sent
            sent += self.placement.moves(bucket.nbytes)
            if share is None:
                share = self.center.read(self._share(bucket))
            return self._spread(communicator, bucket, share, prefix)

        def finish() -> None:
            bucket, x, state, wait = in_flight.popleft()
            total, share = wait(), self._share(bucket)
            start, stop = self.placement.bounds(bucket)
            moved: V | None = None
            if stop > start:
                if self.total is not None:
                    in_place = self.total is self.state["gradient"]
                    self._set(self.total, share, total, state["gradient"] if in_place else None)
                else:
                    center = self.center.read(share)
                    moved = algorithm.move(replica.space, center, total, exchange)
                    self._set(self.center, share, moved, center)
            if algorithm.reads_after and not algorithm.optimizes_center:
                # Not read again: a store may keep what is written of a tensor until its last bucket is there.
                state = self._read_state(bucket) | {"center": whole_center(bucket, moved)}
                self._pull(bucket, x, state, exchange)

        for bucket in self.values.layout.buckets:
            if len(in_flight) == IN_FLIGHT:
                finish()
            slot = 2 * (bucket.index % IN_FLIGHT)
            x, state = self._read(bucket, slot), self._read_state(bucket)
            if algorithm.reads_before:
                state["center"] = whole_center(bucket)
            message = algorithm.message(replica.space, x, state, exchange, out=replica.scratch(bucket, slot + 1))
            if not algorithm.reads_after:
                self._pull(bucket, x, state, exchange)
            name = f"{prefix}.{self.name}.{bucket.index}"
            wait = self.placement.reduce(communicator, message, name, algorithm.reduction)
            in_flight.append((bucket, x, state, wait))
            sent += bucket.nbytes
        while in_flight:
            finish()
        if algorithm.optimizes_center:
            replica.step_center()
            for bucket in self.values.layout.buckets:
                self.take(bucket, whole_center(bucket), exchange)
        return sent

    def payload(self, bucket: Bucket, exchange: Exchange) -> V:
        """Return what an asynchronous transaction takes: the replica, or the message if that needs no center."""
        slot = 2 * (bucket.index % IN_FLIGHT)
        x = self._read(bucket, slot)
        if self._algorithm.reads_before:
            return x
        out = self._replica.scratch(bucket, slot + 1)
        return self._algorithm.message(self._replica.space, x, self._read_state(bucket), exchange, out=out)

    def take(self, bucket: Bucket, center: V, exchange: Exchange) -> None:
        """Let the replica pull a bucket of the center."""
        x = self._read(bucket, slot=2 * (bucket.index % IN_FLIGHT))
        self._pull(bucket, x, self._read_state(bucket) | {"center": center}, exchange)

    def save(self, communicator: Communicator, prefix: str) -> dict[str, dict[str, Any]]:
        """Return copies of center and state by name, the center whole; collective, unless the center is everywhere."""
        saved = {key: self._replica.save(store) for key, store in self.state.items()}
        whole = self.center
        if not self.placement.everywhere:
            whole = self._replica.new_temporary_store(self.values.layout)
            for bucket in self.values.layout.buckets:
                whole.write(bucket, self.fetch(communicator, bucket, prefix))
        return {"center": self._replica.save(whole), **saved}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set state and this rank's share of the center to what :meth:`save` returned."""
        for key, store in self.state.items():
            self._replica.load(store, dict(saved[key]))
        share: dict[str, Any] = {}
        for spec, (tensor, start, stop) in zip(self.center.layout.specs, self.center.layout.sources, strict=True):
            whole = saved["center"][self.values.layout.specs[tensor].name]
            share[spec.name] = whole.reshape(-1)[start:stop].reshape(spec.shape)
        self._replica.load(self.center, share)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that saved vectors have the names and shapes of this part's state.

        Raises:
            ValueError: names the first tensor that differs.
        """
        here = {spec.name: spec.shape for spec in self.values.layout.specs}
        for key in ("center", *self.state):
            there = {name: tuple(tensor.shape) for name, tensor in saved.get(key, {}).items()}
            differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
            if differing:
                raise ValueError(
                    f"The saved {key!r} of the {self.name} is of another model: {differing[0]!r} is "
                    f"{_shape(there, differing[0])} there and {_shape(here, differing[0])} here"
                )

    def _read(self, bucket: Bucket, slot: int) -> V:
        return self.values.read(bucket, out=self._replica.scratch(bucket, slot))

    def _read_state(self, bucket: Bucket) -> dict[str, V]:
        return {key: store.read(bucket) for key, store in self.state.items()}

    def _write_state(self, bucket: Bucket, old: dict[str, V], new: dict[str, V]) -> None:
        for key, value in new.items():
            if value is not old.get(key):
                self.state[key].write(bucket, value)

    def _pull(self, bucket: Bucket, x: V, state: dict[str, V], exchange: Exchange) -> None:
        values, changed = self._algorithm.pull(self._replica.space, x, state, exchange)
        self.values.write(bucket, values)
        self._write_state(bucket, state, changed)

    def _set(self, store: Store[V], bucket: Bucket, value: V, old: V | None = None) -> None:
        """Write a value that may be the view of the store which was read."""
        if value is not old:
            store.write(bucket, value)

    def _share(self, bucket: Bucket) -> Bucket:
        return self.center.layout.buckets[bucket.index]


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"of shape {shapes[name]}" if name in shapes else "missing"
