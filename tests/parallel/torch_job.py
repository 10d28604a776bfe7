"""The job that ranks of PyTorch are in, in Horovod's words: Horovod's own module, torch.distributed, or MPI.

It is torch.distributed under torchrun, and under mpirun with ``HVD_PERIODIC_COMM=torch``, where ranks meet in the
folder that is the first argument of the program; and MPI with ``HVD_PERIODIC_COMM=mpi``. There, Horovod is as good as
not installed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvd_periodic import Communicator
from hvd_periodic.comm.mpi import group_of_ranks
from tests.parallel.program import Scenarios

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
OVER_MPI = os.environ.get("HVD_PERIODIC_COMM") == "mpi"
BESIDE_MPI = os.environ.get("HVD_PERIODIC_COMM") == "torch" and "OMPI_COMM_WORLD_RANK" in os.environ
WITHOUT_HOROVOD = UNDER_TORCHRUN or BESIDE_MPI or OVER_MPI


class OverTorchDistributed:
    """What scenarios need of Horovod, over torch.distributed."""

    ProcessSet = list

    def init(self, process_sets: list[Any] | str | None = None) -> None:
        """Initialize torch.distributed, and put process groups into the places of process sets."""
        if BESIDE_MPI:
            rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
            where = f"file://{os.path.abspath(sys.argv[1])}/rendezvous"  # noqa: PTH100
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        else:
            dist.init_process_group(_backends())
        if isinstance(process_sets, list):
            process_sets[:] = [self.add_process_set(ranks) for ranks in process_sets]

    def add_process_set(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks)

    @property
    def global_process_set(self) -> Any:
        return dist.group.WORLD

    def shutdown(self) -> None:
        dist.destroy_process_group()

    def is_initialized(self) -> bool:
        return dist.is_initialized()

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def mpi_enabled(self) -> bool:
        return BESIDE_MPI

    def barrier(self) -> None:
        dist.barrier()

    def allreduce(self, value: torch.Tensor, name: str = "") -> torch.Tensor:
        mean = value.clone()
        dist.all_reduce(mean)
        return mean / self.size()

    def allgather_object(self, value: object, name: str = "") -> list[Any]:
        found: list[Any] = [None] * self.size()
        dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: object, root_rank: int = 0, name: str = "") -> Any:
        return self.allgather_object(value)[root_rank]


class OverMPI:
    """What scenarios need of Horovod, over MPI."""

    ProcessSet = list

    def init(self, process_sets: list[Any] | str | None = None) -> None:
        """Put communicators into the places of process sets."""
        if isinstance(process_sets, list):
            process_sets[:] = [group_of_ranks(ranks) for ranks in process_sets]

    @property
    def everyone(self) -> Communicator:
        """The communicator of all ranks."""
        from hvd_periodic.torch.communicator import communicator_of

        return communicator_of(None)

    def shutdown(self) -> None:
        """Leave MPI to mpi4py, which ends it at exit."""

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return self.everyone.rank

    def size(self) -> int:
        return self.everyone.size

    def local_rank(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])

    def mpi_enabled(self) -> bool:
        return True

    def barrier(self) -> None:
        self.everyone.allgather_object(None, "barrier")

    def allreduce(self, value: torch.Tensor, name: str = "allreduce") -> torch.Tensor:
        total: torch.Tensor = self.everyone.allreduce(value.clone().reshape(-1), name)()
        return total.reshape(value.shape) / self.size()

    def allreduce_(self, value: torch.Tensor, name: str = "allreduce") -> None:
        """Sum in place."""
        value.copy_(self.everyone.allreduce(value.reshape(-1), name)().reshape(value.shape))

    def allgather_object(self, value: object, name: str = "allgather") -> list[Any]:
        return self.everyone.allgather_object(value, name)

    def broadcast_object(self, value: object, root_rank: int = 0, name: str = "broadcast") -> Any:
        return self.everyone.broadcast_object(value, name, root_rank)


def _with_waits_that_sleep() -> Any:
    """Return Horovod's module; a rank that waits leaves its core to others, where Horovod's own waits keep it busy."""
    module = importlib.import_module("horovod.torch")
    operations = importlib.import_module("horovod.torch.mpi_ops")
    finish = operations.synchronize

    def synchronize(handle: int) -> Any:
        pause = 2e-5
        while not operations.poll(handle):
            time.sleep(pause)
            pause = min(1.1 * pause, 1e-3)
        return finish(handle)

    operations.synchronize = synchronize  # Not module.synchronize, which the package and users call.
    return module


def _backends() -> str:
    """Return what carries tensors: NCCL those on GPUs, if every rank of this host has one to itself."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"


if WITHOUT_HOROVOD:
    for module in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[module]  # Jobs share imports.
    sys.modules["horovod"] = None  # type: ignore[assignment]
hvd: Any = (
    OverMPI() if OVER_MPI else OverTorchDistributed() if UNDER_TORCHRUN or BESIDE_MPI else _with_waits_that_sleep()
)
"""Horovod, or what takes its place."""


def run_all(scenarios: Scenarios) -> None:
    """Run scenarios as a rank of the job, in the folder that the command line names."""
    torch.set_num_threads(1)
    hvd.init()
    scenarios.run(Path(sys.argv[1]), hvd.rank())
