"""Loss against time where workers differ in speed: waiting for all, for a quorum, and for nobody.

    mpirun -np 4 --oversubscribe python -m tests.benchmarks.worker_speeds --task digits --plot results.png

The steps of worker i take ``SPEEDS[i]`` times as long as those of the first: after its computation each worker sleeps,
so that what is measured is not how four processes share two cores. The network is small enough for the computation of
the fastest worker to be at most a quarter of its step; the table says what it was.

Synchronously, all workers take the same number of steps; every other method trains for as long as that takes. The root
looks at the center some times. Final losses are means of the last ten looks. "Samples" are those that all workers
together have taken: a method without waiting takes more of them in the same time. At equal samples, both losses are
means over the same samples, the last twentieth: ten looks of a faster method go further back in its samples.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, ClassVar, Protocol

import horovod.torch as hvd
import torch
from torch import nn

import hvd_periodic.torch as hvdp
from tests.benchmarks import report
from tests.benchmarks.language import Language, Library

SPEEDS = (1.0, 1.3, 2.6, 5.7)
"""Durations of the workers' steps, relative to the fastest; the first to fourth of arXiv 2401.09135."""

LAST = 10
"""Looks of which the mean is a loss."""

LAST_PART = 1 / 20
"""Part of the samples over which losses are compared."""

SYNCHRONOUS = "synchronous"


class Task(Protocol):
    """What is trained."""

    def model(self) -> nn.Module:
        """Return a network."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimizer."""

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the next batch of this worker."""

    def evaluate(self, model: nn.Module) -> float:
        """Return the loss that is compared."""


class Digits:
    """Images of digits, of which each worker has a part; the loss is that of all images.

    Attributes:
        batch: images in a batch.
        decay: weight decay λ of the local optimizer; the loss includes its λ/2 ‖w‖².
        shared: every worker draws from all images.
    """

    batch: ClassVar[int] = 16
    decay: ClassVar[float] = 0.0
    shared: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
        self._images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
        self._labels = torch.tensor(found.target)[order]
        self._own = torch.arange(len(order)) if self.shared else torch.arange(rank, len(order), size)
        self._generator = torch.Generator().manual_seed(100 * seed + rank)

    def model(self) -> nn.Module:
        """Return a perceptron."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return plain SGD: local momentum adds to that of the center."""
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=self.decay)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of random images of this worker."""
        batch = self._own[torch.randint(len(self._own), (self.batch,), generator=self._generator)]
        return nn.functional.cross_entropy(model(self._images[batch]), self._labels[batch])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the loss of all images."""
        penalty = self.decay / 2 * sum(parameter.square().sum().item() for parameter in model.parameters())
        return nn.functional.cross_entropy(model(self._images), self._labels).item() + penalty


class RegularizedDigits(Digits):
    """Digits with weight decay, larger batches, and all images for every worker.

    The loss has a minimum above 0, which is the same whichever worker takes how many steps. With parts of the data,
    those of faster workers count more, and without weight decay, the loss goes on falling, so that every delay shows.
    """

    batch: ClassVar[int] = 64
    decay: ClassVar[float] = 1e-3
    shared: ClassVar[bool] = True


class Text:
    """The language model of ``benchmarks.language``, smaller; the loss is that of text held out."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self._library = Library(rank, size, 8, 32, 3e-3)

    def model(self) -> nn.Module:
        """Return a transformer of one layer."""
        return Language(32, 1, 32)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam."""
        return self._library.optimizer(model)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of a batch of this worker."""
        return self._library.loss(model)

    def evaluate(self, model: nn.Module) -> float:
        """Return bits per character."""
        return self._library.bits(model, 2)


TASKS: dict[str, Callable[[int, int, int], Task]] = {
    "digits": Digits,
    "regularized": RegularizedDigits,
    "language": Text,
}


def methods(arguments: argparse.Namespace) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return algorithm, schedule and options by name."""
    period = arguments.period
    grace = arguments.grace * period * arguments.milliseconds / 1000
    diloco = hvdp.DiLoCo(outer_learning_rate=arguments.outer_learning_rate, outer_momentum=arguments.outer_momentum)
    return {
        SYNCHRONOUS: (diloco, period, {}),
        "quorum of 3": (diloco, period, {"quorum": 3}),
        "asynchronous": (diloco, period, {"asynchronous": True}),
        "asynchronous, DyLU": (diloco, hvdp.DyLU(period), {"asynchronous": True}),
        "asynchronous, DyLU, grace": (diloco, hvdp.DyLU(period), {"asynchronous": True, "grace_seconds": grace}),
        "elastic averaging, asynchronous": (hvdp.EASGD(), period, {"asynchronous": True}),
    }


