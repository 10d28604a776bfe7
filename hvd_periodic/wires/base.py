"""What every wire provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hvd_periodic.comm.base import Communicator
from hvd_periodic.vectors.coding import Coding

V = TypeVar("V")


class Reduce(Protocol):
    """Starts to reduce a buffer over ranks, each getting its share at least; returns what waits for the result."""

    def __call__(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start."""


class Remembered(Protocol[V]):
    """What a rank has not sent of the sums that it has formed for the others, and sends with the next."""

    def read(self) -> V:
        """Return it."""

    def write(self, value: V) -> None:
        """Replace it."""


@dataclass(frozen=True)
class Link(Generic[V]):
    """What carries the messages of one bucket.

    Attributes:
        communicator: the ranks.
        name: names the collective; another one may append to it.
        size: elements.
        nbytes: of these as they are.
        reduce: sums over ranks, as the place of the center asks.
        coding: the verbs of the front end.
        remembered: of sums that this rank forms for the others, if it does.
    """

    communicator: Communicator
    name: str
    size: int
    nbytes: int
    reduce: Reduce
    coding: Coding[V]
    remembered: Remembered[V] | None = None


@dataclass(frozen=True)
class Sent(Generic[V]):
    """A message that is under way.

    Attributes:
        wait: waits for the sum over ranks.
        decoded: what the others receive of the message; None: all of it.
        nbytes: handed to collectives.
    """

    wait: Callable[[], V]
    decoded: V | None
    nbytes: int


class Wire(ABC):
    """How the messages of the parameters are encoded, and their sum.

    What is not sent is not lost: where replicas become what the center hands out, it is kept and added to the next
    message; in elastic averaging it stays in the replica, which is pulled by what was sent.

    A wire holds settings only, and acts through the verbs of :class:`~hvd_periodic.vectors.coding.Coding`.

    Attributes:
        lossy: what arrives may differ from what was to be sent, and NaN and infinity cannot travel.
        coding_seconds: for a byte of parameters, that encoding and decoding take: on one core that copies 7 GB/s.
        adding_seconds: for a byte of float32, that decoding the message of a worker takes, and adding it to others: on
            such a core, as four passes over memory; copying is two.
    """

    lossy: ClassVar[bool] = True
    coding_seconds: ClassVar[float] = 0.0
    adding_seconds: ClassVar[float] = 0.0

    def check(self, communicator: Communicator, place: str) -> None:
        """Raise a ValueError where messages to such a center cannot travel like this."""

    def forms_sums(self, communicator: Communicator, lasting: bool) -> bool:
        """Return whether every rank forms the sum of a part of each message, and sends it on to the others."""
        return False

    def traffic(self, workers: int, nbytes: float, lasting: bool = False) -> tuple[float, float]:
        """Return how many messages follow each other, and how many bytes each worker sends, until all have a sum.

        Of b bytes in n workers 2 (n − 1) messages and 2 (n − 1) / n · b bytes, which no all-reduce goes below.
        Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. 2009.

        Args:
            workers: n.
            nbytes: of the message as it is, in float32.
            lasting: whether training goes on meanwhile.

        Example:
            >>> from hvd_periodic.wires import Plain, TopK
            >>> Plain().traffic(4, 4e6), TopK(0.01).traffic(4, 4e6)
            ((6, 6000000.0), (3, 150329.58984375))
        """
        others = workers - 1
        return 2 * others, 2 * others / workers * nbytes

    def decoded(self, workers: int, nbytes: float, lasting: bool = False) -> float:
        """Return to how many bytes of float32 each worker decodes the messages of others, where more come from more.

        Example:
            >>> from hvd_periodic.wires import Plain, TopK
            >>> Plain().decoded(4, 4e6), TopK(0.01).decoded(4, 4e6)
            (0.0, 16000000.0)
        """
        return 0.0

    @abstractmethod
    def start(self, link: Link[V], message: V) -> Sent[V]:
        """Start to sum messages over ranks; one that is not lossy may overwrite the message."""
