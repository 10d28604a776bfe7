"""What an exchange costs, as a multiple of one flat Horovod allreduce of the same bytes in the same run.

    mpirun -np 2 python -m tests.benchmarks.exchange --framework torch

The model has the sizes of ResNet-50: 25.6 million float32 parameters in 161 tensors. Each figure is the median of
alternating repetitions, taken on the slowest rank. Asynchronous exchanges of all ranks begin at the same moment here,
which is the worst case: they wait for each other at the center.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from math import prod
from statistics import median


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


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet-50": resnet_50_shapes,
    "small": lambda: [(50, 20)] * 20,
    "tiny": lambda: [(300, 20), (20,), ()],
}
"""Sizes of parameters: large; so small that latency is what counts; and just to see that this runs."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="default: torch")
    parser.add_argument("--repetitions", type=int, default=15, help="of each exchange (default: 15)")
    parser.add_argument("--model", choices=MODELS, default="resnet-50", help="sizes of parameters (default: resnet-50)")
    arguments = parser.parse_args()
    framework = importlib.import_module(f"tests.benchmarks.exchange_{arguments.framework}")
    hvd = framework.hvd
    hvd.init()
    shapes = MODELS[arguments.model]()
    measured, synchronizers = framework.exchanges(shapes)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(arguments.repetitions + 2):
        for name, exchange in measured.items():
            framework.slowest(0.0)  # a barrier
            started = time.perf_counter()
            exchange()
            framework.wait()
            seconds[name].append(framework.slowest(time.perf_counter() - started))
    for synchronizer in synchronizers:
        synchronizer.finalize()
    if hvd.rank() == 0:
        medians = {name: median(values[2:]) for name, values in seconds.items()}
        unit = medians["flat allreduce"]
        count = sum(prod(shape) for shape in shapes)
        print(
            f"{hvd.size()} ranks, {count / 1e6:.1f} million parameters in {len(shapes)} tensors, {arguments.framework}"
        )
        print(f"{'exchange':38} {'ms':>8} {'ratio':>6}")
        for name, value in medians.items():
            print(f"{name:38} {1e3 * value:8.2f} {value / unit:6.2f}")


if __name__ == "__main__":
    main()
