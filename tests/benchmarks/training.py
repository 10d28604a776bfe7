"""Steps per second of training over a network, against no communication in the same run, and processor time.

    bash run_scripts/benchmark_training.sh 1gbit

Every method trains the same network on its own copy. In each repetition all of them run in turn: a period to get going,
then some periods that are measured, so that as many exchanges end in them as begin; what is under way is then waited
for. Figures are medians of the repetitions' ratios to steps without communication, with the lowest and the highest.

The processor time of an exchange is that of all threads of a rank, user and system, in the measured periods, without
that of as many steps without communication, divided by the number of exchanges; the mean of all ranks. A busy machine
changes it less than it changes the steps per second. Waiting counts where a library polls while it waits. It is also
given in copies of the parameters, from one place of memory to another, as this machine made them in the same run.

    mpirun -np 2 --mca btl self,tcp python -m tests.benchmarks.training --resting --period 2 --periods 5

measures only processor time, and needs no network: local steps sleep, and take nearly none. More algorithms, libraries
and wires take part.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import horovod.torch as hvd
import torch
from torch import nn

from tests.benchmarks import methods, peers, report, sockets
from tests.benchmarks.methods import Method

ALONE = "no communication"


@dataclass(frozen=True)
class Result:
    """What was measured of a method.

    Attributes:
        method: its name.
        milliseconds: per step, the median.
        ratio: steps per second, of those without communication: the median of all repetitions.
        lowest, highest: of them.
        processor_milliseconds: per exchange and rank, without training: the median of all repetitions.
        processor_range: the lowest and the highest.
        kernel_milliseconds: the part of it that the kernel took.
        copies: processor time of an exchange, of that of a copy of the parameters.
    """

    method: str
    milliseconds: float
    ratio: float
    lowest: float
    highest: float
    processor_milliseconds: float
    processor_range: tuple[float, float]
    kernel_milliseconds: float
    copies: float


@dataclass(frozen=True)
class Taken:
    """Times of some steps.

    Attributes:
        seconds: on the slowest rank.
        processor_seconds: of all threads of a rank, the mean of all ranks.
        kernel_seconds: those among them in which the kernel ran.
    """

    seconds: float
    processor_seconds: float
    kernel_seconds: float


class Task:
    """A network of a given size, and batches that take a given time.

    Args:
        megabytes: of float32 parameters.
        milliseconds: about as many for a local step.
    """

    def __init__(self, megabytes: float, milliseconds: float) -> None:
        width = _width(megabytes)
        self._width = width
        self.period_data = torch.randn(4096, width, generator=torch.Generator().manual_seed(hvd.rank()))
        self.batch_size = self._calibrated(milliseconds)

    def __str__(self) -> str:
        return f"batches of {self.batch_size}"

    def model(self) -> nn.Module:
        """Return a network with the same weights on all ranks."""
        return _network(self._width)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of a batch."""
        batch = self.period_data[: self.batch_size]
        return (model(batch) - batch).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimizer."""
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def _calibrated(self, milliseconds: float) -> int:
        """Return the batch size with which a step takes so long, between two that take less and more, on the root."""
        model = self.model()
        optimizer = self.optimizer(model)

        def seconds(size: int) -> float:
            self.batch_size, times = size, []
            for _ in range(7):
                started = time.perf_counter()
                methods.local_step(self, model, optimizer)
                times.append(time.perf_counter() - started)
            return median(times[2:])

        size, wanted, before = 8, milliseconds / 1e3, 0.0
        while (taken := seconds(size)) < wanted and size < len(self.period_data):
            size, before = 2 * size, taken
        part = (wanted - before) / (taken - before) if taken > wanted > before else 1.0
        chosen = size if size == 8 else round(size / 2 * (1 + part))
        return int(hvd.broadcast(torch.tensor(chosen), 0, name="batch size"))


class Resting:
    """A network of a given size that sleeps in place of computing, with gradients that stay the same.

    Args:
        megabytes: of float32 parameters.
        milliseconds: of a local step.
    """

    def __init__(self, megabytes: float, milliseconds: float) -> None:
        self._width, self._milliseconds = _width(megabytes), milliseconds
        generator = torch.Generator().manual_seed(hvd.rank())
        self._gradients = [torch.randn(p.shape, generator=generator) for p in self.model().parameters()]

    def __str__(self) -> str:
        return f"steps that sleep {self._milliseconds:g} ms"

    def model(self) -> nn.Module:
        """Return a network with the same weights on all ranks."""
        return _network(self._width)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Sleep; return a loss without influence."""
        time.sleep(self._milliseconds / 1e3)
        return torch.zeros((), requires_grad=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimizer."""
        for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        return _KeepsGradients(model.parameters(), lr=1e-3)


class _KeepsGradients(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave gradients as they are."""


def _width(megabytes: float) -> int:
    return round((megabytes * 1e6 / 4 / 3) ** 0.5)


def _network(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def measured(made: dict[str, Method], parameters: int, period: int, periods: int, repetitions: int) -> list[Result]:
    """Return what was measured of all methods."""
    copy = Copy(parameters)
    copied: list[Taken] = []
    taken: dict[str, list[Taken]] = {name: [] for name in made}
    for _ in range(repetitions):
        copied.append(timed(copy.run))
        for name, method in made.items():
            run(method, period)
            taken[name].append(timed(lambda method=method: run(method, period * periods)))  # type: ignore[misc]
            method.finish()
            wait()
    milliseconds = 1e3 * median(each.processor_seconds for each in copied) / COPIES
    alone = taken[ALONE]
    return [result(name, of_method, alone, period, periods, milliseconds) for name, of_method in taken.items()]


def result(name: str, taken: list[Taken], alone: list[Taken], period: int, periods: int, copy: float) -> Result:
    """Return what the repetitions of a method, and those without communication, amount to; a copy takes ``copy`` ms."""
    pairs = list(zip(alone, taken, strict=True))
    ratios = [before.seconds / own.seconds for before, own in pairs]
    processor = [1e3 * (own.processor_seconds - before.processor_seconds) / periods for before, own in pairs]
    kernel = [1e3 * (own.kernel_seconds - before.kernel_seconds) / periods for before, own in pairs]
    return Result(
        name,
        1e3 * median(own.seconds for own in taken) / (period * periods),
        median(ratios),
        min(ratios),
        max(ratios),
        median(processor),
        (min(processor), max(processor)),
        median(kernel),
        median(processor) / copy,
    )


COPIES = 5


class Copy:
    """Copies as much memory as the parameters take, several times.

    Args:
        elements: of float32.
    """

    def __init__(self, elements: int) -> None:
        self._source, self._target = torch.ones(elements), torch.ones(elements)

    def run(self) -> None:
        """Copy."""
        for _ in range(COPIES):
            self._target.copy_(self._source)


def run(method: Method, steps: int) -> None:
    """Take some steps."""
    for _ in range(steps):
        method.step()


def timed(function: Callable[[], object]) -> Taken:
    """Return the times that a function takes, when all ranks begin together."""
    wait()
    started, before, kernel_before = time.perf_counter(), time.process_time(), kernel_seconds()
    function()
    seconds, own = time.perf_counter() - started, (time.process_time() - before, kernel_seconds() - kernel_before)
    slowest = hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), op=hvd.Max, name="slowest")
    processor, kernel = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Average, name="processor")
    return Taken(float(slowest), float(processor), float(kernel))


