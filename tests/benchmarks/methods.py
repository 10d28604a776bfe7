"""Methods of training that benchmarks compare: ours, and those of others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import horovod.torch as hvd
import torch
import torch.distributed
from torch import nn

import hvd_periodic.torch as hvdp
from tests.benchmarks.encoding import WIRES


class Task(Protocol):
    """What is trained."""

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the next batch."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a local optimizer."""


@dataclass(frozen=True)
class Method:
    """A way to train on all ranks.

    Attributes:
        step: takes one step.
        finish: waits for what is under way.
        center: shows the model that all have agreed on.
        bytes_sent: that this rank has handed to collectives.
        leave: ends what it has started, on all ranks together.
    """

    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None
    center: Callable[[], AbstractContextManager[object]] = nullcontext
    bytes_sent: Callable[[], float] = lambda: 0.0
    leave: Callable[[], object] = lambda: None


Make = Callable[[Task, nn.Module, int], Method]
"""Makes a method for a task, its model, and a period."""


def local_step(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute gradients, and let an optimizer step."""
    optimizer.zero_grad()
    task.loss(model).backward()
    optimizer.step()


def alone(task: Task, model: nn.Module, period: int) -> Method:
    """Return local steps."""
    return Method(partial(local_step, task, model, task.optimizer(model)))


def every_step(task: Task, model: nn.Module, period: int) -> Method:
    """Return Horovod's own."""
    optimizer = hvd.DistributedOptimizer(task.optimizer(model), model.named_parameters())
    return counted(model, partial(local_step, task, model, optimizer))


def trained(task: Task, model: nn.Module, **keywords: Any) -> Method:
    """Return one of ours, with the keywords of its optimizer."""
    optimizer = hvdp.PeriodicOptimizer(task.optimizer(model), model, **keywords)
    synchronizer = optimizer.synchronizer
    return Method(
        partial(local_step, task, model, optimizer),
        synchronizer.land,
        optimizer.center,
        lambda: synchronizer.counters.bytes_sent,
    )


def periodic(algorithm: Callable[[], hvdp.Algorithm], **options: Any) -> Make:
    """Return what makes one of ours."""
    return lambda task, model, period: trained(task, model, algorithm=algorithm(), period=period, **options)


def sparse_loco(**options: Any) -> Make:
    """Return what makes SparseLoCo."""
    return lambda task, model, period: trained(task, model, **hvdp.sparse_loco(period), **options)


def over(library: Callable[[], Any], algorithm: Callable[[], hvdp.Algorithm], **options: Any) -> Make:
    """Return what makes one of ours over another library than Horovod, which returns its ranks."""
    return lambda task, model, period: periodic(algorithm, process_set=library(), **options)(task, model, period)


def mpi() -> Any:
    """Return all ranks, over MPI itself."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def gloo() -> Any:
    """Return all ranks, over torch.distributed."""
    join()
    return torch.distributed.group.WORLD


Begin = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Begins to sum a flat tensor over all ranks; returns a function that waits for the sum."""


def begin_horovod() -> Begin:
    """Return Horovod's allreduce."""

    def begin(message: torch.Tensor) -> Callable[[], torch.Tensor]:
        handle = hvd.allreduce_async(message, op=hvd.Sum, name="by hand")
        return lambda: hvd.synchronize(handle)

    return begin


def begin_gloo() -> Begin:
    """Return the allreduce of torch.distributed."""
    join()

    def begin(message: torch.Tensor) -> Callable[[], torch.Tensor]:
        summed = message.clone()
        work = torch.distributed.all_reduce(summed, async_op=True)
        return lambda: work.wait() and summed

    return begin


def overlapped_by_hand(sums: Callable[[], Begin]) -> Make:
    """Return averaging over one flat tensor that is sent at an exchange and taken at the next, as a loop would do it.

    What is taken is the mean displacement; local progress since then stays, as in ours.

    Args:
        sums: makes the allreduce.
    """
    return lambda task, model, period: _by_hand(task, model, period, sums())


def _by_hand(task: Task, model: nn.Module, period: int, begin: Begin) -> Method:
    optimizer, parameters = task.optimizer(model), list(model.parameters())
    center = torch.cat([parameter.detach().flatten() for parameter in parameters])
    message, total = torch.empty_like(center), torch.empty_like(center)
    steps, sent, wait = 0, 0, None

    def finish() -> None:
        nonlocal wait
        if wait is None:
            return
        total.copy_(wait())
        wait = None
        own = torch.sub(message, total, alpha=1 / hvd.size())
        center.add_(total, alpha=1 / hvd.size())
        for parameter, correction in zip(parameters, own.split([p.numel() for p in parameters]), strict=True):
            parameter.detach().sub_(correction.view_as(parameter))

    def step() -> None:
        nonlocal steps, sent, wait
        local_step(task, model, optimizer)
        steps += 1
        if steps % period == period - 1:
            finish()
        if steps % period == 0:
            torch.cat([parameter.detach().flatten() for parameter in parameters], out=message)
            message.sub_(center)
            sent += message.nbytes
            wait = begin(message)

    return Method(step, finish, bytes_sent=lambda: sent)


def distributed_data_parallel(task: Task, model: nn.Module, period: int) -> Method:
    """Return PyTorch's, over Gloo."""
    join()
    whole = nn.parallel.DistributedDataParallel(model)
    return counted(model, partial(local_step, task, whole, task.optimizer(model)))


def model_averager(task: Task, model: nn.Module, period: int) -> Method:
    """Return PyTorch's periodic averaging, over Gloo."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    join()
    averager, optimizer = PeriodicModelAverager(period=period), task.optimizer(model)

    def step() -> None:
        local_step(task, model, optimizer)
        averager.average_parameters(model.parameters())

    return counted(model, step, period)


def counted(model: nn.Module, step: Callable[[], object], period: int = 1) -> Method:
    """Return a method that hands as many bytes as the model has to collectives, once in a period."""
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    steps = 0

    def counting() -> None:
        nonlocal steps
        steps += 1
        step()

    return Method(counting, bytes_sent=lambda: steps // period * nbytes)


def join() -> None:
    """Let the same processes meet in ``torch.distributed``."""
    if torch.distributed.is_initialized():
        return
    address = hvd.broadcast_object((own_address(), _free_port()), name="address")
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    torch.distributed.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())


def own_address() -> str:
    """Return the address of this host, as others see it."""
    return socket.gethostbyname(socket.gethostname())


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


INT8 = hvdp.Compression.int8

COMPRESSED: dict[str, Make] = {
    f"averaging, {name}, overlap": periodic(hvdp.Averaging, compression=wire, overlap="period")
    for name, wire in WIRES.items()
}
"""Each encoding of messages, by name."""

EVERY_STEP: dict[str, Make] = {
    "Horovod DistributedOptimizer": every_step,
    "torch DistributedDataParallel": distributed_data_parallel,
}
"""By name; those that communicate at every step."""

BY_HAND: dict[str, Make] = {
    "averaging, overlap, by hand": overlapped_by_hand(begin_horovod),
    "averaging, overlap, by hand, Gloo": overlapped_by_hand(begin_gloo),
}
"""By name; the library is Horovod, or Gloo."""

_OF_TORCH: dict[str, Make] = {"torch PeriodicModelAverager": model_averager}
_FRAGMENTS: dict[str, Make] = {
    "averaging, int8, 2 fragments, overlap": periodic(hvdp.Averaging, compression=INT8, fragments=2, overlap="period")
}

METHODS: dict[str, Make] = {
    **EVERY_STEP,
    **_OF_TORCH,
    "elastic averaging": periodic(hvdp.EASGD),
    "averaging": periodic(hvdp.Averaging),
    "DiLoCo": periodic(hvdp.DiLoCo),
    "elastic averaging, overlap": periodic(hvdp.EASGD, overlap="period"),
    "averaging, overlap": periodic(hvdp.Averaging, overlap="period"),
    "DiLoCo, overlap": periodic(hvdp.DiLoCo, overlap="period"),
    "averaging, overlap, MPI": over(mpi, hvdp.Averaging, overlap="period"),
    "averaging, overlap, Gloo": over(gloo, hvdp.Averaging, overlap="period"),
    **BY_HAND,
    "averaging, int8": periodic(hvdp.Averaging, compression=INT8),
    **_FRAGMENTS,
    **COMPRESSED,
}
"""By name."""

_ALGORITHMS = {"elastic averaging": hvdp.EASGD, "averaging": hvdp.Averaging, "AGN": hvdp.AGN, "DiLoCo": hvdp.DiLoCo}
_LIBRARIES: dict[str, Callable[[], Any]] = {"": lambda: None, ", MPI": mpi, ", Gloo": gloo}
_MODES: dict[str, dict[str, Any]] = {"": {}, ", overlap": {"overlap": "period"}}

EXCHANGES: dict[str, Make] = {
    **_OF_TORCH,
    **BY_HAND,
    **{
        f"{name}{mode}{library}": over(ranks, algorithm, **options)
        for mode, options in _MODES.items()
        for name, algorithm in _ALGORITHMS.items()
        for library, ranks in _LIBRARIES.items()
    },
    **{f"averaging, {name}": periodic(hvdp.Averaging, compression=wire) for name, wire in WIRES.items()},
    **COMPRESSED,
    **_FRAGMENTS,
}
"""By name; each algorithm with each library, and each wire."""
