"""MPI through mpi4py, for numpy arrays and for tensors in host memory; needs no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_periodic.comm.base import Communicator, awaited
from hvd_periodic.comm.hall import Hall
from hvd_periodic.comm.memory import SharedMemory
from hvd_periodic.comm.messages import Messages
from hvd_periodic.comm.objects import gather_objects
from hvd_periodic.comm.window import on_one_host, open_window
from hvd_periodic.vectors.layout import chunk

if TYPE_CHECKING:
    from mpi4py import MPI


_ABOVE_ALL = 2**31
"""Above every number of an optimizer."""

_of_ranks: dict[tuple[int, ...], MPICommunicator] = {}
"""Communicators of this process by ranks of the job: MPI has a limited number, and optimizers share them."""


class MPICommunicator(Communicator):
    """The ranks of an mpi4py communicator, duplicated so that no message of the user's is in the way.

    Args:
        comm: the ranks that exchange. Default: all of the job.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        from mpi4py import MPI  # importing it starts MPI

        self._in_place, self._operations = MPI.IN_PLACE, {"sum": MPI.SUM, "max": MPI.MAX}
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self._hall: Hall | None = None

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start a nonblocking allreduce, in place."""
        request = self._comm.Iallreduce(self._in_place, buffer, op=self._operations[op])

        def wait() -> Any:
            request.Wait()
            return buffer

        return wait

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast, in place."""
        self._comm.Bcast(buffer, root=root)
        return buffer

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start a nonblocking reduce-scatter; the result is the beginning of ``buffer``."""
        bounds = [chunk(len(buffer), rank, self.size) for rank in range(self.size)]
        counts = [stop - start for start, stop in bounds]
        request = self._comm.Ireduce_scatter(self._in_place, buffer, counts, op=self._operations["sum"])

        def wait() -> Any:
            request.Wait()
            return buffer[: counts[self.rank]]

        return wait

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into ``out``, or into a new array."""
        counts = self._comm.allgather(len(buffer))
        if out is None:
            out = np.empty(sum(counts), buffer.dtype)
        self._comm.Allgatherv(buffer, [out, counts])
        return out

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start a nonblocking gather into ``out``."""
        request = self._comm.Iallgather(buffer, out)

        def wait() -> Any:
            request.Wait()
            return out

        return wait

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start a nonblocking exchange, in place."""
        request = self._comm.Ialltoall(self._in_place, buffer)

        def wait() -> Any:
            request.Wait()
            return buffer

        return wait

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Gather pickled objects; mpi4py's own function of this name stops at 2³¹ bytes."""
        return gather_objects(value, self.allgather, name)

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Gather an array."""
        return np.asarray(self.allgather(values, name))

    def shares_memory(self) -> bool:
        """Whether all ranks are on one host."""
        return on_one_host(self._comm)

    def shared_memory(self, nbytes: int) -> SharedMemory:
        """Return a window of shared memory; from then on, ranks that die are not waited for."""
        memory = open_window(self._comm, nbytes)
        if self._hall is None:
            self._hall = Hall(open_window(self._comm, Hall.nbytes(self.size)), self.rank, self.size)
            self._comm.Barrier()
        return memory

    def messages(self) -> Messages:
        """Return those of a duplicate."""
        return Messages(self._comm.Dup())

    def assembly(self, number: int) -> Callable[[], int | None]:
        """Start a nonblocking reduction: MPI's own waiting takes a core. On one host, see :class:`Hall`."""
        if self._hall is not None:
            return self._hall.assembly(number)
        extremes = np.array([number, -number if number else -_ABOVE_ALL], dtype=np.int64)
        request = self._comm.Iallreduce(self._in_place, extremes, op=self._operations["max"])

        def look() -> int | None:
            return awaited([int(extremes[0]), int(-extremes[1]) % _ABOVE_ALL]) if request.Test() else None

        return look

    def leave(self) -> None:
        """Say that this process ends as it should, before it does."""
        if self._hall is not None:
            self._hall.leave()

    def lost(self) -> list[int]:
        """Return the ranks that have died, where that can be known."""
        return [] if self._hall is None else self._hall.lost()

    def alive(self) -> bool:
        """Whether MPI has not ended."""
        from mpi4py import MPI

        return not MPI.Is_finalized()

    def abort(self) -> None:
        """End all processes of the job."""
        self._comm.Abort(1)


def world_rank() -> int:
    """Return this process's rank in all of the job.

    Raises:
        RuntimeError: there is no mpi4py.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            f"Asynchronous exchange needs mpi4py, built for the MPI of Horovod ({error}): pip install mpi4py"
        ) from error
    return int(MPI.COMM_WORLD.Get_rank())


def communicator_of_ranks(ranks: Sequence[int]) -> MPICommunicator:
    """Return the communicator of these ranks of the job, in this order; collective among them at first.

    Raises:
        RuntimeError: mpi4py counts fewer ranks than there are.
    """
    from mpi4py import MPI

    if len(set(ranks)) < len(ranks):
        raise RuntimeError(
            "mpi4py was built for another MPI than Horovod, and knows one rank alone: install both for one MPI"
        )
    key = tuple(ranks)
    if key not in _of_ranks:
        _of_ranks[key] = MPICommunicator(MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks)))
    return _of_ranks[key]
