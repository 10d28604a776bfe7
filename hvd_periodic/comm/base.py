"""Base class of all communicators: the collectives, and what the library has to know about the ranks and their job."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from hvd_periodic.arguments import require_int
from hvd_periodic.comm.agreement import raise_on_all
from hvd_periodic.comm.collective_tracker import CollectiveTracker, NullTracker
from hvd_periodic.comm.collectives import Collectives
from hvd_periodic.comm.handshake import Purpose, Record, called, describe_conflict, integers, unpack_records
from hvd_periodic.comm.transports import LONG, Messages, SharedMemory
from hvd_periodic.ranks import named
from hvd_periodic.spellings import rename_members

T = TypeVar("T")


class Communicator(Collectives):
    """The ranks that exchange: their :class:`~hvd_periodic.comm.collectives.Collectives`, and their job.

    A subclass has to define the collectives only. What this class adds is what the library knows about the ranks beyond
    moving data: their names, process sets, liveness and elasticity, and the transports of asynchronous exchange. Every
    member has a default, which holds for ranks that are numbered from 0, do not change, and exchange synchronously.
    Communicators over the ranks of a job override them: see :class:`~hvd_periodic.comm.job.JobCommunicator`.

    Attributes:
        processes: whether each rank is a separate process.
    """

    processes: ClassVar[bool] = True
    constructed: int = 0
    """Number of optimizers that this process has constructed on these ranks."""
    elastic: bool = False
    """Whether membership may change: other ranks may not be under construction at the same time."""
    between_islands: bool = False
    """Whether each of these ranks leaves and joins together with the other ranks of an island: see :meth:`settle`."""
    host: int = 0
    """A number that the ranks of one host share."""
    handshake_name: str = "hvd_periodic.meeting"
    """Name of the handshake, shared by all optimizers of these ranks."""
    training: str = ""
    """Name of the training of these ranks, if the launcher's job has several that number ranks alike; else empty."""
    problem: Exception | None = None
    """The error, if any, that keeps this rank from training in this job: the handshake tells all ranks."""
    tracker: CollectiveTracker = NullTracker()
    """Tracker of this rank's collectives, which the stall monitor reads; it records nothing if ranks are not
    processes."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        rename_members(cls, **_FORMER)

    # The handshake, and names

    def handshake(
        self, record: Record, failure: Exception | None = None, piggyback: np.ndarray | None = None
    ) -> tuple[list[Record], list[np.ndarray]]:
        """Gather a record from each rank; return the records and the piggybacked integers, in rank order. Collective.

        All ranks of :attr:`handshake_group` take part. All their optimizers use one name for handshakes, whatever the
        call. Ranks that wait in different calls therefore find out, instead of waiting forever. Where some may wait in
        an idle barrier instead, all come to one first.

        Args:
            record: this rank's record.
            failure: the error that keeps this rank from going on, if ``record.problem`` is set.
            piggyback: integers to send along with the record.

        Raises:
            Exception: ``failure``, on this rank.
            RuntimeError: another rank cannot go on, or ranks are in conflicting calls; on all ranks.
        """
        piggyback = np.empty(0, np.int64) if piggyback is None else piggyback
        group = self.handshake_group
        group.tracker.last_record = record
        own = np.array(integers(replace(record, piggyback_length=piggyback.size)), np.int64)
        message = np.concatenate([own, piggyback])
        with group.call_of_all() if group.idle_callers else nullcontext():
            if group.idle_callers:
                with group.tracker.at(record.place, idle=False):
                    group.wait_for_all(barrier_id(Purpose(record.purpose), record.optimizer, handshake=True))
            gathered = group.gather_integers(message, group.handshake_name)
        records, piggybacks = unpack_records(gathered)
        group.tracker.last_records = records
        conflict = describe_conflict(records, group.global_ranks)
        if conflict or any(record.problem for record in records):
            raise_on_all(group, group.handshake_name, failure)
        if conflict:
            raise RuntimeError(conflict)
        return records, piggybacks

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
        records, addresses = self.handshake(record, failure, address)
        self.tracker.set_peers(addresses)
        number = 1 + max(record.optimizer for record in records)
        self.constructed = number - provisional
        return f"{self.handshake_name.removesuffix('meeting')}{number}"

    def address(self) -> tuple[np.ndarray | None, Exception | None]:
        """Return the address of this process's stall monitor; or the error that keeps this rank from going on."""
        return None, self.problem

    @property
    def namespace(self) -> Hashable:
        """Scope of the names of collectives: communicators with equal namespaces must not use the same name."""
        return id(self)

    # The set of ranks

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the set."""
        return list(range(self.size))

    @property
    def global_rank(self) -> int:
        """Global rank of this process, which messages use to name it."""
        return self.global_ranks[self.rank]

    def rank_of(self, global_rank: int | None) -> int:
        """Return the rank within this set of the global rank ``global_rank``; for None, the first.

        Raises:
            TypeError: it is not an int.
            ValueError: it is not in the set.
        """
        if global_rank is None:
            return 0
        ranks = self.global_ranks
        if require_int(global_rank, "`root_rank`", minimum=0) not in ranks:
            raise ValueError(f"`root_rank` must be one of {named(ranks)} of the set. Received: {global_rank!r}")
        return ranks.index(global_rank)

    def check(self) -> None:
        """Raise on all ranks if they disagree about the members of the set. Collective."""

    idle_callers: Sequence[IdleCaller] = ()
    """The transports of the asynchronous optimizers of these ranks, which may wait for each other in idle barriers."""

    @property
    def handshake_group(self) -> Communicator:
        """The ranks that share the handshakes of these: more than these if groups exchange in lockstep."""
        return self

    def select(self, of_all: Sequence[T]) -> list[T]:
        """Return the items of these ranks, given the items of all ranks of :attr:`handshake_group`."""
        return list(of_all)

    # Liveness and elasticity

    def rebuild(self, everyone: Communicator) -> Communicator:
        """Return the replacement of this communicator after the ranks of the job have changed; local."""
        return everyone

    def changed(self) -> str | None:
        """Return how the job has changed since construction, which makes these ranks invalid; None if it has not."""
        return None

    def settle(self, alike: str = "") -> None:
        """Raise an error if communication between islands has failed for another rank of this rank's island.

        The ranks of an island of an elastic job call this together, after all communication between islands; for other
        ranks, it does nothing.

        Args:
            alike: a text that has to be equal on the ranks of the island.

        Raises:
            RanksLostError: a rank of this island has lost a rank of another.
            RuntimeError: the ranks of this island differ; on all of them.
        """

    def dead_ranks(self) -> list[int]:
        """Return the dead ranks, if the others can detect them and go on."""
        return []

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait for some ranks no longer, which count as dead from now on, where dead ranks can be detected."""

    def alive(self) -> bool:
        """Return whether ranks can still reach each other."""
        return True

    def leave(self) -> None:
        """Mark the end of this process as regular, if the others would otherwise take it for dead."""
        return

    def abort(self) -> None:
        """End the processes of all ranks, if they are processes."""

    def wait_for_job(self) -> None:
        """Wait for all ranks of the job, if it is divided into groups that all exchange."""

    # Asynchronous exchange

    def shares_memory(self) -> bool:
        """Return whether :meth:`shared_memory` is possible. Collective.

        Raises:
            RuntimeError: this communicator, or the way the job was launched, allows synchronous exchange only.
        """
        raise RuntimeError(f"{type(self).__name__} cannot exchange asynchronously")

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return memory that all ranks share. Collective.

        Args:
            nbytes: its size.
            later: so many more bytes follow, which have no memory until a rank reserves some for them.

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

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        """Enter an idle barrier of all ranks, which may take hours.

        Args:
            barrier_id: as :func:`barrier_id` returns it, for the call that this rank waits in; 0: it takes part in any
                barrier of the others.

        Returns:
            a function that polls: None until all ranks have arrived, then the id they wait for; 0 if none waits.

        Raises:
            RuntimeError: from the returned function, on all ranks: they wait for different optimizers, or in
                different calls.
        """
        ids = self.allgather_object(barrier_id, "hvd_periodic.assembly")
        return lambda: common_barrier(ids)

    @contextmanager
    def call_of_all(self, besides: IdleCaller | None = None) -> Iterator[None]:
        """Let no round wait for this rank inside a ``with`` block, in which it waits for all others in another call.

        Args:
            besides: the transport of the optimizer whose call this is, if its own rounds do wait for this rank.
        """
        callers = [each for each in self.idle_callers if each is not besides]
        for each in callers:
            each.apart(True)
        try:
            yield
        finally:
            for each in callers:
                each.apart(False)

    def wait_for_all(self, barrier_id: int) -> None:
        """Wait in an idle barrier; if ranks are in different calls, until all of them come to rounds again.

        Raises:
            DifferentCallsError: ranks are in different calls; on all of them.
        """
        try:
            self.idle_barrier(barrier_id)
        except DifferentCallsError:
            for each in self.idle_callers:
                each.stay_out(False)
            self.idle_barrier(0)
            raise

    def idle_barrier(self, barrier_id: int) -> int:
        """Wait for all ranks without occupying a core; return what the function of :meth:`begin_idle_barrier` does."""
        poll = self.begin_idle_barrier(barrier_id)
        while (number := poll()) is None:
            time.sleep(LONG)
        return number

    @property
    def channel(self) -> object:
        """Carrier of idle barriers: the same object for all communicators of the same ranks."""
        return self


