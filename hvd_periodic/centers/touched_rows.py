"""Messages of tables, such as embeddings, of which only the rows travel that some rank has touched."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.wires.base import Link, Sent, Wire

V = TypeVar("V")

logger = logging.getLogger("hvd_periodic")


class TouchedRows(Generic[V]):
    """Sums the messages of tables over ranks, and sends only rows in which the message of some rank is not 0.

        R     = { k : m_i[k] ≠ 0 on some rank i }        one bit per row, gathered from all ranks
        total = Σ_i m_i[k]  for k ∈ R,   0  elsewhere     one message of |R| rows

    It is the sum of the whole messages, since these are 0 elsewhere on every rank. A row of x − h is 0 exactly if the
    row is what was handed out, and a row of AGN's accumulator if no gradient has reached it.

    Args:
        layout: layout of the messages, in which buckets of tables hold whole rows (:meth:`Layout.by_rows`).
        tables: names of the tables; those that the layout does not have are ignored.
    """

    def __init__(self, layout: Layout, tables: Iterable[str]) -> None:
        names = set(tables)
        self._rows = {spec.name: spec.shape[0] for spec in layout.specs if spec.name in names and spec.size}
        self._tables = {
            bucket.index: layout.specs[bucket.pieces[0].tensor]
            for bucket in layout.buckets
            if bucket.size and layout.specs[bucket.pieces[0].tensor].name in self._rows
        }
        self._seen: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._warned: set[str] = set()

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket.index in self._tables

    def start(self, link: Link[V], bucket: Bucket, message: V) -> Sent[V]:
        """Gather which rows of a bucket are touched, and start to sum these; may overwrite the message.

        The bytes are those of the bits, 1/8 of the number of rows, and of the touched rows, at least one.
        """
        table, coding = self._tables[bucket.index], link.coding
        length = table.size // table.shape[0]
        rows = coding.reshape(message, -1, length)
        bits = packed_bits(coding.nonzero_rows(rows))
        gathered = link.communicator.gather_integers(bits, f"{link.name}.rows").reshape(-1, bits.size)
        touched = np.unpackbits(np.bitwise_or.reduce(gathered).view(np.uint8), count=bucket.size // length)
        self._note(table.name, int(touched.sum()), touched.size, link.communicator.rank == 0)
        if not touched.any():
            touched[0] = 1  # Groups of ranks meet in the same collectives: another one may have touched some.
        places = np.flatnonzero(touched)
        wait = link.reduce(coding.reshape(coding.take_rows(rows, places), -1), link.name)

        def total() -> V:
            sums = coding.reshape(wait(), -1, length)
            return coding.reshape(coding.put_rows(rows, places, sums), -1)

        return Sent(total, None, bits.nbytes + places.size * length * bucket.itemsize)

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
        ValueError: a table has fewer than two axes, or the algorithm moves replicas without making them equal.
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
    if algorithm.reduction != "sum" or not algorithm.reads_after:
        raise ValueError(
            "`parameters` can be 'rows' for algorithms that make all replicas equal, so that a row differs only where "
            "it was touched: averaging, DiLoCo, SlowMo, BMUF and AGN; pass parameters='average' for others. Received: "
            f"{algorithm!r}"
        )
    return layout.by_rows(tables)


def check_way(wire: Wire, place: str) -> None:
    """Check that the touched rows of tables can travel in this encoding, to a center with this placement.

    Raises:
        ValueError: they cannot.
    """
    if place != "replicated":
        raise ValueError(
            "`parameters` can be 'rows' with center='replicated' only, where every rank knows the rows that do not "
            f"travel. Received: center={place!r}"
        )
    if wire.lossy:
        raise ValueError(
            "`parameters` that are 'rows' travel without `compression`: leave out one of the two. Received: "
            f"compression={wire!r}"
        )
