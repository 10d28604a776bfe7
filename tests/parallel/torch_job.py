"""The job that ranks of PyTorch are in, in Horovod's words: Horovod's own module, or torch.distributed under torchrun.

There, Horovod is as good as not installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


class OverTorchDistributed:
    """What scenarios need of Horovod, over torch.distributed."""

    ProcessSet = list

    def init(self, process_sets: list[Any] | str | None = None) -> None:
        """Initialize torch.distributed, and put process groups into the places of process sets."""
        dist.init_process_group("gloo")
        if isinstance(process_sets, list):
            process_sets[:] = [self.add_process_set(ranks) for ranks in process_sets]

    def add_process_set(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks)

    @property
    def global_process_set(self) -> Any:
        return dist.group.WORLD

    def is_initialized(self) -> bool:
        return dist.is_initialized()

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def mpi_enabled(self) -> bool:
        return False

    def barrier(self) -> None:
        dist.barrier()

    def allreduce(self, value: torch.Tensor, name: str) -> None:
        dist.all_reduce(value)

    def allgather_object(self, value: object, name: str = "") -> list[Any]:
        found: list[Any] = [None] * self.size()
        dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: object, root_rank: int = 0, name: str = "") -> Any:
        return self.allgather_object(value)[root_rank]


if UNDER_TORCHRUN:
    sys.modules["horovod"] = None  # type: ignore[assignment]
hvd: Any = OverTorchDistributed() if UNDER_TORCHRUN else importlib.import_module("horovod.torch")
"""Horovod, or what takes its place."""
