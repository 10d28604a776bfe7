"""The workers of a job, over Horovod, torch.distributed or MPI.

HVD_PERIODIC_COMM=horovod, torch or mpi names the library, as for the optimizers. Without it: torch.distributed under
torchrun; else Horovod where it is installed; else MPI where mpi4py is; else this process is the only worker.
"""

from __future__ import annotations

import atexit
import importlib
import os
from importlib.util import find_spec
from typing import Any

from numpy.typing import NDArray


def _library() -> str:
    """Return the library by whose numbers the workers know each other."""
    named = os.environ.get("HVD_PERIODIC_COMM", "").strip().lower()
    if named not in ("", "horovod", "torch", "mpi"):
        raise SystemExit(f"HVD_PERIODIC_COMM must be 'horovod', 'torch' or 'mpi'. Received: {named!r}")
    if named:
        return named
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    if find_spec("horovod") is not None:
        return "horovod"
    return "mpi" if find_spec("mpi4py") is not None else "alone"


LIBRARY = _library()


class _Alone:
    """The only worker."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def average(self, array: NDArray[Any]) -> None:
        pass


class _OverHorovod(_Alone):
    def __init__(self, framework: str) -> None:
        self._hvd = importlib.import_module(f"horovod.{framework}")
        self._hvd.init()
        self.rank, self.size = self._hvd.rank(), self._hvd.size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = self._hvd.allgather_object(value, name="record")
        return values


class _OverTorch(_Alone):
    def __init__(self) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group()
            atexit.register(distributed.destroy_process_group)
        self._distributed = distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        gathered = [None] * self.size
        self._distributed.all_gather_object(gathered, value)
        return gathered

    def average(self, array: NDArray[Any]) -> None:
        import torch

        self._distributed.all_reduce(torch.from_numpy(array))
        array /= self.size


class _OverMPI(_Alone):
    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = self._comm.allgather(value)
        return values

    def average(self, array: NDArray[Any]) -> None:
        self._comm.Allreduce(self._in_place, array)
        array /= self.size


_job = _Alone()


def init(framework: str = "torch") -> None:
    """Meet the other workers; for Horovod, the framework tells which of its modules is initialized."""
    global _job
    if LIBRARY == "horovod":
        _job = _OverHorovod(framework)
    elif LIBRARY != "alone":
        _job = _OverTorch() if LIBRARY == "torch" else _OverMPI()


def rank() -> int:
    """Return the number of this worker."""
    return _job.rank


def size() -> int:
    """Return how many there are."""
    return _job.size


def gather(value: Any) -> list[Any]:
    """Return the values of all workers."""
    return _job.gather(value)


def average(array: NDArray[Any]) -> None:
    """Replace an array by its mean over all workers; over Horovod, its optimizers average."""
    _job.average(array)
