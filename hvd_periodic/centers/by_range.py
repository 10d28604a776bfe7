"""An algorithm on vectors whose tensors have different learning rates or weights: it is called range by range."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from hvd_periodic.algorithms.base import Algorithm, Exchange, State
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout

V = TypeVar("V")

AS_EVER = -1.0
"""In place of a weight, for tensors to which all workers contribute: ``exchange.weight`` holds."""


class ByRange(Generic[V]):
    """Calls an algorithm for one range of a bucket after another, in each of which it knows one rate and one weight.

    The weight of this worker differs between tensors where only workers with gradients of a tensor are present
    (``exchange.presence``): it is 0 where this worker is absent, and None where all are.

    Args:
        algorithm: the algorithm.
        replica: has the verbs of the front end, which may be others at another call.
        whole: layout of the replica.
    """

    def __init__(self, algorithm: Algorithm, replica: Replica[V], whole: Layout) -> None:
        self._algorithm, self._replica, self._whole = algorithm, replica, whole

    def weights(self, layout: Layout, part: Bucket, exchange: Exchange) -> list[tuple[int, int, float | None]]:
        """Return the ranges of a bucket in which this worker has one weight: first and past-the-last element, weight.

        The layout is the whole, or this rank's shard.
        """
        specs = self._whole.specs
        return list(layout.constant_ranges(part, lambda i: exchange.presence.get(specs[i].name, AS_EVER)))

    def weighed(self, part: Bucket, message: V, exchange: Exchange, layout: Layout | None = None) -> V:
        """Return the message to send: zeros where this worker is absent, otherwise as :meth:`Algorithm.weighed`.

        The layout is the whole, which is the default, or that of a shard.
        """
        space, weighed = self._replica.space, []
        for start, stop, weight in self.weights(layout or self._whole, part, exchange):
            of_range = cast(Any, message)[start:stop]
            if weight:
                known = exchange if weight == AS_EVER else replace(exchange, weight=weight)
                weighed.append(self._algorithm.weighed(space, of_range, known))
            else:
                weighed.append(space.zeros_like(of_range))
        return space.concatenate(weighed)

    def move(
        self,
        layout: Layout,
        shard: Bucket,
        center: State[V],
        total: V,
        exchange: Exchange,
        rates: LearningRates | None,
    ) -> State[V]:
        """Return the changes to the center's vectors of this rank's shard; none where no worker is present.

        Args:
            layout: layout of the shard.
            shard: a bucket of it.
            center: the center's vectors.
            total: the total of the messages.
            exchange: the exchange.
            rates: the learning rates, if the algorithm uses them.
        """
        space, algorithm, whole = self._replica.space, self._algorithm, cast(Any, total)
        ranges = list(self._ranges_to_move(layout, shard, exchange, rates))
        if len(ranges) == 1 and ranges[0][2] is not None:
            return algorithm.move(space, center, total, ranges[0][2])
        stays = {"center": total} | center  # Without a center, nothing reads what is published where nothing moves.
        moved = [
            _cut(stays, start, stop)
            if of_range is None
            else algorithm.move(space, _cut(center, start, stop), whole[start:stop], of_range)
            for start, stop, of_range in ranges
        ]
        changed = set(stays).intersection(*moved)
        return {key: space.concatenate([part[key] for part in moved]) for key in stays if key in changed}

    def pull(
        self, part: Bucket, x: V, worker: State[V], center: V, exchange: Exchange, sent: V | None = None
    ) -> tuple[V, State[V]]:
        """Return the pulled replica and the worker's vectors; ``sent`` is as in :meth:`Algorithm.pull_sent`.

        Where no worker is present, a replica that would take the moved center stays. A worker that was absent, and has
        sent nothing, is pulled by its whole displacement.
        """
        algorithm, space, pulled = self._algorithm, self._replica.space, []
        for start, stop, weight in self.weights(self._whole, part, exchange):
            of_x, of_center = cast(Any, x)[start:stop], cast(Any, center)[start:stop]
            of_worker = _cut(worker, start, stop)
            values: V = of_x
            changed: State[V] = {}
            if weight and sent is not None and not algorithm.uses_error_feedback:
                of_sent = cast(Any, sent)[start:stop]
                values, changed = algorithm.pull_sent(space, of_x, of_worker, of_center, of_sent, exchange)
            elif weight is not None or not algorithm.reads_after:
                values, changed = algorithm.pull(space, of_x, of_worker, of_center, exchange)
            pulled.append((values, of_worker | changed))
        joined = {key: space.concatenate([of_worker[key] for _, of_worker in pulled]) for key in worker}
        return space.concatenate([values for values, _ in pulled]), joined

    def _ranges_to_move(
        self, layout: Layout, shard: Bucket, exchange: Exchange, rates: LearningRates | None
    ) -> Iterator[tuple[int, int, Exchange | None]]:
        """Yield the ranges of a bucket with what the algorithm knows about each; None where no worker is present."""
        of_rates: Iterable[tuple[int, int, Any]] = [(0, shard.size, None)]
        if rates is not None:
            of_rates = rates.constant_ranges(layout, shard)
        weights = self.weights(layout, shard, exchange) if exchange.presence else [(0, shard.size, AS_EVER)]
        for start, stop, rate in of_rates:
            for first, last, weight in weights:
                if max(start, first) < min(stop, last):
                    of_range = None if weight is None else replace(exchange, learning_rate=rate)
                    yield max(start, first), min(stop, last), of_range


def _cut(state: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {key: vector[start:stop] for key, vector in state.items()}
