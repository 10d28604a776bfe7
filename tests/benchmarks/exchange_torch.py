"""What ``tests.benchmarks.exchange`` measures in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp


def exchanges(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name; the first is the unit."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(hvd.rank())
    count = sum(torch.Size(shape).numel() for shape in shapes)
    flat = torch.randn(count, device=device)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    measured: dict[str, Callable[[], Any]] = {
        "flat allreduce": lambda: hvd.allreduce_(flat, op=hvd.Sum, name="flat"),
        "grouped allreduce of the parameters": lambda: hvd.grouped_allreduce_(tensors, op=hvd.Average, name="grouped"),
    }
    synchronous: list[Any] = [hvdp.ModelAverageOptimizer, hvdp.ElasticAverageOptimizer, hvdp.AGNOptimizer]
    for wrap in synchronous:
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.1), named, 1_000_000)
        measured[wrap.__name__] = optimizer.synchronizer.sync
    for wrap in synchronous[1:] if hvd.mpi_enabled() else []:
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.1), named, 1_000_000, asynchronous=True)
        measured[f"{wrap.__name__}, asynchronous"] = optimizer.synchronizer.sync
    return measured


def wait() -> None:
    """Wait for what is under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="slowest"))
