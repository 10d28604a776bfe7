"""What every communicator provides."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvd_periodic.arguments import require_int
from hvd_periodic.comm.attendance import Attendance, Unattended
from hvd_periodic.comm.meeting import Purpose, Record, meet
from hvd_periodic.comm.memory import SharedMemory
from hvd_periodic.comm.messages import LONG, Messages

T = TypeVar("T")


class Communicator(ABC):
    """Collectives over a fixed set of ranks.

    All ranks call the same methods in the same order with the same names. Buffers are contiguous one-dimensional arrays
    of the communicator's own kind (numpy arrays, tensors), with fewer than 2³¹ elements.

    Attributes:
        rank: this process within the set, from 0.
        size: number of ranks in the set.
        processes: whether ranks are processes of their own.
        sums: types of 16 bits that collectives sum: ``"f2"``, float16; ``"bf2"``, bfloat16.
    """

    rank: int
    size: int
    processes: ClassVar[bool] = True
    sums: ClassVar[frozenset[str]] = frozenset()
    encloses: int = 0
    """Bytes of the messages of all ranks up to which they travel with what ranks tell each other."""
    waits_busily: bool = False
    """Waiting for messages takes processor time from the cores that train."""
    constructed: int = 0
    """How many optimizers of this process were constructed on these ranks."""
    elastic: bool = False
    """Ranks may come and go: one that is constructed cannot count on the others to be constructed now."""
    host: int = 0
    """A number that is the same for ranks of one host."""
    meeting_name: str = "hvd_periodic.meeting"
    """Under which all optimizers of these ranks meet."""
    description: str = "a communicator of the user"
    """What it is, for people."""
    attendance: Attendance = Unattended()
    """Which collectives this rank has come to; one that nobody looks at, where ranks are no processes."""

    def unique_name(self, timeout_seconds: object = None, provisional: bool = False) -> str:
        """Return a prefix for the names of collectives, which ends with the number of an optimizer. Collective.

        The ranks agree on it: some may have constructed more optimizers than others.

        Args:
            timeout_seconds: for which they wait here for each other, if it makes sense; the optimizer checks it.
            provisional: for what is over before the next is asked for, which is the same.

        Raises:
            RuntimeError: some ranks have come for something else than to construct an optimizer; on all of them.
            ValueError: the environment says something else than seconds; on all of them.
        """
        with suppress(TypeError, ValueError):
            self.attendance.limit(timeout_seconds)  # type: ignore[arg-type]
        introduction, failure = self.introduction()
        record = Record(Purpose.CONSTRUCT, self.constructed, problem=int(failure is not None))
        records, introductions = meet(self, record, failure, introduction)
        self.attendance.met(introductions)
        number = 1 + max(record.optimizer for record in records)
        self.constructed = number - provisional
        return f"{self.meeting_name.removesuffix('meeting')}{number}"

    def introduction(self) -> tuple[np.ndarray | None, Exception | None]:
        """Return what the others have to know to ask this rank where it is; or why this rank cannot go on."""
        return None, None

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the set as the job numbers them."""
        return list(range(self.size))

    @property
    def global_rank(self) -> int:
        """This rank as the job numbers it, which is how messages name ranks."""
        return self.global_ranks[self.rank]

    @property
    def meets_with(self) -> Communicator:
        """The ranks that meet when these do: others than these where groups exchange in step."""
        return self

    def among(self, of_all: Sequence[T]) -> list[T]:
        """Return what there is of these ranks, given that of :attr:`meets_with`."""
        return list(of_all)

    def anew(self, everyone: Communicator) -> Communicator:
        """Return what takes the place of this one, where all ranks are others now; communicates nothing."""
        return everyone

    def check(self) -> None:
        """Raise on all ranks where they do not agree on who these are. Collective."""

    def changed(self) -> str | None:
        """Return how the job has changed since construction, so that these ranks are no longer what they were."""
        return None

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Raise a ValueError where these ranks cannot exchange tensors of a kind of device, such as ``"cuda"``."""

    @abstractmethod
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce ``buffer`` over ranks; call what is returned to wait for the result.

        The result is identical to the bit on all ranks, and may have replaced the contents of ``buffer``.

        Args:
            buffer: this rank's values; not to be touched until the result is there.
            name: names the collective; the same on all ranks, unique among those in flight.
            op: ``"sum"`` or ``"max"``.
        """

    @abstractmethod
    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the values of rank ``root``; may overwrite ``buffer``."""

    @abstractmethod
    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to sum ``buffer`` over ranks; what is returned waits for this rank's chunk of the result.

        Chunks are those of :func:`hvd_periodic.vectors.layout.chunk`.

        Args:
            buffer: this rank's values, of the same size on all ranks; not to be touched until the result is there.
            name: as in :meth:`allreduce`.
        """

    @abstractmethod
    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the buffers of all ranks, one after another; their sizes may differ. May be written into ``out``."""

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start :meth:`allgather` of buffers of one size; what is returned waits. By default it takes place at once."""
        gathered = self.allgather(buffer, name, out)
        return lambda: gathered

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Start to give every rank so many elements of ``buffer``, one part after another.

        What is returned waits for what has come here, one rank after another, and how much from each.
        """
        told = self.allgather_object((np.array(buffer), counts), name)
        parts = [np.split(values, np.cumsum(given)[:-1])[self.rank] for values, given in told]
        return lambda: (np.concatenate(parts), [len(part) for part in parts])

    def repeated(self, buffer: Any, times: int) -> Any:
        """Return a buffer several times, one after another; local."""
        return np.tile(buffer, times)

    def larger(self, x: Any, y: Any) -> Any:
        """Return the larger of both, of every element; local."""
        return x.clip(y)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to give every rank its part of ``buffer``; what is returned waits for this rank's part of all.

        Args:
            buffer: n parts of one size, in the order of ranks; may be overwritten.
            name: as in :meth:`allreduce`.
        """
        everything = self.allgather(buffer, name)
        return lambda: everything.reshape(self.size, self.size, -1)[:, self.rank].reshape(-1)

    @abstractmethod
    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""

    def broadcast_object(self, value: object, name: str, root: int) -> Any:
        """Return the picklable value of rank ``root``; those of the others stay where they are."""
        return self.allgather_object(value if self.rank == root else None, name)[root]

    def pass_object(self, value: object, to: int, name: str) -> dict[int, Any]:
        """Give a picklable value to one rank; return those that the others have given to this one, by rank."""
        given = enumerate(self.allgather_object((to, value), name))
        return {rank: value for rank, (receiver, value) in given if receiver == self.rank}

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the integers of all ranks, one rank after another, as int64; their number may differ."""
        return np.concatenate(self.allgather_object(values, name))

    def shares_memory(self) -> bool:
        """Return whether :meth:`shared_memory` is possible. Collective.

        Raises:
            RuntimeError: this communicator is for synchronous exchange only, or not as the job was launched.
        """
        raise RuntimeError(f"{type(self).__name__} cannot exchange asynchronously")

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return memory that all ranks see. Collective.

        Raises:
            NoSharedMemoryError: there is not enough of it; on all ranks.
        """
        raise RuntimeError(f"The ranks of {type(self).__name__} share no memory")

    def messages(self) -> Messages:
        """Return messages between two of these ranks, apart from all others. Collective.

        Raises:
            RuntimeError: as :meth:`shares_memory`.
        """
        raise RuntimeError(f"{type(self).__name__} has no messages between two ranks")

    def assembly(self, number: int) -> Callable[[], int | None]:
        """Start to wait for all ranks, which may take hours.

        Args:
            number: what this rank waits for, above 0; 0: it takes part, whatever the others wait for.

        Returns:
            what tells for what they wait: None until all ranks are there; 0 if none waits for anything.

        Raises:
            RuntimeError: from what is returned, on all ranks: they wait for different things.
        """
        numbers = self.allgather_object(number, "hvd_periodic.assembly")
        return lambda: awaited(numbers)

    @property
    def channel(self) -> object:
        """What carries assemblies: the same object where the same ranks have several communicators."""
        return self

    @property
    def namespace(self) -> Hashable:
        """Where names of collectives are told apart: equal for communicators of which names must not be the same."""
        return id(self)

    def assemble(self, number: int) -> None:
        """Wait for all ranks, without taking a core; see :meth:`assembly`."""
        look = self.assembly(number)
        while look() is None:
            time.sleep(LONG)

    def leave(self) -> None:
        """Say that this process ends as it should, where others would take it for one that has died."""
        return

    def lost(self) -> list[int]:
        """Return the ranks that have died, where the others can go on and know of it."""
        return []

    def alive(self) -> bool:
        """Return whether ranks can still reach each other."""
        return True

    def abort(self) -> None:
        """End the processes of all ranks, if they are processes."""

    def wait_for_job(self) -> None:
        """Wait for all ranks of the job, where it is divided into groups of which all exchange."""

    def rank_of(self, global_rank: int | None) -> int:
        """Return the rank within this set of a rank that the job knows as ``global_rank``; of None, the lowest.

        Raises:
            TypeError: it is not an int.
            ValueError: it is not in the set.
        """
        if global_rank is None:
            return 0
        if require_int(global_rank, "`root_rank`", minimum=0) >= self.size:
            raise ValueError(f"`root_rank` must be one of the ranks 0 to {self.size - 1}. Received: {global_rank!r}")
        return global_rank


def awaited(numbers: Sequence[int]) -> int:
    """Return what ranks wait for, given the number of each.

    Raises:
        RuntimeError: they wait for different things.

    Example:
        >>> awaited([2, 0, 2])
        2
    """
    waiting = sorted({number for number in numbers if number})
    if len(waiting) > 1:
        raise RuntimeError(
            f"Ranks wait for the end of different optimizers: {', '.join(map(str, waiting))}. Asynchronous optimizers "
            "have to be finalized in the same order on all ranks"
        )
    return waiting[0] if waiting else 0
