"""Launchers, and how many processes each says, in the environment of a process, that it has started."""

from __future__ import annotations

import os

_SIZES = {
    "SLURM_STEP_NUM_TASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "PMI_SIZE": "mpiexec of an MPICH",
    "MV2_COMM_WORLD_SIZE": "mpiexec of MVAPICH",
    "WORLD_SIZE": "torchrun, or another launcher of torch.distributed,",
    "HOROVOD_SIZE": "horovodrun",
}
"""Where launchers tell each process how many there are."""

_WITHOUT_SIZE = ("PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "JSM_NAMESPACE_RANK", "PALS_RANKID", "RANK")
"""What a launcher sets that may tell its processes a number, but not how many there are."""


def started_several(horovodrun: bool = True) -> tuple[str, int, str] | None:
    """Return the launcher that has started several processes, their number, and the variable that says so.

    Args:
        horovodrun: may be that launcher. Horovod reads its variable itself, and an elastic job outgrows the number.
    """
    for variable, launcher in _SIZES.items():
        if variable == "HOROVOD_SIZE" and not horovodrun:
            continue
        processes = os.environ.get(variable, "1")
        if processes.isdigit() and int(processes) > 1:
            return launcher, int(processes), variable
    return None


def started_alone() -> bool:
    """Return whether there is no launcher, or one that says that this process is the only one, and will be.

    Example:
        >>> started_alone()
        True
    """
    if started_several() is not None or os.environ.get("HOROVOD_ELASTIC") == "1":
        return False
    return any(variable in os.environ for variable in _SIZES) or not any(sign in os.environ for sign in _WITHOUT_SIZE)
