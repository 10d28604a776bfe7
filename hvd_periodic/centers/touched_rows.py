"""Messages of tables, such as embeddings, of which only the rows travel that some rank has touched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.centers.untouched_rows import UntouchedRows
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.wires.base import Link, Sent, Wire

V = TypeVar("V")

logger = logging.getLogger("hvd_periodic")


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
    """

    def __init__(
        self,
        wire: Wire,
        replica: Replica[V],
        layout: Layout,
        tables: Collection[int],
        untouched: UntouchedRows[V] | None = None,
    ) -> None:
        self._wire, self._replica, self._untouched = wire, replica, untouched
        self._rows = {layout.specs[i].name: layout.specs[i].shape[0] for i in tables}
        self._tables = {
            bucket.index: layout.specs[bucket.pieces[0].tensor]
            for bucket in layout.buckets
            if bucket.size and bucket.pieces[0].tensor in tables
        }
        self._seen: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._warned: set[str] = set()

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket.index in self._tables

    def start(self, link: Link[V], bucket: Bucket, message: V, exchange: Exchange) -> Sent[V]:
        """Gather which rows of a bucket are touched, and start to sum these; may overwrite the message.

        The bytes are those of the bits, 1/8 of the number of rows, and of the touched rows, at least one.
        """
        table, coding = self._tables[bucket.index], link.coding
        length = table.size // table.shape[0]
        rows = coding.reshape(message, -1, length)
        untouched = self._untouched
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


def packed_bits(flags: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return booleans as bits, in 64-bit integers.

    Example:
        >>> packed_bits(np.array([False] * 8 + [True] * 8)).view(np.uint8)
        array([  0, 255,   0,   0,   0,   0,   0,   0], dtype=uint8)
    """
    octets = np.packbits(flags)
    return np.pad(octets, (0, -octets.size % 8)).view(np.int64)


def layout_by_rows(replica: Replica[Any], algorithm: Algorithm) -> Layout:
    """Return the layout of the parameters, in which buckets of tables hold whole rows.

    Raises:
        ValueError: a table has fewer than two axes; or the algorithm neither makes replicas equal nor moves all rows by
            a constant fraction of their distance from the center; or its elastic term moves rows without gradients.
    """
    layout = replica.parameters.layout
    tables = [i for i, spec in enumerate(layout.specs) if spec.name in replica.tables]
    for spec in map(layout.specs.__getitem__, tables):
        shape = spec.shape[:-1] if spec.name in replica.complex_names else spec.shape
        if len(shape) < 2:
            raise ValueError(
                "`parameters` can be 'rows' for tensors of two axes and more, whose first axis counts the rows. "
                f"Received: {spec.name!r} of shape {shape}"
            )
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
    return layout.by_rows(tables)


def check_way(wire: Wire, place: str, algorithm: Algorithm) -> None:
    """Check that the touched rows of tables can travel in this encoding, to a center with this placement.

    Raises:
        ValueError: they cannot.
    """
    if place != "replicated":
        raise ValueError(
            "`parameters` can be 'rows' with center='replicated' only, where every rank knows the rows that do not "
            f"travel. Received: center={place!r}"
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
