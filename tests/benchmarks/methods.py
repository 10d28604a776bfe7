"""Methods of training that ``tests.benchmarks.training`` compares: ours, and those of others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed
from torch import nn

import hvd_periodic.torch as hvdp

RATE, MOMENTUM = 1e-3, 0.9

Loss = Callable[[nn.Module], torch.Tensor]


class Method:
    """A way to train on all ranks.

    Args:
        step: takes one step.
        finish: waits for what is under way.
    """

    def __init__(self, step: Callable[[], object], finish: Callable[[], object] = lambda: None) -> None:
        self.step, self.finish = step, finish


def local_step(loss: Loss, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute gradients, and let an optimizer step."""
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the local optimizer."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def alone(model: nn.Module, loss: Loss, period: int) -> Method:
    """Return local steps."""
    return Method(partial(local_step, loss, model, sgd(model)))


def every_step(model: nn.Module, loss: Loss, period: int) -> Method:
    """Return Horovod's own."""
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    return Method(partial(local_step, loss, model, optimizer))


def periodic(algorithm: Callable[[], hvdp.Algorithm], **options: Any) -> Callable[[nn.Module, Loss, int], Method]:
    """Return what makes one of ours."""

    def make(model: nn.Module, loss: Loss, period: int) -> Method:
        optimizer = hvdp.PeriodicOptimizer(sgd(model), model, algorithm(), period, **options)
        return Method(partial(local_step, loss, model, optimizer), optimizer.synchronizer.land)

    return make


def distributed_data_parallel(model: nn.Module, loss: Loss, period: int) -> Method:
    """Return PyTorch's, over Gloo."""
    _join()
    whole = nn.parallel.DistributedDataParallel(model)
    return Method(partial(local_step, loss, whole, sgd(model)))


def model_averager(model: nn.Module, loss: Loss, period: int) -> Method:
    """Return PyTorch's periodic averaging, over Gloo."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    _join()
    averager, optimizer = PeriodicModelAverager(period=period), sgd(model)

    def step() -> None:
        local_step(loss, model, optimizer)
        averager.average_parameters(model.parameters())

    return Method(step)


def _join() -> None:
    """Let the same processes meet in ``torch.distributed``."""
    if torch.distributed.is_initialized():
        return
    address = hvd.broadcast_object((socket.gethostbyname(socket.gethostname()), _free_port()), name="address")
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    torch.distributed.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


METHODS: dict[str, Callable[[nn.Module, Loss, int], Method]] = {
    "Horovod DistributedOptimizer": every_step,
    "torch DistributedDataParallel": distributed_data_parallel,
    "torch PeriodicModelAverager": model_averager,
    "elastic averaging": periodic(hvdp.EASGD),
    "averaging": periodic(hvdp.Averaging),
    "DiLoCo": periodic(hvdp.DiLoCo),
    "elastic averaging, overlap": periodic(hvdp.EASGD, overlap="period"),
    "averaging, overlap": periodic(hvdp.Averaging, overlap="period"),
    "DiLoCo, overlap": periodic(hvdp.DiLoCo, overlap="period"),
    "averaging, int8": periodic(hvdp.Averaging, compression=hvdp.Compression.int8),
    "averaging, int8, 2 fragments, overlap": periodic(
        hvdp.Averaging, compression=hvdp.Compression.int8, fragments=2, overlap="period"
    ),
}
"""By name."""
