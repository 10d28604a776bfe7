"""What ``tests.benchmarks.exchange`` measures in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.coding import TensorCoding
from tests.benchmarks.exchange import COMPRESSIONS, Exchange, Make


def exchanges(shapes: list[tuple[int, ...]]) -> dict[str, Make]:
    """Return what makes each of those that are measured, by name, the unit first."""
    torch.manual_seed(hvd.rank())
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    count = sum(torch.Size(shape).numel() for shape in shapes)

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(shape, device=device) for shape in shapes]

    def ours(wrap: Any, **options: Any) -> Exchange:
        parameters = list(map(torch.nn.Parameter, tensors()))
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        synchronizer = wrap(torch.optim.SGD(parameters, lr=0.1), named, 1_000_000, **options).synchronizer
        return Exchange(synchronizer.sync, synchronizer.finalize)

    makers: dict[str, Make] = {
        "flat allreduce": lambda: flat(torch.randn(count, device=device)),
        "allreduce of each parameter": lambda: each(tensors()),
        "grouped allreduce of the parameters": lambda: grouped(tensors()),
        "averaging, by hand, one flat tensor": lambda: average_by_hand(torch.randn(count, device=device)),
        "elastic averaging, by hand, one flat tensor": lambda: elastic_by_hand(torch.randn(count, device=device)),
        "the look for NaN and infinity": lambda: look(torch.randn(count, device=device)),
    }
    wrappers = (hvdp.ModelAverageOptimizer, hvdp.ElasticAverageOptimizer, hvdp.AGNOptimizer)
    for wrap in wrappers:
        makers[wrap.__name__] = partial(ours, wrap)
    for name, wire in COMPRESSIONS.items():
        makers[f"{wrappers[0].__name__}, {name}"] = partial(ours, wrappers[0], compression=wire)
    for wrap in wrappers[1:] if hvd.mpi_enabled() else []:
        makers[f"{wrap.__name__}, asynchronous"] = partial(ours, wrap, asynchronous=True)
    return makers


def flat(tensor: torch.Tensor) -> Exchange:
    """Return an allreduce of one tensor."""
    return Exchange(lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="flat"))


def each(tensors: list[torch.Tensor]) -> Exchange:
    """Return an allreduce of each of some tensors."""

    def exchange() -> None:
        handles = [hvd.allreduce_async_(tensor, op=hvd.Average, name=f"t{i}") for i, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    return Exchange(exchange)


def grouped(tensors: list[torch.Tensor]) -> Exchange:
    """Return Horovod's grouped allreduce."""
    return Exchange(lambda: hvd.grouped_allreduce_(tensors, op=hvd.Average, name="grouped"))


def average_by_hand(replica: torch.Tensor) -> Exchange:
    """Return what somebody would write whose parameters are one flat tensor, and who looks for nothing."""
    center, message = replica.clone(), torch.empty_like(replica)

    def exchange() -> None:
        torch.sub(replica, center, out=message)
        hvd.allreduce_(message, op=hvd.Sum, name="average by hand")
        center.add_(message, alpha=1 / hvd.size())
        replica.copy_(center)

    return Exchange(exchange)


def elastic_by_hand(replica: torch.Tensor) -> Exchange:
    """Return the same of elastic averaging."""
    center, message, rate = replica.clone(), torch.empty_like(replica), 0.9 / hvd.size()

    def exchange() -> None:
        torch.sub(replica, center, out=message)
        replica.add_(message, alpha=-rate)
        hvd.allreduce_(message, op=hvd.Sum, name="elastic by hand")
        center.add_(message, alpha=rate)

    return Exchange(exchange)


def look(tensor: torch.Tensor) -> Exchange:
    """Return the look for NaN and infinity, which is a part of every exchange of ours."""
    return Exchange(lambda: TensorCoding().are_finite([tensor]))


def wait() -> None:
    """Wait for what is under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    return float(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="slowest"))
