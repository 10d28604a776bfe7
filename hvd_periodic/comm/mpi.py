"""MPI through mpi4py, for numpy arrays and for tensors in host memory; needs no Horovod."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np

from hvd_periodic.comm.base import Communicator, common_barrier
from hvd_periodic.comm.collective_tracker import ASYNCHRONOUS_START, tracker_of
from hvd_periodic.comm.collectives import gather_objects
from hvd_periodic.comm.mpi_messages import MPIMessages
from hvd_periodic.comm.shared_memory import SPARE_BYTES_PER_RANK, LivenessBarrier, WindowMemory, open_window
from hvd_periodic.comm.stall_monitor import monitor_address
from hvd_periodic.comm.stall_protocol import stable_hash
from hvd_periodic.comm.transports import Messages, SharedMemory
from hvd_periodic.vectors.layout import chunk

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")

_YIELDS = "OMPI_MCA_mpi_yield_when_idle"
"""Environment variable that tells Open MPI to yield its core while it waits."""

_LARGE = 2**17
"""Bytes from which on a thread runs a collective: it takes longer than to wake the thread."""

_ABOVE_ALL = 2**31
"""Greater than the id of any barrier."""

_of_ranks: dict[tuple[int, ...], MPICommunicator] = {}
"""Communicators of this process by ranks of the job: MPI supports a limited number, so optimizers share them."""

_watched: Counter[tuple[int, ...]] = Counter()
"""Number of watched communicators, by ranks of the job; the same on all of these ranks."""


class _Mover:
    """A thread that runs blocking collectives one after the other, over an mpi4py communicator of its own.

    MPI moves the data of nonblocking collectives only while a process is inside of MPI, so that nothing would travel
    during local steps. Open MPI's nonblocking reductions also send more: the whole buffer to one rank and back.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._calls = comm, SimpleQueue[tuple[Future[None], str, tuple[Any, ...], dict[str, Any]] | None]()
        self._thread: threading.Thread | None = None

    def begin(self, collective: str, *arguments: Any, **options: Any) -> Future[None]:
        """Run a collective after those that have begun before."""
        if self._thread is None:
            # A daemon: an error ends the process although other ranks never come.
            self._thread = threading.Thread(target=self._run, name="hvd_periodic.mpi", daemon=True)
            self._thread.start()
        future = Future[None]()
        self._calls.put((future, collective, arguments, options))
        return future

    def end(self) -> None:
        """End the thread, once nothing is under way."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, collective, arguments, options = call
            try:
                getattr(self._comm, collective)(*arguments, **options)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del call, arguments, future


class MPICommunicator(Communicator):
    """The ranks of an mpi4py communicator, which is duplicated to keep the user's messages separate.

    Where MPI has ``MPI_THREAD_MULTIPLE``, a thread runs large collectives, which so move data during local steps.

    Args:
        comm: the ranks that exchange. Default: all of the job.
        watched: whether to name missing ranks; not needed if another communicator does.
    """

    description = "MPI"
    piggyback_limit_bytes = 512 * 2**10

    def __init__(self, comm: MPI.Intracomm | None = None, watched: bool = True) -> None:
        from mpi4py import MPI  # importing it starts MPI

        if comm == MPI.COMM_NULL:
            raise ValueError(
                "`process_set` must contain this rank: construct the optimizer only on the ranks of the communicator. "
                "Received: MPI.COMM_NULL"
            )

        self._in_place, self._operations = MPI.IN_PLACE, {"sum": MPI.SUM, "max": MPI.MAX}
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._mover: _Mover | None = None
        if self._comm.Get_size() > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._mover = _Mover(self._comm.Dup())
            weakref.finalize(self, self._mover.end).atexit = False
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.host = stable_hash(socket.gethostname())
        self._given, self._liveness = comm, cast("LivenessBarrier | None", None)
        self._ranks = _in_the_job(self._comm)
        self._watched = watched and self.size > 1
        if self._watched:
            ranks = tuple(self._ranks)
            _watched[ranks] += 1
            name = f"hvd_periodic.mpi.{stable_hash(str(ranks))}.{_watched[ranks]}"
            self.tracker = tracker_of(name, ranks[self.rank], ranks)

    @classmethod
    def over(cls, comm: MPI.Intracomm | None = None) -> Self:
        """Return the communicator over ``comm`` that all optimizers of this process share; collective at first.

        MPI limits the number of communicators, and optimizers of the same ranks share their handshakes.

        Args:
            comm: as for the class.
        """
        from mpi4py import MPI

        given = MPI.COMM_WORLD if comm is None else comm
        if given == MPI.COMM_NULL:
            return cls(given)
        shared: dict[type, Self] = cast("dict[type, Self] | None", given.Get_attr(_key())) or {}
        if cls not in shared:
            shared[cls] = cls(comm)
            given.Set_attr(_key(), shared)
        return shared[cls]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None:
            raise RuntimeError(
                "An optimizer over an mpi4py.MPI.Comm cannot be pickled or copied: save its state_dict() instead"
            )
        return type(self).over, ()

    @property
    def global_ranks(self) -> list[int]:
        """The ranks in ``MPI.COMM_WORLD``."""
        return self._ranks

    def address(self) -> tuple[np.ndarray | None, Exception | None]:
        """Return the address of this process's stall monitor."""
        if not self._watched or self.problem is not None:
            return None, self.problem
        on_this_host = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
        one_host = on_this_host == os.environ.get("OMPI_COMM_WORLD_SIZE", "0")
        address, failure = monitor_address(self.tracker, one_host)
        if failure is None:
            _abort_on_error()
        return address, failure

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start an allreduce, in place."""
        return self._begin("Allreduce", buffer.nbytes, buffer, self._in_place, buffer, op=self._operations[op])

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast, in place."""
        return self._begin("Bcast", buffer.nbytes, buffer, _known(buffer), root=root)()

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start a reduce-scatter; the result is the beginning of ``buffer``."""
        bounds = [chunk(len(buffer), rank, self.size) for rank in range(self.size)]
        counts = [stop - start for start, stop in bounds]
        result, total = buffer[: counts[self.rank]], self._operations["sum"]
        return self._begin("Reduce_scatter", buffer.nbytes, result, self._in_place, buffer, counts, op=total)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into ``out``, or into a new array."""
        counts = np.empty(self.size, np.int64)
        self._begin("Allgather", 0, counts, np.array([len(buffer)]), counts)()
        if out is None:
            out = np.empty(counts.sum(), buffer.dtype)
        sent, received = _known(buffer), _known(out)
        counts *= len(received) // len(out) if len(out) else 1
        return self._begin("Allgatherv", out.nbytes, out, sent, [received, counts.tolist()])()

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to gather into ``out``."""
        return self._begin("Allgather", out.nbytes, out, buffer, out)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start an exchange, in place."""
        return self._begin("Alltoall", buffer.nbytes, buffer, self._in_place, buffer)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Gather pickled objects; mpi4py's own function of this name is limited to 2³¹ bytes."""
        return gather_objects(value, self.allgather, name)

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Gather an array."""
        return np.asarray(self.allgather(values, name))

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Raise a ValueError for tensors on another device than the CPU."""
        for kind in sorted(set(kinds) - {"cpu"}):
            raise ValueError(
                f"MPICommunicator carries no tensors of a {kind} device, and part of the model is on one: pass its "
                "mpi4py.MPI.Comm as `process_set` instead, so that they travel through host memory"
            )

    def shares_memory(self) -> bool:
        """Return whether all ranks are on one host."""
        return self.tracker.run_blocking(lambda: _on_one_host(self._comm), ASYNCHRONOUS_START)

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return a window of shared memory; from then on, idle barriers do not wait for dead ranks."""

        def window(size: int, later: int = 0) -> WindowMemory:
            return open_window(self.rank, self._comm.allgather, size, SPARE_BYTES_PER_RANK * self.size, later)

        def opened() -> SharedMemory:
            memory = window(nbytes, later)
            if self._liveness is None:
                self._liveness = LivenessBarrier(window(LivenessBarrier.nbytes(self.size)), self.rank, self.size)
                self._comm.Barrier()
            return memory

        return self.tracker.run_blocking(opened, ASYNCHRONOUS_START)

    def messages(self) -> Messages:
        """Return messages over a duplicate of the communicator."""
        return MPIMessages(self.tracker.run_blocking(self._comm.Dup, ASYNCHRONOUS_START))

    def begin_idle_barrier(self, barrier_id: int) -> Callable[[], int | None]:
        """Enter the :class:`LivenessBarrier`, if any; else start a nonblocking reduction: MPI would wait on a core."""
        if self._liveness is not None:
            return self.tracker.begin_idle_barrier(self._liveness.begin(barrier_id))
        extremes = np.array([barrier_id, -barrier_id if barrier_id else -_ABOVE_ALL], dtype=np.int64)
        request = self._comm.Iallreduce(self._in_place, extremes, op=self._operations["max"])

        def poll() -> int | None:
            return common_barrier([int(extremes[0]), int(-extremes[1]) % _ABOVE_ALL]) if request.Test() else None

        return self.tracker.begin_idle_barrier(poll)

    def leave(self) -> None:
        """Mark the end of this process as regular, before it ends."""
        if self._liveness is not None:
            self._liveness.leave()

    def dead_ranks(self) -> list[int]:
        """Return the dead ranks, if they can be detected."""
        return [] if self._liveness is None else self._liveness.dead_ranks()

    def give_up(self, ranks: Iterable[int]) -> None:
        """Let idle barriers wait for some ranks no longer, if these are on one host."""
        if self._liveness is not None:
            self._liveness.give_up(ranks)

    @property
    def busy_waits(self) -> bool:  # type: ignore[override]
        """Whether Open MPI spins while it waits, and this host has no spare cores for that."""
        return self._mover is not None and open_mpi_spins(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")))

    def alive(self) -> bool:
        """Return whether MPI has not ended."""
        from mpi4py import MPI

        return not MPI.Is_finalized()

    def abort(self) -> None:
        """End all processes of the job."""
        self._comm.Abort(1)

    def _begin(self, collective: str, nbytes: int, result: T, *arguments: Any, **options: Any) -> Callable[[], T]:
        """Start a collective of mpi4py; return a function that waits for it and returns its result.

        Args:
            collective: its name, without the ``I`` of nonblocking ones.
            nbytes: its size, the same on all ranks.
            result: what it fills.
            *arguments: those of mpi4py.
            **options: likewise.
        """
        number = self.tracker.start_collective()
        if self._mover is None or nbytes < _LARGE:
            request = getattr(self._comm, f"I{collective.lower()}")(*arguments, **options)

            def finish() -> T:
                self.tracker.wait_for(number, request.Test, longest=0.0)  # MPI moves data while it is polled.
                return result

        else:
            future = self._mover.begin(collective, *arguments, **options)

            def finish() -> T:
                self.tracker.wait_for(number, future.done)
                future.result()
                return result

        return finish


def open_mpi_spins(ranks_of_host: int) -> bool:
    """Return whether Open MPI spins while it waits, and this host has no spare cores for that."""
    yields = os.environ.get(_YIELDS, "0").lower() not in ("0", "false", "no")
    return "OMPI_COMM_WORLD_SIZE" in os.environ and not yields and len(os.sched_getaffinity(0)) < 2 * ranks_of_host


@cache
def _key() -> int:
    """Return the key under which an mpi4py communicator keeps those of this package."""
    from mpi4py import MPI

    return int(MPI.Comm.Create_keyval())


def _known(buffer: Any) -> Any:
    """Return an array of 16-bit numbers, for which MPI has no type, as bytes; others as they are."""
    if isinstance(buffer, np.ndarray) and buffer.dtype.itemsize == 2 and buffer.dtype.kind in "fV":
        return buffer.view(np.uint8)
    return buffer


def _on_one_host(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks can share memory. Collective."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = host.Get_size() == comm.Get_size()
    host.Free()
    return bool(comm.allreduce(together, op=MPI.LAND))


def _in_the_job(comm: MPI.Intracomm) -> list[int]:
    """Return the global ranks of a communicator; its own ranks, if some belong to another job."""
    from mpi4py import MPI

    own = list(range(comm.Get_size()))
    found = list(MPI.Group.Translate_ranks(comm.Get_group(), own, MPI.COMM_WORLD.Get_group()))
    return own if MPI.UNDEFINED in found else found


@cache
def _abort_on_error() -> None:
    """Make an error that ends this process end the job: MPI's own shutdown would wait for all ranks forever."""
    atexit.register(_abort_after_error)


