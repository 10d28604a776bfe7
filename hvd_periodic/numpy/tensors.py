"""Arrays over libraries that carry tensors of PyTorch, which share the memory of the arrays."""

from __future__ import annotations

from typing import Any

import torch

from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.staging import ArrayMemory, Staged
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator


class ArraysOverHorovod(Staged, HorovodCommunicator):
    """The ranks of a process set of Horovod with PyTorch, which exchange arrays."""

    memory = ArrayMemory()

    def __init__(self, process_set: Any = None) -> None:
        super().__init__("horovod.torch", process_set, torch.from_numpy)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArraysOverHorovod, super().__reduce__()[1][1:2]


class ArraysOverTorch(Staged, TorchDistributedCommunicator):
    """The ranks of a process group of torch.distributed, which exchange arrays."""

    memory = ArrayMemory()
