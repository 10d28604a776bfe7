"""MPI through mpi4py, for numpy arrays and for tensors in host memory; needs no Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.layout import chunk

if TYPE_CHECKING:
    from mpi4py import MPI


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

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Gather pickled objects."""
        return list(self._comm.allgather(value))