def _abort_after_error() -> None:
    from mpi4py import MPI

    if getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1") and not MPI.Is_finalized():
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def is_started() -> bool:
    """Return whether this process has started MPI through mpi4py, as one of several ranks."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.Get_size() > 1)


def world_numbering() -> tuple[int, int]:
    """Return this process's rank in the whole job, and the number of ranks, as MPI numbers them."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def world_rank() -> int | None:
    """Return this process's rank in the whole job; None if mpi4py cannot be imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # A RuntimeError: there is no library of MPI.
        return None
    return int(MPI.COMM_WORLD.Get_rank())


def communicator_of_ranks(ranks: Sequence[int]) -> MPICommunicator:
    """Return the communicator of these ranks of the job, in this order; the first call is collective among them."""
    key = tuple(ranks)
    if key not in _of_ranks:
        _of_ranks[key] = MPICommunicator(group_of_ranks(ranks), watched=False)  # The caller's communicator is watched.
    return _of_ranks[key]


def group_of_ranks(ranks: Sequence[int]) -> MPI.Intracomm:
    """Return an mpi4py communicator of some ranks of the job, on the others ``MPI.COMM_NULL``; collective."""
    from mpi4py import MPI

    if list(ranks) == list(range(MPI.COMM_WORLD.Get_size())):
        return MPI.COMM_WORLD
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    if MPI.COMM_WORLD.Get_rank() not in ranks:
        return cast("MPI.Intracomm", MPI.COMM_NULL)
    return MPI.COMM_WORLD.Create_group(group)
