"""Memory that all ranks of one host share, and a barrier in it that detects dead ranks."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from hvd_periodic.comm.base import common_barrier
from hvd_periodic.comm.transports import RECORD, Gather, NoSharedMemoryError, SharedMemory

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Folder whose files are in memory."""

SPARE_BYTES_PER_RANK = 4 * 2**20
"""Bytes left free for every rank. Open MPI keeps a file of 4 MiB per rank in the same folder for its own messages; the
file is sparse, and if the folder is full, the first access to one of its new pages ends the process."""

_PAGE = mmap.ALLOCATIONGRANULARITY
"""Bytes."""

_PART = 2**18
"""Bytes of the log that are read at once."""

_LOG_BYTES = 2**20
"""Bytes left free for a log, which takes less as long as it is forgotten."""

_LIVENESS_LOCKS = 2**40
"""Number of the first liveness lock. A process holds one for as long as it lives."""

_ID_BITS = 32
"""Low bits of a word of a barrier, which hold its id; the bits above hold how many barriers a rank has entered."""


class WindowMemory(SharedMemory):
    """A file in memory, which all ranks of a host map.

    Locks are the operating system's locks on byte ranges of the same file. MPI windows are not used: ``MPI_Win_lock``
    is a loop that takes a core from ranks that compute, a dead rank would hold the lock forever, and without room for
    a window, access to its memory ends the process.

    The log follows the memory in the file. POSIX makes finding the end of a file and writing there one step if it is
    open with ``O_APPEND``. No record crosses a page, so that a process that is killed has written all of it or nothing.

    Args:
        file: descriptor of the file, which has its full size; closed at the end.
        nbytes: this size, a number of pages; not all of them need to have memory.
    """

    description = "a window of shared memory"

    def __init__(self, file: int, nbytes: int) -> None:
        self._file, self._nbytes, self._forgotten = file, nbytes, 0
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        self.buffer = np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)

    def reserve(self, start: int, stop: int) -> bool:
        """Allocate part of the file."""
        try:
            os.posix_fallocate(self._file, start, stop - start)
        except OSError:
            return False
        return True

    def try_lock(self, number: int) -> bool:
        """Lock a byte of the file if no other process does."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True

    def unlock(self, number: int) -> None:
        """Unlock a byte of the file."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def append(self, record: list[int]) -> None:
        """Write at the end of the file.

        Raises:
            OSError: the folder is full.
        """
        try:
            os.write(self._file, np.array(record, np.int64).tobytes())
        except OSError as error:
            raise OSError(
                error.errno,
                f"Asynchronous exchange in shared memory needs a few pages that are free in {FOLDER}: make room there, "
                f"or set HVD_PERIODIC_TRANSPORT=service. Received: {error.strerror}",
            ) from error

    def records(self, start: int) -> list[list[int]]:
        """Read part of the file."""
        found = os.pread(self._file, _PART, self._nbytes + 8 * RECORD * start)
        whole = len(found) // (8 * RECORD)
        records: list[list[int]] = np.frombuffer(found, np.int64, whole * RECORD).reshape(-1, RECORD).tolist()
        return records

    def forget(self, stop: int) -> None:
        """Remove pages from the file, which reads as zeros there."""
        # A mapping has a descriptor of its own, and closing any descriptor of a file releases all of a process's locks.
        end = 8 * RECORD * stop // _PAGE * _PAGE
        if end > self._forgotten and hasattr(mmap, "MADV_REMOVE"):
            start, self._forgotten = self._forgotten, end
            with suppress(OSError), mmap.mmap(self._file, end - start, offset=self._nbytes + start) as pages:
                pages.madvise(mmap.MADV_REMOVE)

    def hold_liveness_lock(self, rank: int) -> None:
        """Hold a rank's liveness lock until this process ends or closes the memory."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _LIVENESS_LOCKS + rank)

    def is_alive(self, rank: int) -> bool:
        """Return whether another process holds a liveness lock; True also while another process calls this."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LIVENESS_LOCKS + rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LIVENESS_LOCKS + rank)
        return False

    def close(self) -> None:
        """Unmap the file, which the system deletes when the last rank has closed it."""
        self.buffer = np.zeros(0, np.uint8)
        os.close(self._file)


def shares_folder(rank: int, gather: Gather) -> bool:
    """Return whether all ranks can open the same file in memory. Collective."""
    path, token = "", secrets.token_bytes(16)
    if rank == 0:
        with suppress(OSError):
            file, path = tempfile.mkstemp(prefix="hvd_periodic.", dir=FOLDER)
            os.write(file, token)
            os.close(file)
    path, token = gather((path, token))[0]
    try:
        found = Path(path).read_bytes() == token
    except OSError:
        found = False
    together = all(gather(found))
    if rank == 0 and path:
        Path(path).unlink()
    return together


