"""The interface of all wires."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.spellings import RenamedAttribute
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import Store

V = TypeVar("V")


class Reduce(Protocol):
    """Starts to reduce a buffer over ranks; the returned function waits for the result, or this rank's shard of it."""

    def __call__(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start the reduction."""


@dataclass(frozen=True)
class Residual(Generic[V]):
    """The unsent part of the messages, or of the sums that a rank forms for the others, of one bucket.

    Attributes:
        store: the residuals of all buckets.
        bucket: the bucket.
        space: the verbs of the front end.
        waiting: ranges of elements that do not travel this time: they keep their residual.
    """

    store: Store[V]
    bucket: Bucket
    space: VectorSpace[V]
    waiting: Sequence[tuple[int, int]] = ()

    def read(self) -> V:
        """Return the residual to send; zeros where it waits."""
        residual = self.store.read(self.bucket)
        return self.space.sub(residual, self._kept()) if self.waiting else residual

    def write(self, value: V) -> None:
        """Replace the residual, which is added to the next message or sum."""
        if self.waiting:
            value = self.space.axpy(1.0, self._kept(), value)
        if self.bucket.size:
            self.store.write(self.bucket, value)

    def _kept(self) -> V:
        """Return the residual where it waits, and zeros elsewhere."""
        residual: Any = self.store.read(self.bucket)
        parts, end = [], 0
        for start, stop in self.waiting:
            parts += [self.space.zeros_like(residual[end:start]), residual[start:stop]]
            end = stop
        return self.space.concatenate([*parts, self.space.zeros_like(residual[end:])])


@dataclass(frozen=True)
class Link(Generic[V]):
    """The connection that carries the messages of one bucket.

    Attributes:
        communicator: the ranks.
        name: name of the collective; a second collective may append to it.
        size: number of elements.
        nbytes: bytes of these elements before encoding.
        reduce: sums over ranks, as the placement of the center requires.
        coding: the verbs of the front end.
        residual: unsent part of the sums that this rank forms for the others; None if it forms none.
    """

    communicator: Communicator
    name: str
    size: int
    nbytes: int
    reduce: Reduce
    coding: Coding[V]
    residual: Residual[V] | None = None
    remembered = RenamedAttribute("residual")


@dataclass(frozen=True)
class Sent(Generic[V]):
    """A message in flight.

    Attributes:
        wait: waits for the sum over ranks.
        decoded: the message as the others receive it; None: unchanged.
        nbytes: bytes handed to collectives.
    """

    wait: Callable[[], V]
    decoded: V | None
    nbytes: int


class Wire(ABC):
    """An encoding of the messages of the parameters, and of their sum.

    The unsent part of a message is not lost: if replicas continue from the published center, it is kept and added to
    the next message (error feedback); in elastic averaging it stays in the replica, which is pulled by the part that
    was sent.

    A wire holds settings only, and acts through the verbs of :class:`~hvd_periodic.vectors.coding.Coding`.

    Attributes:
        lossy: the received message may differ from the original, and NaN and infinity cannot travel.
        elementwise: the encoding of an element does not depend on the others, so that some of them may travel alone.
        coding_seconds: seconds per byte of float32 to encode and decode in an exchange, without the messages of other
            workers if there is one hop: E + D, with E and D of docs/performance. In two hops, n workers encode a
            message and an n-th of the sum, and decode both, their n-ths of all messages, and the sum:
            (1 + 1/n) E + (3 + 1/n) D, here of n = 2.
        adding_seconds: seconds per byte of float32 to decode a worker's message and add it to others, on one core that
            copies 7 GB/s: four passes over memory, where copying takes two.
    """

    lossy: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    coding_seconds: ClassVar[float] = 0.0
    adding_seconds: ClassVar[float] = 0.0

    def check(self, communicator: Communicator, place: str) -> None:
        """Raise a ValueError if messages to a center with this placement cannot travel in this encoding."""

    def forms_sums(self, communicator: Communicator, lasting: bool) -> bool:
        """Return whether every rank sums a part of all messages and sends the sum to the others."""
        return False

    def traffic(self, workers: int, nbytes: float, lasting: bool = False) -> tuple[float, float]:
        """Return the number of consecutive messages, and the bytes that each worker sends, until all have the sum.

        For b bytes and n workers: 2 (n − 1) messages and 2 (n − 1) / n · b bytes, the minimum for an all-reduce.
        Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. 2009.

        Args:
            workers: n.
            nbytes: bytes of the message in float32, before encoding.
            lasting: local steps continue while messages are in flight.

        Example:
            >>> from hvd_periodic.wires import Plain, TopK
            >>> Plain().traffic(4, 4e6), TopK(0.01).traffic(4, 4e6)
            ((6, 6000000.0), (3, 150329.58984375))
        """
        others = workers - 1
        return 2 * others, 2 * others / workers * nbytes

    def decoded(self, workers: int, nbytes: float, lasting: bool = False) -> float:
        """Return the bytes of float32 that each worker decodes, if they grow with the number of workers; otherwise 0.

        Example:
            >>> from hvd_periodic.wires import Plain, TopK
            >>> Plain().decoded(4, 4e6), TopK(0.01).decoded(4, 4e6)
            (0.0, 16000000.0)
        """
        return 0.0

    def rounded(self, coding: Coding[V], message: V) -> V:
        """Return a message in which elements are 0 that are sent as 0; for elementwise encodings."""
        return message

    @abstractmethod
    def start(self, link: Link[V], message: V) -> Sent[V]:
        """Start to sum messages over ranks; a wire that is not lossy may overwrite the message."""
