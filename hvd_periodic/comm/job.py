"""Common base of communicators over the ranks of a job, for any library that numbers the ranks."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvd_periodic.comm import collectives
from hvd_periodic.comm.base import Communicator, IdleCaller
from hvd_periodic.comm.collective_tracker import ASYNCHRONOUS_START, tracker_of
from hvd_periodic.comm.groups import divides_the_job
from hvd_periodic.comm.mpi import MPICommunicator, communicator_of_ranks, world_rank
from hvd_periodic.comm.peers import Peers, peers_of
from hvd_periodic.comm.stall_monitor import monitor_address
from hvd_periodic.comm.transports import LocalMemory, Messages, SharedMemory

T = TypeVar("T")


class JobCommunicator(Communicator):
    """Some ranks of a job, as its library numbers them, with a stall monitor; MPI or TCP is next to the library.

    Args:
        process_set: the ranks that exchange, as the library represents them.
        ranks: the global ranks of the set.
        rank: the global rank of this process.
        handshake_name: name of the handshake of all optimizers of these ranks; the same on all of them.

    Attributes:
        ranks: as given.
        process_set: as given.
    """

    piggyback_limit_bytes = 512 * 2**10
    shares_launcher: bool = False
    """Whether the launcher has started other jobs of the library, whose ranks have the same numbers."""
    _constructed: ClassVar[Counter[str]] = Counter()

    def __init__(self, process_set: Any, ranks: Sequence[int], rank: int, handshake_name: str) -> None:
        self.process_set, self.ranks, self.handshake_name = process_set, list(ranks), handshake_name
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self.tracker = tracker_of(handshake_name, rank, self.ranks)

    @property
    def idle_callers(self) -> Sequence[IdleCaller]:
        """The transports of the asynchronous optimizers of these ranks, with any communicator."""
        return self.tracker.idle_callers

    @idle_callers.setter
    def idle_callers(self, callers: Sequence[IdleCaller]) -> None:
        self.tracker.idle_callers = callers

    @property
    def constructed(self) -> int:
        """Number of optimizers that this process has constructed on these ranks, with any communicator."""
        return self._constructed[self.handshake_name]

    @constructed.setter
    def constructed(self, number: int) -> None:
        self._constructed[self.handshake_name] = number

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the set."""
        return self.ranks

    @property
    def namespace(self) -> Hashable:
        """One namespace per set of ranks."""
        return self.handshake_name

    def store(self) -> Any:
        """Return the store in which ranks record their arrival before the first handshake; None: the launcher's."""
        return None

    @property
    @abstractmethod
    def one_host(self) -> bool:
        """Whether all ranks of the job are on one host."""

    @abstractmethod
    def whole_job(self) -> JobCommunicator:
        """Return the communicator of all ranks of the job."""

    @abstractmethod
    def started_mpi(self) -> bool:
        """Return whether this process can use MPI next to the library, from several threads."""

    @abstractmethod
    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Return the concatenated arrays of all ranks, whose sizes may differ."""

    @abstractmethod
    def send_bytes(self, data: np.ndarray, counts: np.ndarray, name: str) -> tuple[np.ndarray, Sequence[int]]:
        """Send each rank its part, of ``counts`` bytes; return what was received, and how much from each rank."""

    def address(self) -> tuple[np.ndarray | None, Exception | None]:
        """Return the address of this process's stall monitor."""
        if self.problem is not None or self.size == 1:
            return None, self.problem
        return monitor_address(self.tracker, self.one_host, self.store, marked=not self.shares_launcher)

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Gather an array."""
        return self.gather(values, name)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Gather pickled objects of any size."""
        return collectives.gather_objects(value, self.gather, name)

    def send_object(self, value: object, to: int, name: str) -> dict[int, Any]:
        """Send a pickled object to one rank and to no other, in as many pieces as necessary."""
        data = collectives.pickled(value)
        sizes = self.gather_integers(np.array([data.size]), f"{name}.sizes")
        parts: dict[int, list[np.ndarray]] = {}
        for start in range(0, int(sizes.max()), collectives.MAX_BYTES):
            piece = data[start : start + collectives.MAX_BYTES]
            received, counts = self.send_bytes(piece, piece.size * (np.arange(self.size) == to), f"{name}.data")
            for sender, part in enumerate(np.split(received, np.cumsum(counts)[:-1])):
                if part.size:
                    parts.setdefault(sender, []).append(part)
        return {sender: pickle.loads(np.concatenate(found).data) for sender, found in parts.items()}

    def shares_memory(self) -> bool:
        """Return whether all ranks are on one host.

        Raises:
            RuntimeError: the ranks of the job may change.
        """
        return self.size == 1 or self.tracker.run_blocking(self._peers.shares_memory, ASYNCHRONOUS_START)

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return a window of shared memory."""
        if self.size == 1:
            return LocalMemory(nbytes + later)
        peers = self._peers
        return self.tracker.run_blocking(lambda: peers.shared_memory(nbytes, later), ASYNCHRONOUS_START)

    def messages(self) -> Messages:
        """Return messages over MPI, or else over TCP."""
        return self.tracker.run_blocking(self._peers.messages, ASYNCHRONOUS_START)

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        """Start to wait for all ranks outside the library, which would report a stall."""
        if self.size == 1:
            return lambda: barrier_id
        return self.tracker.begin_idle_barrier(self._peers.begin_idle_barrier(barrier_id))

    @property
    def channel(self) -> object:
        """What carries idle barriers, if there are several ranks."""
        return self if self.size == 1 else self._peers

    def leave(self) -> None:
        """Mark the end of this process as regular."""
        if self._has_peers:
            self._peers.leave()

    def dead_ranks(self) -> list[int]:
        """Return the dead ranks, which can only be detected in asynchronous training: with MPI, on one host."""
        return self._peers.dead_ranks() if self._has_peers else []

    def give_up(self, ranks: Iterable[int]) -> None:
        """Let idle barriers wait for some ranks no longer."""
        if self._has_peers:
            self._peers.give_up(ranks)

    def alive(self) -> bool:
        """Return whether MPI has not ended, if it is in use: starting it is collective, and this query is not."""
        return not self._has_peers or self._peers.alive()

    def abort(self) -> None:
        """End all processes of the job."""
        if self.size > 1:
            self._peers.abort()

    def wait_for_job(self) -> None:
        """Wait for all ranks of the job, if these are one of the groups that it is divided into."""
        if divides_the_job(self.process_set):
            everyone = self.whole_job()
            everyone.tracker.limit(self.tracker.timeout)
            with everyone.tracker.at("finalize(), for the other groups"):
                everyone.gather(np.zeros(1, np.int64), "hvd_periodic.job")

    @property
    def _has_peers(self) -> bool:
        return self.size > 1 and "_peers" in vars(self)

    @cached_property
    def _peers(self) -> MPICommunicator | Peers:
        """How these ranks reach each other outside the library: over MPI if all have it; collective among them."""
        if self.elastic:
            raise RuntimeError(
                "Asynchronous exchange needs ranks that do not change, and this job is elastic: start it without "
                "--min-np, --max-np and --host-discovery-script; or exchange synchronously"
            )
        ranks = self.allgather_object(world_rank() if self.started_mpi() else None, "hvd_periodic.mpi")
        of_mpi = [rank for rank in ranks if rank is not None]
        if len(set(of_mpi)) < len(ranks):  # Also if mpi4py was built for another MPI, in which each rank is alone.
            return peers_of(self, self.process_set, self.one_host)
        return communicator_of_ranks(of_mpi)
