"""What a local step costs, without any exchange, as a multiple of the plain optimizer's step in the same run.

    python -m tests.benchmarks.local_step

The local optimizer is SGD with momentum. Figures are medians of alternating repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from tests.benchmarks.exchange import MODELS

NEVER = 2**30
"""Steps until the first exchange."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="of each step (default: 15)")
    parser.add_argument("--model", choices=MODELS, default="resnet-50", help="sizes of parameters (default: resnet-50)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = MODELS[arguments.model]()
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    common: dict[str, Any] = {"process_set": LocalCommunicator()}

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)

    steps: dict[str, Callable[[], Any]] = {
        "SGD": sgd().step,
        "ModelAverageOptimizer": hvdp.ModelAverageOptimizer(sgd(), named, NEVER, **common).step,
        "ElasticAverageOptimizer": hvdp.ElasticAverageOptimizer(sgd(), named, NEVER, 0.1, **common).step,
        "ElasticAverageOptimizer, rho > 0": hvdp.ElasticAverageOptimizer(
            sgd(), named, NEVER, 0.1, rho=0.1, **common
        ).step,
        "AGNOptimizer": hvdp.AGNOptimizer(sgd(), named, NEVER, **common).step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.repetitions + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    unit = median(seconds["SGD"][2:])
    print(f"{'local step':38} {'ms':>8} {'ratio':>6}")
    for name, values in seconds.items():
        print(f"{name:38} {1e3 * median(values[2:]):8.3f} {median(values[2:]) / unit:6.2f}")


if __name__ == "__main__":
    main()
