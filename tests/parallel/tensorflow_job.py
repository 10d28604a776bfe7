"""The job that ranks of TensorFlow are in, in Horovod's words: Horovod's own module, MPI, or torch.distributed.

``HVD_PERIODIC_COMM`` says which, under mpirun; over torch.distributed, ranks meet in the folder that is the first
argument of the program. There, Horovod is as good as not installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvd_periodic import Communicator
from hvd_periodic.comm.selection import requested


class WithoutHorovod:
    """What scenarios need of Horovod, over MPI or torch.distributed."""

    ProcessSet = list
    Sum, Average = "sum", "average"

    def __init__(self, library: str) -> None:
        self._library = library

    def init(self, process_sets: list[Any] | str | None = None) -> None:
        """Put groups into the places of process sets; initialize torch.distributed, if that is the library."""
        if self._library == "torch":
            rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
            where = f"file://{Path(sys.argv[1]).absolute()}/rendezvous"
            self._distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        if isinstance(process_sets, list):
            process_sets[:] = [self._group(ranks) for ranks in process_sets]

    @property
    def _distributed(self) -> Any:
        return importlib.import_module("torch.distributed")

    def _group(self, ranks: list[int]) -> Any:
        if self._library == "torch":
            return self._distributed.new_group(ranks)
        from mpi4py import MPI

        return MPI.COMM_WORLD.Create(MPI.COMM_WORLD.Get_group().Incl(ranks))

    @property
    def everyone(self) -> Communicator:
        """The communicator of all ranks."""
        from hvd_periodic.tensorflow.communicator import communicator_of

        return communicator_of(None)

    def is_initialized(self) -> bool:
        return True

    def barrier(self) -> None:
        self.everyone.allgather_object(None, "barrier")

    def rank(self) -> int:
        return self.everyone.rank

    def size(self) -> int:
        return self.everyone.size

    def allreduce(self, value: Any, op: str = "average", name: str = "allreduce") -> Any:
        """Return the sum or the mean of tensors."""
        import tensorflow as tf

        total = self.everyone.allreduce(np.array(value).reshape(-1), name)().reshape(value.shape)
        return tf.constant(total / self.size() if op == self.Average else total, value.dtype)

    def mpi_enabled(self) -> bool:
        return self._library == "mpi"

    def broadcast_variables(self, variables: list[Any], root_rank: int) -> Any:
        """Give all variables the values of the root; in a graph, return an operation that does."""
        import tensorflow.compat.v1 as tf

        if tf.executing_eagerly():
            values = self.broadcast_object([variable.numpy() for variable in variables], root_rank)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            return None
        values = tf.numpy_function(
            lambda *own: self.broadcast_object(own, root_rank),
            [variable.read_value() for variable in variables],
            [variable.dtype.base_dtype for variable in variables],
        )
        for variable, value in zip(variables, values, strict=True):
            value.set_shape(variable.shape)
        return tf.group(*(tf.assign(variable, value) for variable, value in zip(variables, values, strict=True)))

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """Return an operation that gives all global variables the values of the root."""
        import tensorflow.compat.v1 as tf

        return self.broadcast_variables(tf.global_variables(), root_rank)

    def allgather_object(self, value: object, name: str = "allgather") -> list[Any]:
        return self.everyone.allgather_object(value, name)

    def broadcast_object(self, value: object, root_rank: int = 0, name: str = "broadcast") -> Any:
        return self.everyone.broadcast_object(value, name, root_rank)


hvd: Any = (
    importlib.import_module("horovod.tensorflow")
    if requested() in (None, "horovod")
    else WithoutHorovod(str(requested()))
)
"""Horovod, or what is in its place."""
if isinstance(hvd, WithoutHorovod):
    sys.modules["horovod"] = None  # type: ignore[assignment]