@dataclass(frozen=True)
class Seen:
    """What was seen of a method.

    Attributes:
        seconds: when the root looked at the center.
        steps: that all workers together had taken by then.
        losses: of the center.
        computation: largest part of a step that a worker computed.
    """

    seconds: list[float]
    steps: list[int]
    losses: list[float]
    computation: float

    def final(self) -> float:
        """Return the mean of the last looks."""
        return mean(self.losses[-LAST:])

    def at(self, steps: int) -> float:
        """Return the mean loss over the last part of so many steps of all workers together."""
        first = bisect_right(self.steps, steps * (1 - LAST_PART))
        end = bisect_right(self.steps, steps)
        return mean(self.losses[min(first, end - 1) : end])

    def reaches(self, loss: float) -> float:
        """Return the seconds after which the mean of the last looks is at most ``loss``; infinity if it never is."""
        for i in range(LAST, len(self.losses) + 1):
            if mean(self.losses[i - LAST : i]) <= loss:
                return self.seconds[i - 1]
        return float("inf")


def train(task: Task, method: tuple[Any, Any, dict[str, Any]], arguments: argparse.Namespace) -> Seen:
    """Train with a method; return what was seen, on the root."""
    rank, (algorithm, schedule, options) = hvd.rank(), method
    model = task.model()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvdp.PeriodicOptimizer(task.optimizer(model), model, algorithm, schedule, **options)
    duration = SPEEDS[rank % len(SPEEDS)] * arguments.milliseconds / 1000
    slowest = max(SPEEDS[: hvd.size()]) * arguments.milliseconds / 1000
    seconds, waits = arguments.steps * slowest, not options
    took, looks, computed = [], [], []
    optimizer.synchronizer.begin()
    hvd.barrier()
    started = time.perf_counter()
    while len(took) < arguments.steps if waits else time.perf_counter() - started < seconds:
        began = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model).backward()
        computed.append(time.perf_counter() - began)
        if rank == 0 and began - started >= len(looks) * seconds / arguments.looks:
            with optimizer.center():
                looks.append((began - started, task.evaluate(model)))
        time.sleep(max(0.0, duration - (time.perf_counter() - began)))
        optimizer.step()
        took.append(time.perf_counter() - started)
    optimizer.finalize()
    ranks = hvd.allgather_object((took, median(computed) / duration))
    times = sorted(step for steps, _ in ranks for step in steps)
    at, losses = zip(*looks, strict=True) if looks else ((), ())
    return Seen(list(at), [bisect_right(times, each) for each in at], list(losses), max(part for _, part in ranks))


def tell(runs: dict[str, list[Seen]], arguments: argparse.Namespace) -> None:
    """Print medians over seeds; write and draw all, where that is wanted."""
    budget = arguments.steps * hvd.size()
    reference = [seen.final() for seen in runs[SYNCHRONOUS]]
    rows = []
    for name, seeds in runs.items():
        faster = [
            seen.reaches(loss) / waiting.seconds[-1]
            for seen, loss, waiting in zip(seeds, reference, runs[SYNCHRONOUS], strict=True)
        ]
        equal = [seen.at(budget) / waits.at(budget) for seen, waits in zip(seeds, runs[SYNCHRONOUS], strict=True)]
        final = median(seen.final() for seen in seeds)
        steps = median(seen.steps[-1] / budget for seen in seeds)
        part = max(seen.computation for seen in seeds)
        figures = (f"{steps:.2f}", f"{median(faster):.2f}", f"{median(equal):.3f}", f"{part:.2f}")
        rows.append((name, f"{final:.4f}", *figures))
    title = f"{arguments.task}, {hvd.size()} workers, steps of 1 : 1.3 : 2.6 : 5.7, period {arguments.period}"
    columns = ("method", "final loss", "samples", "time to that loss", "loss at equal samples", "computation")
    report.show(title, columns, rows)
    panel = {name: (seeds[0].seconds[1:], seeds[0].losses[1:]) for name, seeds in runs.items()}
    report.curves(arguments.plot, title, "loss of the center", {"seconds": panel})
    report.write(arguments.json, {name: [asdict(seen) for seen in seeds] for name, seeds in runs.items()})


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--task", choices=tuple(TASKS), default="digits", help="(default: digits)")
    parser.add_argument("--methods", nargs="*", default=[""], help="only those whose names contain one of these")
    parser.add_argument("--steps", type=int, default=400, help="of each worker, synchronously (default: 400)")
    parser.add_argument("--period", type=int, default=10, help="local steps between exchanges (default: 10)")
    parser.add_argument("--outer-learning-rate", type=float, default=0.7, help="of DiLoCo (default: 0.7)")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of DiLoCo (default: 0.9)")
    parser.add_argument("--grace", type=float, default=0.3, help="part of the fastest worker's period (default: 0.3)")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of the fastest worker's step (default: 10)")
    parser.add_argument("--looks", type=int, default=100, help="at the center (default: 100)")
    parser.add_argument("--seeds", type=int, default=3, help="of which to take medians (default: 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    runs: dict[str, list[Seen]] = {}
    for seed in range(arguments.seeds):
        for name, method in methods(arguments).items():
            if name == SYNCHRONOUS or any(word in name for word in arguments.methods):
                torch.manual_seed(seed)
                task = TASKS[arguments.task](hvd.rank(), hvd.size(), seed)
                runs.setdefault(name, []).append(train(task, method, arguments))
    if hvd.rank() == 0:
        tell(runs, arguments)


if __name__ == "__main__":
    main()
