"""What an exchange costs, as a multiple of one flat Horovod allreduce of the same bytes in the same run.

    bash run_scripts/benchmark_exchange.sh 2 --model resnet-50

Each figure is the median of alternating repetitions, taken on the slowest rank; each repetition begins with another
exchange. Asynchronous exchanges of all ranks begin at the same moment here, which is the worst case: they wait for each
other at the center.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import TypeVar

from hvd_periodic import Compression, Wire
from tests.benchmarks import report

T = TypeVar("T")

COMPRESSIONS: dict[str, Wire] = {"int8": Compression.int8, "topk(0.01)": Compression.topk(0.01)}
"""That are measured, by what is typed after ``Compression.``"""


@dataclass(frozen=True)
class Exchange:
    """One that is measured.

    Attributes:
        run: all ranks call it together.
        finish: ends what it has started.
    """

    run: Callable[[], object]
    finish: Callable[[], object] = lambda: None


Make = Callable[[], Exchange]


@dataclass(frozen=True)
class Job:
    """Where it was measured.

    Attributes:
        ranks: of the job.
        cores: of the machine.
        parameters: elements.
        tensors: that these are in.
        framework: its name.
    """

    ranks: int
    cores: int
    parameters: int
    tensors: int
    framework: str


@dataclass(frozen=True)
class Result:
    """What was measured of an exchange.

    Attributes:
        exchange: its name.
        milliseconds: the median.
        ratio: to a flat allreduce: the median of all repetitions.
        lowest, highest: of them.
        compression: how messages travelled, as typed by users; "" is float32.
    """

    exchange: str
    milliseconds: float
    ratio: float
    lowest: float
    highest: float
    compression: str = ""


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
    "tiny": lambda: [(300, 20), (20,), ()],
    "10-thousand": lambda: [(25, 20)] * 20,
    "20-thousand": lambda: [(50, 20)] * 20,
    "1-million": lambda: [(250, 200)] * 20,
    "2-million": lambda: [(250, 400)] * 20,
    "5-million": lambda: [(500, 500)] * 20,
    "10-million": lambda: [(1000, 500)] * 20,
    "resnet-50": resnet_50_shapes,
    "100-million": lambda: [(2500, 2000)] * 20,
}
"""Sizes of parameters: just to see that this runs; 20 tensors, where latency counts, or bandwidth; and a network."""


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="default: torch")
    parser.add_argument("--model", choices=MODELS, default="resnet-50", help="sizes of parameters (default: resnet-50)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each exchange (default: 15)")
    parser.add_argument(
        "--exchanges",
        nargs="*",
        metavar="NAME",
        help="only those whose names contain one of these; others take no memory",
    )
    arguments = parser.parse_args()
    framework = importlib.import_module(f"tests.benchmarks.exchange_{arguments.framework}")
    hvd = framework.hvd
    hvd.init()
    shapes = MODELS[arguments.model]()
    makers = framework.exchanges(shapes)
    chosen = [name for name in makers if any(word in name for word in arguments.exchanges or [""])]
    made = {name: makers[name]() for name in dict.fromkeys([next(iter(makers)), *chosen])}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for repetition in range(arguments.repetitions + 2):
        for name, exchange in turned(list(made.items()), repetition):
            framework.slowest(0.0)  # a barrier
            started = time.perf_counter()
            exchange.run()
            framework.wait()
            seconds[name].append(framework.slowest(time.perf_counter() - started))
    for exchange in made.values():
        exchange.finish()
    if hvd.rank() == 0:
        job = Job(hvd.size(), os.cpu_count() or 1, sum(map(prod, shapes)), len(shapes), arguments.framework)
        tell(job, {name: values[2:] for name, values in seconds.items()}, arguments.json, arguments.plot)


def turned(items: list[T], places: int) -> list[T]:
    """Return a list that begins so many places later, and goes on with what was before.

    Example:
        >>> turned([1, 2, 3], 4)
        [2, 3, 1]
    """
    places %= len(items)
    return items[places:] + items[:places]


def tell(job: Job, seconds: dict[str, list[float]], file: Path | None, plot: Path | None) -> None:
    """Print what was measured, of which the first is the unit; write and draw it, where that is wanted."""
    title = f"{job.ranks} ranks, {job.parameters:,} parameters in {job.tensors} tensors, {job.framework}"
    unit = next(iter(seconds.values()))
    results = []
    for name, values in seconds.items():
        ratios = [own / flat for own, flat in zip(values, unit, strict=True)]
        compression = name.partition(", ")[2] if name.partition(", ")[2] in COMPRESSIONS else ""
        results.append(Result(name, 1e3 * median(values), median(ratios), min(ratios), max(ratios), compression))
    rows = [
        (each.exchange, f"{each.milliseconds:.2f}", f"{each.ratio:.2f}", f"{each.lowest:.2f} to {each.highest:.2f}")
        for each in results
    ]
    report.show(title, ("exchange", "ms", "ratio", "repetitions"), rows)
    ranges = {each.exchange: (each.ratio, each.lowest, each.highest) for each in results}
    report.bars(plot, title, "times a flat allreduce", ranges)
    report.write(file, asdict(job) | {"results": [asdict(each) for each in results]})


if __name__ == "__main__":
    main()
