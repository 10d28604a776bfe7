"""The ranks that exchange numpy arrays: ranks of Horovod, of torch.distributed, or of MPI."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.selection import FrontEnd


def _over_horovod(process_set: Any, module: str) -> Communicator:
    made: Communicator
    if module == "horovod.tensorflow":
        made = import_module("hvd_periodic.tensorflow.communicator").TensorFlowCommunicator(process_set)
        return made
    from hvd_periodic.numpy.tensors import ArraysOverHorovod

    return ArraysOverHorovod(process_set)


def _over_torch(process_set: Any) -> Communicator:
    from hvd_periodic.numpy.tensors import ArraysOverTorch

    return ArraysOverTorch(process_set)


FRONT_END = FrontEnd(
    buffer=np.ndarray,
    horovod_modules=("horovod.torch", "horovod.tensorflow"),
    over_horovod=_over_horovod,
    over_torch=_over_torch,
    over_mpi=MPICommunicator.over,
)
communicator_of = FRONT_END.communicator_of
