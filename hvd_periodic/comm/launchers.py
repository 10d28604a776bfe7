"""Launchers, and the number of processes that each reports in the environment of a process."""

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
"""Environment variables with the number of processes, and the launchers that set them."""

_WITHOUT_SIZE = ("PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "JSM_NAMESPACE_RANK", "PALS_RANKID", "RANK")
"""Environment variables of launchers that may give a process its number, but not the number of processes."""


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


def started_alone() -> bool:
    """Return whether there is no launcher, or one for which this process is the only one, and will stay so.

    Example:
        >>> started_alone()
        True
    """
    if started_several() is not None or os.environ.get("HOROVOD_ELASTIC") == "1":
        return False
    return any(variable in os.environ for variable in _SIZES) or not any(sign in os.environ for sign in _WITHOUT_SIZE)
