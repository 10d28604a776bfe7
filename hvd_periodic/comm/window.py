"""A shared MPI window: memory of one host that all its ranks address."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvd_periodic.comm.memory import SharedMemory

if TYPE_CHECKING:
    from mpi4py import MPI

_FAST = Path("/dev/shm")


class WindowMemory(SharedMemory):
    """Memory of the first rank, which the others read and write without its help.

    The locks are those of the operating system on byte ranges of a file. MPI's own, ``MPI_Win_lock``, is a loop that
    takes a core from whoever computes; and a rank that dies would hold it forever.

    Args:
        comm: ranks on one host.
        nbytes: size of the memory.
        file: descriptor of the same empty file on all ranks.
    """

    description = "a shared MPI window"

    def __init__(self, comm: MPI.Intracomm, nbytes: int, file: int) -> None:
        from mpi4py import MPI

        self._window = MPI.Win.Allocate_shared(nbytes if comm.Get_rank() == 0 else 0, 1, comm=comm)
        memory, _ = self._window.Shared_query(0)
        self.buffer = np.asarray(memory, dtype=np.uint8)[:nbytes]
        if comm.Get_rank() == 0:
            self.buffer[:] = 0
        self._file = file
        comm.Barrier()

    @contextmanager
    def lock(self, start: int, count: int = 1) -> Iterator[None]:
        """Lock bytes of the file; all at once, so that ranks never wait for each other in a circle."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, count, start)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, count, start)

    def close(self) -> None:
        """Free the window."""
        self.buffer = np.zeros(0, np.uint8)
        self._window.Free()
        os.close(self._file)


def on_one_host(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks can share memory. Collective."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = host.Get_size() == comm.Get_size()
    host.Free()
    return bool(comm.allreduce(together, op=MPI.LAND))


def open_window(comm: MPI.Intracomm, nbytes: int) -> WindowMemory:
    """Return memory that all ranks of one host share. Collective.

    Raises:
        RuntimeError: some rank cannot open the file of the locks.
    """
    first = comm.Get_rank() == 0
    file, path, problem = -1, "", None
    try:
        if first:
            file, path = tempfile.mkstemp(prefix="hvd_periodic.", dir=_FAST if _FAST.is_dir() else None)
    except OSError as error:
        problem = str(error)
    path = comm.bcast(path)
    try:
        if not first and path:
            file = os.open(path, os.O_RDWR)
    except OSError as error:
        problem = str(error)
    problems = [found for found in comm.allgather(problem) if found]
    if first and path:
        Path(path).unlink()
    if problems:
        raise RuntimeError(
            f"The ranks are on one host and cannot share a file for locks ({problems[0]}): set "
            "HVD_PERIODIC_TRANSPORT=service to do without"
        )
    return WindowMemory(comm, nbytes, file)