def kernel_seconds() -> float:
    """Return the time that the kernel has spent for all threads of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def wait() -> None:
    """Wait for all ranks."""
    hvd.allreduce(torch.zeros(1), name="wait")


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    text = "those whose names contain one of these; others of --resting by their whole names"
    parser.add_argument("--methods", nargs="*", metavar="METHOD", help=text)
    parser.add_argument("--megabytes", type=float, default=25, help="of parameters (default: 25)")
    parser.add_argument("--milliseconds", type=float, default=48, help="about as many for a local step (default: 48)")
    parser.add_argument("--period", type=int, default=10, help="local steps between exchanges (default: 10)")
    parser.add_argument("--periods", type=int, default=3, help="that are measured (default: 3)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--resting", action="store_true", help="local steps sleep: measure processor time only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    task = (Resting if arguments.resting else Task)(arguments.megabytes, arguments.milliseconds)
    usual = (methods.EXCHANGES if arguments.resting else methods.METHODS) | sockets.METHODS | peers.METHODS
    words = arguments.methods or [""]
    known = usual | methods.METHODS | methods.EXCHANGES
    makers = {name: make for name, make in known.items() if name in usual or name in words}
    chosen = [name for name in makers if any(word in name for word in words)]
    made = {ALONE: methods.alone(task, task.model(), arguments.period)}
    made |= {name: makers[name](task, task.model(), arguments.period) for name in chosen}
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    results = measured(made, parameters, arguments.period, arguments.periods, arguments.repetitions)
    for method in made.values():
        method.leave()
    if hvd.rank() == 0:
        title = f"{hvd.size()} ranks, {arguments.megabytes} MB, period {arguments.period}, {task}"
        print("Steps per second relative to no communication; processor time per exchange and rank, without training")
        unit = "steps per second, of those without communication"
        rows = [
            (
                each.method,
                f"{each.milliseconds:.1f}",
                f"{each.ratio:.2f}",
                f"{each.lowest:.2f} to {each.highest:.2f}",
                f"{each.processor_milliseconds:.0f}",
                "{:.0f} to {:.0f}".format(*each.processor_range),
                f"{each.kernel_milliseconds:.0f}",
                f"{each.copies:.1f}",
            )
            for each in results
        ]
        columns = ("method", "ms/step", "steps/s", "repetitions", "CPU ms", "repetitions", "kernel", "copies")
        report.show(title, columns, rows)
        ranges = {each.method: (each.ratio, each.lowest, each.highest) for each in results}
        report.bars(arguments.plot, title, unit, ranges)
        report.write(arguments.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
