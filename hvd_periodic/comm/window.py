"""Memory that all ranks of one host share."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvd_periodic.comm.memory import NoSharedMemoryError, SharedMemory

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Folder whose files are in memory."""

SPARE_BYTES_PER_RANK = 4 * 2**20
"""Bytes left free for every rank. Open MPI keeps a file of 4 MiB per rank in the same folder for its own messages; the
file is sparse, and if the folder is full, the first access to one of its new pages ends the process."""


_LIVENESS_LOCKS = 2**40
"""First of the locks that a process holds for as long as it lives."""


class WindowMemory(SharedMemory):
    """A file in memory, which all ranks of a host map.

    Locks are the operating system's locks on byte ranges of the same file. MPI windows are not used: ``MPI_Win_lock``
    is a loop that takes a core from ranks that compute, a dead rank would hold the lock forever, and without room for
    a window, access to its memory ends the process.

    Args:
        file: descriptor of the file, which has its full size; closed at the end.
    """

    description = "a window of shared memory"

    def __init__(self, file: int) -> None:
        self._file = file
        self.buffer = np.frombuffer(mmap.mmap(file, 0), dtype=np.uint8)

    @contextmanager
    def lock(self, start: int, count: int = 1) -> Iterator[None]:
        """Lock bytes of the file, all at once, so that ranks cannot deadlock."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, count, start)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, count, start)

    def hold_liveness_lock(self, number: int) -> None:
        """Hold the lock of a seat until this process ends or closes the memory."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _LIVENESS_LOCKS + number)

    def is_alive(self, number: int) -> bool:
        """Return whether another process holds such a lock; True also at the moment when another process asks."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LIVENESS_LOCKS + number)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LIVENESS_LOCKS + number)
        return False

    def close(self) -> None:
        """Unmap the file, which disappears with the last rank."""
        self.buffer = np.zeros(0, np.uint8)
        os.close(self._file)


def on_one_host(comm: MPI.Intracomm) -> bool:
    """Return whether all ranks can share memory. Collective."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = host.Get_size() == comm.Get_size()
    host.Free()
    return bool(comm.allreduce(together, op=MPI.LAND))


def open_window(comm: MPI.Intracomm, nbytes: int) -> WindowMemory:
    """Return memory that all ranks of one host share, initially zero. Collective.

    The file is unlinked before it gets its size: however the ranks end, nothing of it remains.

    Raises:
        NoSharedMemoryError: there is no room for it, or some rank cannot open the file; on all ranks.
    """
    first = comm.Get_rank() == 0
    file, path, problem = -1, "", ""
    try:
        if first:
            file, path = tempfile.mkstemp(prefix="hvd_periodic.", dir=FOLDER)
    except OSError as error:
        problem = str(error)
    path = comm.bcast(path)
    try:
        if path and not first:
            file = os.open(path, os.O_RDWR)
    except OSError as error:
        problem = str(error)
    problem = _first_problem(comm, problem)
    if path and first:
        Path(path).unlink()
    try:
        if first and not problem:
            _reserve(file, nbytes, SPARE_BYTES_PER_RANK * comm.Get_size())
    except OSError as error:
        problem = str(error)
    problem = _first_problem(comm, problem)
    if problem:
        if file >= 0:
            os.close(file)
        raise NoSharedMemoryError(problem)
    return WindowMemory(file)


def _reserve(file: int, nbytes: int, spare: int) -> None:
    """Allocate all memory of a file now, filled with zeros: a shortage raises here, and ends no process later.

    Raises:
        OSError: there is not enough for it and ``spare`` more bytes.
    """
    system = os.fstatvfs(file)
    free = system.f_bavail * system.f_frsize
    try:
        os.posix_fallocate(file, 0, nbytes + spare)
    except OSError as error:
        raise OSError(
            f"it needs {nbytes / 2**20:.1f} MiB in {FOLDER} and {spare / 2**20:.0f} MiB to spare for MPI, and "
            f"{free / 2**20:.1f} MiB are free ({error.strerror})"
        ) from error
    os.ftruncate(file, nbytes)


def _first_problem(comm: MPI.Intracomm, problem: str) -> str:
    return next((f"rank {rank}: {found}" for rank, found in enumerate(comm.allgather(problem)) if found), "")
