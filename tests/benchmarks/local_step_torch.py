"""Local steps of PyTorch's optimizers, on a GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from tests.benchmarks.exchange import MODELS
from tests.benchmarks.local_step import NEVER, Steps


def steps(model: str) -> Steps:
    """Return what measures a step of each optimizer, all of the same parameters."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in MODELS[model]()]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    common: dict[str, Any] = {"process_set": LocalCommunicator()}

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)

    optimizers = {
        "SGD": sgd(),
        "ModelAverageOptimizer": hvdp.ModelAverageOptimizer(sgd(), named, NEVER, **common),
        "ElasticAverageOptimizer": hvdp.ElasticAverageOptimizer(sgd(), named, NEVER, 0.1, **common),
        "ElasticAverageOptimizer, rho > 0": hvdp.ElasticAverageOptimizer(sgd(), named, NEVER, 0.1, rho=0.1, **common),
        "AGNOptimizer": hvdp.AGNOptimizer(sgd(), named, NEVER, **common),
    }
    return {name: partial(seconds, optimizer.step) for name, optimizer in optimizers.items()}


def seconds(step: Callable[[], object]) -> float:
    """Return the seconds of a step."""
    started = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
