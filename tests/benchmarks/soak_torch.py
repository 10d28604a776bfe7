"""What soaks in PyTorch: a small model, exchanged in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import AGN, BMUF, EASGD, Averaging, DiLoCo, SlowMo
from hvd_periodic.comm.base import Communicator
from hvd_periodic.torch.communicator import communicator_of
from tests.parallel.torch_job import hvd

MODES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "averaging": (Averaging, {}, ""),
    "elastic averaging": (EASGD, {}, ""),
    "AGN": (AGN, {}, ""),
    "DiLoCo": (DiLoCo, {}, ""),
    "SlowMo": (SlowMo, {}, ""),
    "BMUF": (BMUF, {}, ""),
    "averaging, root": (Averaging, {"center": "root"}, ""),
    "AGN, sharded": (AGN, {"center": "sharded"}, ""),
    "averaging, overlap": (Averaging, {"overlap": 1}, ""),
    "elastic averaging, overlap, fragments": (EASGD, {"overlap": "period", "fragments": 2}, ""),
    "averaging, fp16": (Averaging, {"compression": hvdp.Compression.fp16}, ""),
    "averaging, int8": (Averaging, {"compression": hvdp.Compression.int8}, ""),
    "averaging, top-k": (Averaging, {"compression": hvdp.Compression.topk(0.1)}, ""),
    "averaging, optimizer state": (Averaging, {"optimizer_state": "average"}, ""),
    "elastic averaging, window": (EASGD, {}, "window"),
    "elastic averaging, service": (EASGD, {}, "service"),
    "AGN, window": (AGN, {}, "window"),
    "AGN, service": (AGN, {}, "service"),
}
"""Algorithm, options, and the transport of asynchronous exchange."""


def init() -> Communicator:
    """Initialize Horovod, or torch.distributed; return all ranks."""
    hvd.init()
    torch.set_num_threads(1)
    if not hvd.mpi_enabled():
        for mode in [mode for mode, (*_, transport) in MODES.items() if transport]:
            del MODES[mode]
    return communicator_of(None)


def trainer(algorithm: Any, options: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what trains until the next exchange, and what ends training."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    local = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer, inputs = hvdp.PeriodicOptimizer(local, model, algorithm, 2, **options), torch.randn(4, 64)

    def exchange() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    return exchange, optimizer.finalize
