"""Base class of all communicators."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvd_periodic.arguments import require_int
from hvd_periodic.comm.collective_tracker import CollectiveTracker, NullTracker
from hvd_periodic.comm.handshake import Purpose, Record, handshake
from hvd_periodic.comm.memory import SharedMemory
from hvd_periodic.comm.messages import LONG, Messages
from hvd_periodic.spellings import RenamedAttribute, rename_members

T = TypeVar("T")


class Communicator(ABC):
    """Collectives over a fixed set of ranks.

    All ranks call the same methods in the same order with the same names. Buffers are contiguous one-dimensional arrays
    of the communicator's kind (numpy arrays, tensors), with fewer than 2³¹ elements.

    Attributes:
        rank: this process within the set, from 0.
        size: number of ranks in the set.
        processes: whether each rank is a separate process.
        sums: 16-bit types that collectives can sum: ``"f2"``, float16; ``"bf2"``, bfloat16.
    """

    rank: int
    size: int
    processes: ClassVar[bool] = True
    sums: ClassVar[frozenset[str]] = frozenset()
    piggyback_limit_bytes: int = 0
    """Largest size in bytes, over all ranks, of messages that are sent along with the handshake."""
    busy_waits: bool = False
    """Whether waiting for messages takes CPU time from the cores that train."""
    constructed: int = 0
    """Number of optimizers that this process has constructed on these ranks."""
    elastic: bool = False
    """Whether membership may change: other ranks may not be under construction at the same time."""
    host: int = 0
    """A number that the ranks of one host share."""
    handshake_name: str = "hvd_periodic.meeting"
    """Name of the handshake, shared by all optimizers of these ranks."""
    description: str = "a communicator of the user"
    """Human-readable description."""
    tracker: CollectiveTracker = NullTracker()
    """Tracker of this rank's collectives; not watched if ranks are not processes."""

    encloses = RenamedAttribute("piggyback_limit_bytes")
    waits_busily = RenamedAttribute("busy_waits")
    meeting_name = RenamedAttribute("handshake_name")
    attendance = RenamedAttribute("tracker")
    introduction = RenamedAttribute("address")
    meets_with = RenamedAttribute("handshake_group")
    among = RenamedAttribute("select")
    anew = RenamedAttribute("rebuild")
    repeated = RenamedAttribute("tile")
    larger = RenamedAttribute("maximum")
    pass_object = RenamedAttribute("send_object")
    assembly = RenamedAttribute("begin_idle_barrier")
    assemble = RenamedAttribute("idle_barrier")
    lost = RenamedAttribute("dead_ranks")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        rename_members(cls, stacklevel=3)  # ABCMeta calls this.

    def unique_name(self, timeout_seconds: object = None, provisional: bool = False) -> str:
        """Return a prefix for the names of collectives, which ends with the number of an optimizer. Collective.

        The ranks agree on the number, as some may have constructed more optimizers than others.

        Args:
            timeout_seconds: how long ranks wait here for each other; ignored if invalid, as the optimizer checks it.
            provisional: the prefix is only used until the next one is requested, which will be the same.

        Raises:
            RuntimeError: some ranks are in another call than the construction of an optimizer; on all ranks.
            ValueError: the environment sets something other than a number of seconds; on all ranks.
        """
        with suppress(TypeError, ValueError):
            self.tracker.limit(timeout_seconds)  # type: ignore[arg-type]
        address, failure = self.address()
        record = Record(Purpose.CONSTRUCT, self.constructed, problem=int(failure is not None))
        records, addresses = handshake(self, record, failure, address)
        self.tracker.set_peers(addresses)
        number = 1 + max(record.optimizer for record in records)
        self.constructed = number - provisional
        return f"{self.handshake_name.removesuffix('meeting')}{number}"

    def address(self) -> tuple[np.ndarray | None, Exception | None]:
        """Return this rank's address, at which others ask where it is; or the error that keeps it from going on."""
        return None, None

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the set."""
        return list(range(self.size))

    @property
    def global_rank(self) -> int:
        """Global rank of this process, which messages use to name it."""
        return self.global_ranks[self.rank]

    @property
    def handshake_group(self) -> Communicator:
        """The ranks that share the handshakes of these: more than these if groups exchange in lockstep."""
        return self

    def select(self, of_all: Sequence[T]) -> list[T]:
        """Return the items of these ranks, given the items of all ranks of :attr:`handshake_group`."""
        return list(of_all)

    def rebuild(self, everyone: Communicator) -> Communicator:
        """Return the replacement of this communicator after the ranks of the job have changed; local."""
        return everyone

    def check(self) -> None:
        """Raise on all ranks if they disagree about the members of the set. Collective."""

    def changed(self) -> str | None:
        """Return how the job has changed since construction, which makes these ranks invalid; None if it has not."""
        return None

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Raise a ValueError if these ranks cannot exchange tensors of a kind of device, such as ``"cuda"``."""

    @abstractmethod
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start to reduce ``buffer`` over ranks; call the returned function to wait for the result.

        The result is bitwise identical on all ranks, and may have replaced the contents of ``buffer``.

        Args:
            buffer: this rank's values; not to be touched until the result is there.
            name: name of the collective; the same on all ranks, unique among collectives in flight.
            op: ``"sum"`` or ``"max"``.
        """

    @abstractmethod
    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the values of rank ``root``; may overwrite ``buffer``."""

    @abstractmethod
    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to sum ``buffer`` over ranks; the returned function waits for this rank's chunk of the result.

        Chunks are cut by :func:`hvd_periodic.vectors.layout.chunk`.

        Args:
            buffer: this rank's values, of the same size on all ranks; not to be touched until the result is there.
            name: as in :meth:`allreduce`.
        """

    @abstractmethod
    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the concatenated buffers of all ranks, whose sizes may differ; may write them into ``out``."""

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start :meth:`allgather` of buffers of equal size; the returned function waits. By default, gather at once."""
        gathered = self.allgather(buffer, name, out)
        return lambda: gathered

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Start to send each rank its part of ``buffer``, of as many elements as ``counts`` says, part after part.

        The returned function waits for the received elements, in rank order, and their number from each rank.
        """
        told = self.allgather_object((np.array(buffer), counts), name)
        parts = [np.split(values, np.cumsum(given)[:-1])[self.rank] for values, given in told]
        return lambda: (np.concatenate(parts), [len(part) for part in parts])

    def tile(self, buffer: Any, times: int) -> Any:
        """Return ``times`` concatenated copies of a buffer; local."""
        return np.tile(buffer, times)

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum; local."""
        return x.clip(y)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to send each rank its part of ``buffer``; the returned function waits for this rank's parts of all.

        Args:
            buffer: n parts of equal size, in rank order; may be overwritten.
            name: as in :meth:`allreduce`.
        """
        everything = self.allgather(buffer, name)
        return lambda: everything.reshape(self.size, self.size, -1)[:, self.rank].reshape(-1)

    @abstractmethod
    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""

    def broadcast_object(self, value: object, name: str, root: int) -> Any:
        """Return the picklable value of rank ``root``; the values of the others are not sent."""
        return self.allgather_object(value if self.rank == root else None, name)[root]

    def send_object(self, value: object, to: int, name: str) -> dict[int, Any]:
        """Send a picklable value to one rank; return the values that ranks have sent to this one, by sender."""
        given = enumerate(self.allgather_object((to, value), name))
        return {rank: value for rank, (receiver, value) in given if receiver == self.rank}

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the integers of all ranks, in rank order, as int64; their number may differ between ranks."""
        return np.concatenate(self.allgather_object(values, name))

    def shares_memory(self) -> bool:
        """Return whether :meth:`shared_memory` is possible. Collective.

        Raises:
            RuntimeError: this communicator, or the way the job was launched, allows synchronous exchange only.
        """
        raise RuntimeError(f"{type(self).__name__} cannot exchange asynchronously")

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return memory that all ranks share. Collective.

        Raises:
            NoSharedMemoryError: there is not enough memory; on all ranks.
        """
        raise RuntimeError(f"The ranks of {type(self).__name__} share no memory")

    def messages(self) -> Messages:
        """Return a channel for messages between pairs of these ranks, separate from all others. Collective.

        Raises:
            RuntimeError: as :meth:`shares_memory`.
        """
        raise RuntimeError(f"{type(self).__name__} has no messages between two ranks")

    def begin_idle_barrier(self, number: int) -> Callable[[], int | None]:
        """Enter an idle barrier of all ranks, which may take hours.

        Args:
            number: the number that this rank waits for, above 0; 0: it takes part in any wait of the others.

        Returns:
            a function that polls: None until all ranks are there, then the number they wait for; 0 if none waits.

        Raises:
            RuntimeError: from the returned function, on all ranks: they wait for different things.
        """
        numbers = self.allgather_object(number, "hvd_periodic.assembly")
        return lambda: awaited(numbers)

    @property
    def channel(self) -> object:
        """Carrier of idle barriers: the same object for all communicators of the same ranks."""
        return self

    @property
    def namespace(self) -> Hashable:
        """Scope of the names of collectives: communicators with equal namespaces must not use the same name."""
        return id(self)

    def idle_barrier(self, number: int) -> None:
        """Wait for all ranks without occupying a core; see :meth:`begin_idle_barrier`."""
        look = self.begin_idle_barrier(number)
        while look() is None:
            time.sleep(LONG)

    def leave(self) -> None:
        """Mark the end of this process as regular, if the others would otherwise take it for dead."""
        return

    def dead_ranks(self) -> list[int]:
        """Return the dead ranks, if the others can detect them and go on."""
        return []

    def alive(self) -> bool:
        """Return whether ranks can still reach each other."""
        return True

    def abort(self) -> None:
        """End the processes of all ranks, if they are processes."""

    def wait_for_job(self) -> None:
        """Wait for all ranks of the job, if it is divided into groups that all exchange."""

    def rank_of(self, global_rank: int | None) -> int:
        """Return the rank within this set of the global rank ``global_rank``; for None, the lowest.

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
    """Return the number that ranks wait for, given the number of each rank.

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
