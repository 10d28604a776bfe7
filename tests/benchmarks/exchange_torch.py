"""What ``tests.benchmarks.exchange`` measures in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from tests.benchmarks.exchange import COMPRESSIONS


def exchanges(shapes: list[tuple[int, ...]]) -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """Return what is measured, by name, the unit first; and the synchronizers in it."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(hvd.rank())
    count = sum(torch.Size(shape).numel() for shape in shapes)
    flat = torch.randn(count, device=device)
    tensors = [torch.randn(shape, device=device) for shape in shapes]

    def each() -> None:
        handles = [hvd.allreduce_async_(tensor, op=hvd.Average, name=f"t{i}") for i, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    measured: dict[str, Callable[[], Any]] = {
        "flat allreduce": lambda: hvd.allreduce_(flat, op=hvd.Sum, name="flat"),
        "allreduce of each parameter": each,
        "grouped allreduce of the parameters": lambda: hvd.grouped_allreduce_(tensors, op=hvd.Average, name="grouped"),
    }
    synchronizers = []

    def add(name: str, wrap: Any, **options: Any) -> None:
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.1), named, 1_000_000, **options)
        synchronizers.append(optimizer.synchronizer)
        measured[name] = optimizer.synchronizer.sync

    wrappers = (hvdp.ModelAverageOptimizer, hvdp.ElasticAverageOptimizer, hvdp.AGNOptimizer)
    for wrap in wrappers:
        add(wrap.__name__, wrap)
    for name, wire in COMPRESSIONS.items():
        add(f"{wrappers[0].__name__}, {name}", wrappers[0], compression=wire)
    for wrap in wrappers[1:] if hvd.mpi_enabled() else []:
        add(f"{wrap.__name__}, asynchronous", wrap, asynchronous=True)
    return measured, synchronizers


def wait() -> None:
    """Wait for what is under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="slowest"))