def open_window(rank: int, gather: Gather, nbytes: int, spare: int, later: int = 0) -> WindowMemory:
    """Return memory that all ranks of one host share, initially zero. Collective.

    The file is unlinked before it gets its size: however the ranks end, nothing of it remains.

    Args:
        rank: this rank.
        gather: the collective through which the name of the file travels.
        nbytes: size.
        spare: bytes that must be left.
        later: bytes that follow, and have no memory yet.

    Raises:
        NoSharedMemoryError: there is no room for it, or some rank cannot open the file; on all ranks.
    """
    first, size = rank == 0, -(-(nbytes + later) // _PAGE) * _PAGE
    file, path, problem = -1, "", ""
    try:
        if first:
            file, path = tempfile.mkstemp(prefix="hvd_periodic.", dir=FOLDER)
    except OSError as error:
        problem = str(error)
    path = gather(path)[0]
    try:
        if path and not first:
            file = os.open(path, os.O_RDWR)
    except OSError as error:
        problem = str(error)
    problem = _first_problem(gather(problem))
    if path and first:
        Path(path).unlink()
    try:
        if first and not problem:
            _reserve(file, nbytes, spare)
            os.ftruncate(file, size)
    except OSError as error:
        problem = str(error)
    problem = _first_problem(gather(problem))
    if problem:
        if file >= 0:
            os.close(file)
        raise NoSharedMemoryError(problem)
    return WindowMemory(file, size)


def _reserve(file: int, nbytes: int, spare: int) -> None:
    """Allocate all memory of a file now, filled with zeros: a shortage raises here, and ends no process later.

    Raises:
        OSError: there is not enough for it, a log and ``spare`` more bytes.
    """
    system = os.fstatvfs(file)
    free = system.f_bavail * system.f_frsize
    try:
        os.posix_fallocate(file, 0, nbytes + _LOG_BYTES + spare)
    except OSError as error:
        raise OSError(
            f"it needs {(nbytes + _LOG_BYTES) / 2**20:.1f} MiB in {FOLDER} and {spare / 2**20:.0f} MiB to spare for "
            f"MPI, and {free / 2**20:.1f} MiB are free ({error.strerror})"
        ) from error
    os.ftruncate(file, nbytes)


def _first_problem(problems: list[str]) -> str:
    return next((f"rank {rank}: {found}" for rank, found in enumerate(problems) if found), "")


class LivenessBarrier:
    """Idle barrier of the ranks of one host, which needs no MPI and does not wait for dead ranks.

    Every rank holds a liveness lock, which the operating system releases however the process ends. MPI's collectives
    would wait forever for a dead rank.

    A rank has two words, which it uses in turn, for the id of the barrier it waits in: it enters the next barrier but
    one only after all ranks have entered the next, when none of them still reads the word. A third word marks a regular
    end.

    Args:
        memory: shared memory of :meth:`nbytes` bytes, which all ranks have opened.
        rank: this rank, whose liveness lock is held from now on; all ranks must hold theirs before any of them calls a
            method.
        size: number of ranks.
    """

    def __init__(self, memory: WindowMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._words = memory.buffer[: self.nbytes(size)].view(np.int64).reshape(size, 3)
        self._entered = 0
        self._ended: set[int] = set()
        memory.hold_liveness_lock(rank)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that ``size`` ranks need."""
        return 24 * size

    def leave(self) -> None:
        """Mark the end of this rank's process as regular."""
        self._words[self._rank, 2] = 1

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended without :meth:`leave`, and those that were given up."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if not self._is_there(rank) and not self._words[rank, 2]]

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait for some ranks no longer, whether or not they live."""
        self._ended |= set(ranks)

    def _is_there(self, rank: int) -> bool:
        """Return whether a rank lives and is waited for; False ever after, also while another process asks."""
        if rank not in self._ended and not self._memory.is_alive(rank):
            self._ended.add(rank)
        return rank not in self._ended

    def begin(self, barrier_id: int) -> Callable[[], int | None]:
        """Enter the next barrier of all live ranks; as :meth:`Communicator.begin_idle_barrier`."""
        self._entered += 1
        entered, slot = self._entered, self._entered % 2
        self._words[self._rank, slot] = entered << _ID_BITS | barrier_id

        def poll() -> int | None:
            ids = []
            for rank in range(self._size):
                word = int(self._words[rank, slot])
                if word >> _ID_BITS == entered:
                    ids.append(word & (1 << _ID_BITS) - 1)
                elif self._is_there(rank):
                    return None
            return common_barrier(ids)

        return poll