_FORMER = {
    "encloses": "piggyback_limit_bytes",
    "waits_busily": "busy_waits",
    "meeting_name": "handshake_name",
    "attendance": "tracker",
    "introduction": "address",
    "meets_with": "handshake_group",
    "among": "select",
    "anew": "rebuild",
    "repeated": "tile",
    "larger": "maximum",
    "pass_object": "send_object",
    "assembly": "begin_idle_barrier",
    "assemble": "idle_barrier",
    "lost": "dead_ranks",
}
"""Names of version 0.1."""

rename_members(Communicator, **_FORMER)


class DifferentCallsError(RuntimeError):
    """Ranks have met in an idle barrier in different calls; raised on all of them."""


class IdleCaller(Protocol):
    """The transport of an optimizer whose ranks may wait in idle barriers."""

    def apart(self, starts: bool) -> None:
        """Note that this rank is in another call, in which it waits for all others, or no longer."""

    def stay_out(self, starts: bool) -> None:
        """Note that this rank comes to no round from now on, though it lives, or again."""


_HANDSHAKES = 2**30
"""What numbers of barriers before a handshake have in addition; those of all other calls are below."""


def barrier_id(purpose: Purpose, optimizer: int, handshake: bool = False) -> int:
    """Return a number above 0 for a call, given the number of its optimizer.

    Args:
        purpose: the call.
        optimizer: the number of the optimizer.
        handshake: a handshake follows, which finds conflicts with others of its kind.

    Example:
        >>> barrier_id(Purpose.LEAVE, 1), barrier_id(Purpose.ADOPT, 1), barrier_id(Purpose.LEAVE, 2)
        (16, 24, 29)
    """
    return optimizer * len(Purpose) + purpose + _HANDSHAKES * handshake


def common_barrier(ids: Sequence[int]) -> int:
    """Return the id that ranks wait for in an idle barrier, given the barrier ids of all ranks.

    Raises:
        DifferentCallsError: they wait for different optimizers, or in different calls.

    Example:
        >>> common_barrier([2, 0, 2])
        2
    """
    waiting = sorted({number for number in ids if number})
    if len(waiting) > 1 and waiting[0] < _HANDSHAKES:
        calls = [
            called(Purpose(each % len(Purpose)), each // len(Purpose)) for each in (n % _HANDSHAKES for n in waiting)
        ]
        raise DifferentCallsError(
            f"Ranks are in different calls: {'; '.join(calls)}. All ranks must make the same calls in the same order"
        )
    return waiting[0] if waiting else 0
