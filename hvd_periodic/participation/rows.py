"""Parameters that are tables, such as embeddings, of which only the rows travel that some rank has touched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import refuse_asynchronous, refuse_with_quorum
from hvd_periodic.comm.base import Communicator
from hvd_periodic.participation.base import Policy, Setting
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.coding import packed_bits
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Link, Sent, Wire

V = TypeVar("V")

logger = logging.getLogger("hvd_periodic")

TOUCHED, SUMS = "touched", "untouched_sums"
"""Prefixes of the keys of stores of :class:`UntouchedRows` in saved states."""


class Rows(Policy):
    """The algorithm exchanges them as all others; rows that are not touched do not travel, see :class:`TouchedRows`."""

    name = "rows"
    described = "of which rows travel"
    known_early = False  # Their messages are not whole.

    def check(self, setting: Setting) -> None:
        """Raise a ValueError where the rows that do not travel are not known on all ranks."""
        refuse_asynchronous(setting.asynchronous, "parameters", self.name, "a worker exchanges its whole replica")
        refuse_with_quorum(setting.quorum, parameters=(self.name, True))
        _check_tables(setting.replica)
        _check_algorithm(setting.algorithm)
        if setting.bounds is not None and not setting.algorithm.reads_after:
            raise ValueError(
                "`max_message_norm` is a norm over all that a rank exchanges, and in elastic averaging `parameters` "
                f"that are 'rows' send some rows only: leave out one of the two. Received: {setting.bounds}"
            )
        _check_way(setting.wire, setting.center, setting.algorithm)
        problem = self.problem(setting)
        if problem is not None:
            raise ValueError(problem)

    def problem(self, setting: Setting) -> str | None:
        """Return why not only rows with gradients move between exchanges, where elastic averaging relies on it."""
        if setting.algorithm.reads_after:
            return None
        local, unseen = setting.local_optimizer, "an optimizer whose gradients are not seen here"
        moved = unseen if local is None else local.moves_untouched(setting.replica.tables)
        if moved is None:
            return None
        return (
            "`parameters` can be 'rows' in elastic averaging only if the local optimizer leaves rows without gradients "
            "alone, as SGD without momentum and weight decay and torch.optim.SparseAdam do, and embeddings have no "
            f"max_norm: change these, or pass parameters='average'. Received: {moved}"
        )

    def layout(self, replica: Replica[Any]) -> Layout:
        """Return the layout of the parameters, in which buckets of tables hold whole rows."""
        layout = replica.parameters.layout
        return layout.by_rows([i for i, spec in enumerate(layout.specs) if spec.name in replica.tables])


def _check_tables(replica: Replica[Any]) -> None:
    """Raise a ValueError if a table has fewer than two axes."""
    for spec in (spec for spec in replica.parameters.layout.specs if spec.name in replica.tables):
        shape = spec.shape[:-1] if spec.name in replica.complex_names else spec.shape
        if len(shape) < 2:
            raise ValueError(
                "`parameters` can be 'rows' for tensors of two axes and more, whose first axis counts the rows. "
                f"Received: {spec.name!r} of shape {shape}"
            )


def _check_algorithm(algorithm: Algorithm) -> None:
    """Raise a ValueError if an exchange changes rows in a way that is not known where their messages are not.

    The algorithm has to make replicas equal, or to move all rows by a constant fraction of their distance from the
    center, without an elastic term in local steps.
    """
    elastic = not algorithm.reads_after
    if algorithm.reduction != "sum" or (elastic and algorithm.contraction(Exchange(1, 1)) is None):
        raise ValueError(
            "`parameters` can be 'rows' for averaging, DiLoCo, SlowMo, BMUF and AGN, which make all replicas equal, "
            f"and for elastic averaging; pass parameters='average' for others. Received: {algorithm!r}"
        )
    if elastic and algorithm.uses_gradients:
        raise ValueError(
            "`parameters` can be 'rows' in elastic averaging with rho=0 only, since ρ > 0 moves rows without "
            f"gradients. Received: {algorithm!r}"
        )


def _check_way(wire: Wire, center: str, algorithm: Algorithm) -> None:
    """Raise a ValueError if touched rows cannot travel in this encoding, to a center with this placement."""
    if center != "replicated":
        raise ValueError(
            "`parameters` can be 'rows' with center='replicated' only, where every rank knows the rows that do not "
            f"travel. Received: center={center!r}"
        )
    if wire.lossy and not algorithm.reads_after:
        raise ValueError(
            "In elastic averaging, `parameters` that are 'rows' travel without `compression`: leave out one of the "
            f"two. Received: compression={wire!r}"
        )
    if not wire.elementwise:
        raise ValueError(
            "`parameters` that are 'rows' travel with `compression` to 16 bits only, Compression.fp16 or "
            f"Compression.bf16, or without. Received: compression={wire!r}"
        )


class TouchedRows(Generic[V]):
    """Sums the messages of tables over ranks, and sends only rows that some rank has touched.

    Where exchanges make all replicas equal, these are the rows in which the message of some rank, as it is sent, is not
    0:

        R     = { k : m_i[k] ≠ 0 on some rank i }        one bit per row, gathered from all ranks
        total = Σ_i m_i[k]  for k ∈ R,   0  elsewhere     one message of |R| rows

    It is the sum of the whole messages, since these are 0 elsewhere on every rank. A row of x − h is 0 exactly if the
    row is what was handed out, and a row of AGN's accumulator if no gradient has reached it. In elastic averaging,
    gradients decide which rows are touched, and the total of all others is known, see :class:`UntouchedRows`.

    A wire of 16 bits rounds small elements to 0; they stay in the residual. Unless the collective sums 16 bits, the
    ranks sum in one hop: in two, other ranks would sum other rows each time, and keep residuals of them.

    Args:
        wire: encoding of the rows.
        replica: has the verbs of the front end, which may be others at another call.
        layout: layout of the messages, in which buckets of tables hold whole rows (:meth:`Layout.by_rows`).
        tables: indices of the tables.
        untouched: knows the total of rows that are not touched, and which are; None: the total is 0.

    Attributes:
        untouched: as given.
    """

    def __init__(
        self,
        wire: Wire,
        replica: Replica[V],
        layout: Layout,
        tables: Collection[int],
        untouched: UntouchedRows[V] | None = None,
    ) -> None:
        self._wire, self._replica, self.untouched = wire, replica, untouched
        self._rows = {layout.specs[i].name: layout.specs[i].shape[0] for i in tables}
        self._tables = {
            bucket.index: layout.specs[bucket.pieces[0].tensor]
            for bucket in layout.buckets
            if bucket.size and bucket.pieces[0].tensor in tables
        }
        self._seen: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._warned: set[str] = set()

    @classmethod
    def of_parameters(
        cls,
        name: str,
        wire: Wire,
        replica: Replica[V],
        layout: Layout,
        algorithm: Algorithm,
        communicator: Communicator,
    ) -> TouchedRows[V] | None:
        """Return what sends the rows of a group of tensors; None if they are not the parameters, or have no tables."""
        tables = [i for i, spec in enumerate(layout.specs) if spec.name in replica.tables and spec.size]
        if not tables or layout is not replica.parameters.layout:
            return None
        untouched: UntouchedRows[V] | None = None
        if not algorithm.reads_after:
            untouched = UntouchedRows(name, layout, tables, replica, algorithm, communicator)
        return cls(wire, replica, layout, tables, untouched)

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket.index in self._tables

    def start(self, link: Link[V], bucket: Bucket, message: V, exchange: Exchange) -> Sent[V]:
        """Gather which rows of a bucket are touched, and start to sum these; may overwrite the message.

        The bytes are those of the bits, 1/8 of the number of rows, and of the touched rows, at least one.
        """
        table, coding = self._tables[bucket.index], link.coding
        length = table.size // table.shape[0]
        rows = coding.reshape(message, -1, length)
        untouched = self.untouched
        if untouched is None:
            flags = coding.nonzero_rows(coding.reshape(self._wire.rounded(coding, message), -1, length))
        else:
            flags = untouched.take_marks(bucket)
        bits = packed_bits(flags)
        gathered = link.communicator.gather_integers(bits, f"{link.name}.rows").reshape(-1, bits.size)
        touched = np.unpackbits(np.bitwise_or.reduce(gathered).view(np.uint8), count=bucket.size // length)
        if untouched is None:
            self._note(table.name, int(touched.sum()), touched.size, link.communicator.rank == 0)
        if not touched.any():
            touched[0] = 1  # Groups of ranks meet in the same collectives: another one may have touched some.
        places = np.flatnonzero(touched)
        size = places.size * length
        link = replace(link, size=size, nbytes=size * bucket.itemsize, residual=None)
        sent = self._wire.start(link, coding.reshape(coding.take_rows(rows, places), -1))

        def whole(vector: V, others: V) -> V:
            """Return a vector of the touched rows among others, which are overwritten."""
            of_all, of_touched = coding.reshape(others, -1, length), coding.reshape(vector, -1, length)
            return coding.reshape(coding.put_rows(of_all, places, of_touched), -1)

        def total() -> V:
            if untouched is not None:
                return untouched.total(bucket, message, places, coding.reshape(sent.wait(), -1, length), exchange)
            # What was encoded is free already: a worker may accumulate gradients there.
            return whole(sent.wait(), self._replica.space.zeros_like(message) if self._wire.lossy else message)

        decoded = None if sent.decoded is None else whole(sent.decoded, self._replica.space.zeros_like(message))
        return Sent(total, decoded, bits.nbytes + sent.nbytes)

    def _note(self, name: str, sent: int, rows: int, warns: bool) -> None:
        """Count the rows of a table that travel; warn once if they are over half of it."""
        self._sent[name] += sent
        self._seen[name] += rows
        if self._seen[name] < self._rows[name]:
            return
        touched, self._sent[name], self._seen[name] = self._sent[name], 0, 0
        if warns and 2 * touched > self._rows[name] and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%d of %d rows of %r have changed since the last exchange, so that parameters='rows' saves little: an "
                "optimizer with momentum, Adam's moments or weight decay changes rows without gradients too. Use a "
                "sparse one (torch.optim.SparseAdam, SGD without momentum), or parameters='average'",
                touched,
                self._rows[name],
                name,
            )


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
