"""The ranks that exchange host arrays: ranks of Horovod, of torch.distributed, or of MPI."""

from __future__ import annotations

from typing import Any

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.selection import FrontEnd


def _over_torch(process_set: Any) -> Communicator:
    from hvd_periodic.keras.over_torch import ArraysOverTorch

    return ArraysOverTorch(process_set)


def _over_horovod(process_set: Any, module: str) -> Communicator:
    from hvd_periodic.keras.over_torch import ArraysOverHorovod

    return ArraysOverHorovod(process_set, module)


FRONT_END = FrontEnd(
    horovod_modules=("horovod.torch",),
    over_horovod=_over_horovod,
    over_torch=_over_torch,
    over_mpi=MPICommunicator.over,
)
communicator_of = FRONT_END.communicator_of
