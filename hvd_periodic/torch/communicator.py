"""The ranks that exchange tensors of PyTorch: ranks of Horovod, of torch.distributed, or of MPI."""

from __future__ import annotations

import numpy as np
import torch

from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.selection import FrontEnd
from hvd_periodic.comm.staging import Staged
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator


class TensorMemory:
    """Tensors as arrays: in their own memory in the host's, else in pinned memory; 16-bit numbers as float32."""

    def to_host(self, buffer: torch.Tensor) -> np.ndarray:
        """Return an array of the values."""
        tensor = buffer.detach()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        if not tensor.is_cpu:
            tensor = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
        return tensor.numpy()

    def from_host(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of ``like``."""
        return torch.from_numpy(array).to(like.device, like.dtype)


class TensorsOverMPI(Staged, MPICommunicator):
    """The ranks of an mpi4py communicator, which exchange tensors."""

    memory = TensorMemory()


FRONT_END = FrontEnd(
    buffer=torch.Tensor,
    horovod_modules=("horovod.torch",),
    over_horovod=lambda process_set, module: HorovodCommunicator(module, process_set, torch.from_numpy),
    over_torch=TorchDistributedCommunicator,
    over_mpi=TensorsOverMPI.over,
    elastic_over_torch=True,
    elastic_islands=True,
)
communicator_of = FRONT_END.communicator_of
