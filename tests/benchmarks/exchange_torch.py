"""What ``tests.benchmarks.exchange`` measures in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.coding import TensorCoding
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
    measured |= by_hand(flat.clone())
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


def by_hand(replica: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return what somebody would write whose parameters are one flat tensor, and who looks for nothing."""
    center, message, rate = replica.clone(), torch.empty_like(replica), 0.9 / hvd.size()

    def average() -> None:
        torch.sub(replica, center, out=message)
        hvd.allreduce_(message, op=hvd.Sum, name="average by hand")
        center.add_(message, alpha=1 / hvd.size())
        replica.copy_(center)

    def elastic() -> None:
        torch.sub(replica, center, out=message)
        replica.add_(message, alpha=-rate)
        hvd.allreduce_(message, op=hvd.Sum, name="elastic by hand")
        center.add_(message, alpha=rate)

    return {
        "averaging, by hand, one flat tensor": average,
        "elastic averaging, by hand, one flat tensor": elastic,
        "the look for NaN and infinity": lambda: TensorCoding().are_finite([replica]),
    }


def wait() -> None:
    """Wait for what is under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="slowest"))
