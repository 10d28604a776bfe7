"""A single rank, which has no other rank to exchange with; and the launchers that tell whether there are others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.transports import LocalMemory, SharedMemory
from hvd_periodic.logs import logger, set_up

_SIZES = {
    "SLURM_STEP_NUM_TASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "PMI_SIZE": "mpiexec of an MPICH",
    "MV2_COMM_WORLD_SIZE": "mpiexec of MVAPICH",
    "WORLD_SIZE": "torchrun, or another launcher of torch.distributed,",
    "HOROVOD_SIZE": "horovodrun",
}
"""Environment variables with the number of processes, and the launchers that set them."""

_WITHOUT_SIZE = ("PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "JSM_NAMESPACE_RANK", "PALS_RANKID", "RANK")
"""Environment variables of launchers that may give a process its rank, but not the number of processes."""


_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
"""Environment variables of launchers of MPI, each of which sets at least one."""


class LocalCommunicator(Communicator):
    """The communicator of a job with one process.

    Example:
        >>> LocalCommunicator().allgather_object("me", "names")
        ['me']
    """

    rank = 0
    size = 1
    description = "one process"
    processes = False

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the buffer itself."""
        return buffer

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return the buffer itself."""
        return buffer

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Return the buffer itself."""
        return lambda: buffer

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Sequence[int]]]:
        """Return the buffer itself."""
        return lambda: (buffer, [len(buffer)])

    def tile(self, buffer: Any, times: int) -> Any:
        """Return the buffer itself: there is one rank, and one copy per rank."""
        return buffer

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the one value."""
        return [value]

    def shares_memory(self) -> bool:
        """Return that the only rank shares memory with itself."""
        return True

    def shared_memory(self, nbytes: int, later: int = 0) -> SharedMemory:
        """Return memory of this process."""
        return LocalMemory(nbytes + later)


def only_rank() -> LocalCommunicator | None:
    """Return the communicator of this process as its job's only rank; None if a launcher has started others."""
    return _only_rank() if started_alone() else None


@cache
def _only_rank() -> LocalCommunicator:
    """Return the one communicator that numbers all optimizers of this process; log once that it trains alone."""
    set_up()
    logger.warning("No launcher has started other processes: this one trains alone, as the only rank")
    return LocalCommunicator()


def started_several(horovodrun: bool = True) -> tuple[str, int, str] | None:
    """Return the launcher that has started several processes, their number, and the variable that says so.

    Args:
        horovodrun: whether it counts. Horovod reads its variable itself, and an elastic job may outgrow the number.
    """
    for variable, launcher in _SIZES.items():
        if variable == "HOROVOD_SIZE" and not horovodrun:
            continue
        processes = os.environ.get(variable, "1")
        if processes.isdigit() and int(processes) > 1:
            return launcher, int(processes), variable
    return None


def started_by_mpi() -> bool:
    """Return whether a launcher of MPI has started this process.

    Example:
        >>> started_by_mpi()
        False
    """
    return any(variable in os.environ for variable in _OF_MPI)


def started_alone() -> bool:
    """Return whether there is no launcher, or one for which this process is the only one, and will stay so.

    Example:
        >>> started_alone()
        True
    """
    if started_several() is not None or os.environ.get("HOROVOD_ELASTIC") == "1":
        return False
    return any(variable in os.environ for variable in _SIZES) or not any(sign in os.environ for sign in _WITHOUT_SIZE)
