"""Checks that ranks exchange, by numbers that are known: ``verify.py horovod|mpi torch|tensorflow SIZE``.

``horovod``: an allreduce, without the project. ``mpi``: model averaging over MPI, and in PyTorch also over
torch.distributed. A launcher of MPI has to start SIZE ranks.
"""

import os
import sys


def horovod_torch(value: float) -> tuple[float, int]:
    """Sums `value` plus the rank over the ranks of Horovod with torch; returns the sum and the number of ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total, size = hvd.allreduce(torch.tensor([value + hvd.rank()]), op=hvd.Sum, name="verify"), hvd.size()
    hvd.shutdown()
    return total.item(), size


def horovod_tensorflow(value: float) -> tuple[float, int]:
    """Sums with TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total, size = hvd.allreduce(tf.constant([value + hvd.rank()]), op=hvd.Sum, name="verify"), hvd.size()
    hvd.shutdown()
    return float(total.numpy()[0]), size


def mpi_torch(value: float) -> tuple[float, int]:
    """Sums by an exchange of PyTorch over MPI, and by another over torch.distributed, which has to find the same."""
    import tempfile

    import torch
    from mpi4py import MPI
    from torch import distributed

    import hvd_periodic.torch as hvdp

    def exchange(library: str) -> float:
        os.environ["HVD_PERIODIC_COMM"] = library
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvdp.ModelAverageOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], interval_steps=1)
        x.grad = torch.full((1,), -value - rank)
        optimizer.step()
        return x.item() * size

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    total = exchange("mpi")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{MPI.COMM_WORLD.bcast(folder)}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        other = exchange("torch")
        distributed.destroy_process_group()
        MPI.COMM_WORLD.Barrier()
    if other != total:
        raise SystemExit(f"the sum over torch.distributed is {other}, over MPI {total}")
    return total, size


def mpi_tensorflow(value: float) -> tuple[float, int]:
    """Sums by an exchange of Keras over MPI."""
    import keras
    from mpi4py import MPI

    import hvd_periodic.tensorflow as hvdp

    os.environ["HVD_PERIODIC_COMM"] = "mpi"
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(1.0), model, interval_steps=1)
    optimizer.apply([keras.ops.array([[-value - rank]])], model.trainable_variables)
    return float(model.get_weights()[0].item()) * size, size


def main() -> None:
    """Exits with a message when the sum or the number of ranks is not the expected one."""
    library, framework, ranks = sys.argv[1:]
    total, size = globals()[f"{library}_{framework}"](1.0)
    if size != int(ranks):
        raise SystemExit(f"{framework}: the job should have {ranks} ranks, {library} sees {size}")
    expected = size * (size + 1) / 2  # Rank r contributes r + 1.
    if total != expected:
        raise SystemExit(f"{framework}: the sum of 1..{size} should be {expected}, {library} got {total}")


if __name__ == "__main__":
    main()
