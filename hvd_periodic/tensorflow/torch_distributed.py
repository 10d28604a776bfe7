"""TensorFlow tensors and arrays over torch.distributed."""

from __future__ import annotations

from hvd_periodic.comm.staging import Staged
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator
from hvd_periodic.tensorflow.host_values import TensorFlowMemory


class TensorFlowOverTorch(Staged, TorchDistributedCommunicator):
    """The ranks of a process group of torch.distributed, which exchange TensorFlow tensors or arrays."""

    memory = TensorFlowMemory()
