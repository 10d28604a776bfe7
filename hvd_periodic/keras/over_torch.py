"""Host arrays over libraries that carry tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.staging import ArrayMemory, Staged
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator


class ArraysOverTorch(Staged, TorchDistributedCommunicator):
    """The ranks of a process group of torch.distributed, which exchange arrays."""

    memory = ArrayMemory()


class ArraysOverHorovod(Staged, HorovodCommunicator):
    """The ranks of a process set of Horovod, which exchange arrays."""

    memory = ArrayMemory()
    native = torch.Tensor

    def __init__(self, process_set: Any = None, module: str = "horovod.torch") -> None:
        super().__init__(module, process_set, torch.from_numpy)
