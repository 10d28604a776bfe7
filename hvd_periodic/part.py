"""Tensors that are exchanged together by one algorithm: the parameters, or the buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.comm.base import Communicator
from hvd_periodic.layout import Bucket
from hvd_periodic.replica import Replica
from hvd_periodic.store import Store

V = TypeVar("V")

IN_FLIGHT = 2
"""Buckets under way at once: one travels while the next is computed."""


class Part(Generic[V]):
    """Values, an algorithm, and the state that the algorithm keeps of them.

    Args:
        name: names the part in collectives and in saved states.
        values: the tensors of this rank, with at least one element.
        algorithm: what an exchange makes of them.
        replica: lends working buffers, and the center optimizer.

    Attributes:
        state: the vectors of the algorithm's state, by name; zeros until :meth:`reset`.
    """

    def __init__(self, name: str, values: Store[V], algorithm: Algorithm, replica: Replica[V]) -> None:
        self.name = name
        self.values = values
        self.state: dict[str, Store[V]] = {}
        self._algorithm = algorithm
        self._replica = replica
        for key in algorithm.init(replica.space, self._read(values.layout.buckets[0], slot=0)):
            self.state[key] = replica.new_store(values.layout, f"{name}.{key}")

    def reset(self) -> None:
        """Set the state to that of the start of training."""
        for bucket in self.values.layout.buckets:
            self._write_state(bucket, {}, self._algorithm.init(self._replica.space, self._read(bucket, slot=0)))

    def exchange(self, communicator: Communicator, exchange: Exchange, prefix: str) -> int:
        """Exchange all buckets, one travelling while the next is computed; return the bytes sent.

        With an optimizer on the center, all totals come first, then its step, then the updates.
        """
        algorithm, replica = self._algorithm, self._replica
        in_flight: deque[tuple[Bucket, V, dict[str, V], Callable[[], V]]] = deque()

        def finish() -> None:
            bucket, x, state, wait = in_flight.popleft()
            total = wait()
            if algorithm.optimizes_center:
                self._write_state(bucket, state, {"gradient": total})
            else:
                self._update(bucket, x, state, total, exchange)

        for bucket in self.values.layout.buckets:
            if len(in_flight) == IN_FLIGHT:
                finish()
            slot = 2 * (bucket.index % IN_FLIGHT)
            x, state = self._read(bucket, slot), self._read_state(bucket)
            message = algorithm.message(replica.space, x, state, exchange, out=replica.scratch(bucket, slot + 1))
            name = f"{prefix}.{self.name}.{bucket.index}"
            in_flight.append((bucket, x, state, communicator.allreduce(message, name, algorithm.reduction)))
        while in_flight:
            finish()
        if algorithm.optimizes_center:
            replica.step_center()
            for bucket in self.values.layout.buckets:
                state = self._read_state(bucket)
                self._update(bucket, self._read(bucket, slot=0), state, state["gradient"], exchange)
        return sum(bucket.nbytes for bucket in self.values.layout.buckets)

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that saved vectors have the names and shapes of this part's state.

        Raises:
            ValueError: names the first tensor that differs.
        """
        here = {spec.name: spec.shape for spec in self.values.layout.specs}
        for key in self.state:
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

    def _update(self, bucket: Bucket, x: V, state: dict[str, V], total: V, exchange: Exchange) -> None:
        values, new_state = self._algorithm.update(self._replica.space, x, state, total, exchange)
        self.values.write(bucket, values)
        self._write_state(bucket, state, new_state)


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"of shape {shapes[name]}" if name in shapes else "missing"
