"""Elastic averaging of rows of tables that no gradient has reached, which all ranks compute without traffic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

TOUCHED, SUMS = "touched", "untouched_sums"
"""Prefixes of the keys of this class's stores in saved states."""


class UntouchedRows(Generic[V]):
    """Knows, on every rank, the sum of the displacements of rows that no rank has touched.

    In elastic averaging, x ≠ c nearly everywhere, so that a row is touched if a local step has had a gradient of it,
    provided that the local optimizer leaves other rows alone. With R the rows that are touched on any rank:

        total = Σ_j (x_j − c)[k]  for k ∈ R,   D[k]  elsewhere
        D     ← (1 − α(n+1)) total

    since an exchange, c ← c + α total and x_j ← x_j − α (x_j − c), leaves Σ_j (x_j − c) = (1 − α(n+1)) total. D is 0
    when training starts, and is not kept if α(n+1) = 1, the default for up to 9 ranks. Whatever else changes a replica
    marks all its rows as touched.

    Args:
        name: name of the group.
        layout: layout of the messages, in which buckets of tables hold whole rows.
        tables: indices of the tables.
        replica: provides memory and verbs.
        algorithm: the algorithm, whose exchanges remove a constant fraction of the distance.
        communicator: the ranks.

    Attributes:
        marks: one element per row, which is not 0 if the row is touched.
        sums: D, of the shapes of the tables; None if it is 0 after every exchange.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        tables: Collection[int],
        replica: Replica[V],
        algorithm: Algorithm,
        communicator: Communicator,
    ) -> None:
        self._name, self._replica, self._algorithm = name, replica, algorithm
        self._layout = layout.restrict(
            lambda bucket: (0, bucket.size if bucket.size and bucket.pieces[0].tensor in tables else 0)
        )
        self.marks: Store[V] = replica.new_store(layout.one_per_row(tables), f"{name}.{TOUCHED}")
        self.sums: Store[V] | None = None
        self.join(communicator)

    def join(self, communicator: Communicator) -> None:
        """Exchange with these ranks from now on."""
        self._place = f"{communicator.rank}.{communicator.size}"
        if self.sums is None and self._remaining(Exchange(communicator.size, 1)):
            self.sums = self._replica.new_store(self._layout, f"{self._name}.{SUMS}")

    def stores(self) -> dict[str, Store[V]]:
        """Return what is saved, by keys that no other rank has, nor this one among another number of ranks."""
        stores = {TOUCHED: self.marks} if self.sums is None else {TOUCHED: self.marks, SUMS: self.sums}
        return {f"{key}.{self._place}": store for key, store in stores.items()}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all to saved values; mark all rows as touched if the state is of another rank, or of other tables."""
        stores = self.stores()
        for key, store in stores.items():
            shapes = {name: tuple(tensor.shape) for name, tensor in saved.get(key, {}).items()}
            if shapes != {spec.name: spec.shape for spec in store.layout.specs}:
                self.touch()
                return
        for key, store in stores.items():
            self._replica.load(store, dict(saved[key]))

    def reset(self) -> None:
        """Start from replicas that are equal to the center on all ranks."""
        for store in self.stores().values():
            for bucket in filter(lambda bucket: bucket.size, store.layout.buckets):
                store.write(bucket, self._replica.space.zeros_like(store.read(bucket)))

    def touch(self, of: Bucket | None = None) -> None:
        """Mark all rows as touched, or those of a bucket: this replica has changed otherwise than by local steps."""
        for bucket in self.marks.layout.buckets if of is None else [self.marks.layout.buckets[of.index]]:
            if bucket.size:
                self.marks.write(bucket, self._of_host(np.ones(bucket.size, np.float32), bucket))

    def take_marks(self, of: Bucket) -> np.ndarray[Any, Any]:
        """Return which rows of a bucket are touched on this rank; none is from now on."""
        bucket, space = self.marks.layout.buckets[of.index], self._replica.space
        marks = self.marks.read(bucket)
        flags = space.coding.nonzero_rows(space.coding.reshape(marks, -1, 1))
        self.marks.write(bucket, space.zeros_like(marks))
        return flags

    def total(self, bucket: Bucket, message: V, places: np.ndarray[Any, Any], sums: V, exchange: Exchange) -> V:
        """Return the total of a bucket; may overwrite the message.

        Args:
            bucket: the bucket.
            message: the message, whose memory is used.
            places: indices of the rows that are touched on any rank.
            sums: the sums of the displacements of these, in rows.
            exchange: the exchange.
        """
        space, remaining = self._replica.space, self._remaining(exchange)
        coding, (_, length) = space.coding, space.coding.sizes(sums)
        held = self._layout.buckets[bucket.index]
        if self.sums is None:
            known = space.zeros_like(message, out=message)
        else:
            known = space.copy(self.sums.read(held), out=message)
        total = coding.reshape(coding.put_rows(coding.reshape(known, -1, length), places, sums), -1)
        if self.sums is not None:
            self.sums.write(held, space.scale(remaining, space.copy(total)))
        elif remaining:  # A rate that changes between exchanges: all rows travel.
            self.touch(bucket)
        return total

    def _remaining(self, exchange: Exchange) -> float:
        """Return the fraction of Σ_j (x_j − c) that an exchange leaves, 1 − α(n+1)."""
        return 1 - (self._algorithm.contraction(exchange) or 0.0)

    def _of_host(self, array: np.ndarray[Any, Any], bucket: Bucket) -> V:
        like, coding = self.marks.read(bucket), self._replica.space.coding
        return coding.like(self._replica.from_host(array, bucket), like)
