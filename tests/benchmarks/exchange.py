"""What an exchange costs, as a multiple of one flat Horovod allreduce of the same bytes in the same run.

    mpirun -np 2 python -m tests.benchmarks.exchange

The model has the sizes of ResNet-50: 25.6 million float32 parameters in 161 tensors. Each figure is the median of
alternating repetitions, taken on the slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp


def resnet_50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of ResNet-50."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for out, kernel_in, size in ((width, inputs, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, kernel_in, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def exchanges(shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name; the first is the unit."""
    torch.manual_seed(hvd.rank())
    count = sum(torch.Size(shape).numel() for shape in shapes)
    flat = torch.randn(count, device=device)
    measured: dict[str, Callable[[], Any]] = {
        "flat allreduce": lambda: hvd.allreduce_(flat, op=hvd.Sum, name="flat"),
    }
    tensors = [torch.randn(shape, device=device) for shape in shapes]

    def grouped() -> None:
        hvd.grouped_allreduce_(tensors, op=hvd.Average, name="grouped")

    measured["grouped allreduce of the parameters"] = grouped
    optimizers: dict[str, Callable[..., hvdp.PeriodicOptimizer]] = {
        "ModelAverageOptimizer": hvdp.ModelAverageOptimizer,
        "ElasticAverageOptimizer": hvdp.ElasticAverageOptimizer,
        "AGNOptimizer": hvdp.AGNOptimizer,
    }
    for name, wrap in optimizers.items():
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        measured[name] = wrap(torch.optim.SGD(parameters, lr=0.1), named, 1_000_000).synchronizer.sync
    return measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="of each exchange (default: 15)")
    parser.add_argument("--small", action="store_true", help="a model of 3 tensors, to see that this runs")
    arguments = parser.parse_args()
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
    shapes = [(300, 20), (20,), ()] if arguments.small else resnet_50_shapes()
    measured = exchanges(shapes, device)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(arguments.repetitions + 2):
        for name, exchange in measured.items():
            hvd.barrier()
            started = time.perf_counter()
            exchange()
            if device.type == "cuda":
                torch.cuda.synchronize()
            slowest = hvd.allreduce(torch.tensor(time.perf_counter() - started), op=hvd.Max, name="slowest")
            seconds[name].append(float(slowest))
    if hvd.rank() == 0:
        medians = {name: median(values[2:]) for name, values in seconds.items()}
        unit = medians["flat allreduce"]
        count = sum(torch.Size(shape).numel() for shape in shapes)
        print(f"{hvd.size()} ranks, {count / 1e6:.1f} million parameters in {len(shapes)} tensors, {device.type}")
        print(f"{'exchange':38} {'ms':>8} {'ratio':>6}")
        for name, value in medians.items():
            print(f"{name:38} {1e3 * value:8.1f} {value / unit:6.2f}")


if __name__ == "__main__":
    main()
