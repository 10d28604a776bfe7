"""What the digits examples share, whatever the framework: data, the record of a run, tables and plots."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

mpl.use("Agg")
import matplotlib.pyplot as plt

TITLES = {
    "allreduce": "allreduce at every step",
    "easgd": "elastic averaging",
    "average": "model averaging",
    "agn": "accumulated gradient normalization",
    "diloco": "DiLoCo",
    "slowmo": "SlowMo",
    "bmuf": "blockwise model-update filtering",
}


@dataclass
class Digits:
    """Images as float32 of shape [m, 1, 8, 8] with values in [0, 1], and their labels."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load(rank: int, size: int) -> tuple[Digits, Digits]:
    """Return this worker's shard of the training images, and the test images that all share.

    Shards are disjoint and of equal length, so that all workers take the same number of steps.
    """
    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    length = len(train_x) // size
    shard = slice(rank * length, (rank + 1) * length)
    return Digits(train_x[shard], train_y[shard]), Digits(test_x, test_y)


@dataclass
class Run:
    """The record of one run; lists with one entry per worker are ordered by rank.

    ``losses`` and ``distances`` hold a value per local step and worker.
    """

    algorithm: str
    framework: str
    workers: int
    period: int
    steps: int
    worker_accuracy: list[float]
    center_accuracy: float
    exchanges: int
    bytes_sent: int
    exchange_seconds: float | None
    seconds: float
    losses: list[list[float]]
    distances: list[list[float]]
    exchange_steps: list[int] = field(default_factory=list)
    staleness: float | None = None
    """Of asynchronous exchange: pushes of other workers per exchange of this one."""
    schedule: str = "every"
    optimizer_state: str = "local"
    overlap: int | str = 0
    compression: str = "none"
    fragments: int = 1
    course: list[tuple[int, float]] = field(default_factory=list)
    """After every epoch: exchanges so far, and the accuracy of the center."""

    def save(self, folder: Path) -> None:
        """Write ``<algorithm>.json`` and ``<algorithm>.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.algorithm}.json").write_text(json.dumps(asdict(self)))
        _plot(self, folder / f"{self.algorithm}.png")


def folder(description: str | None, default: str) -> str:
    """Return the folder for checkpoints, the only argument of an example."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=default, help="folder for checkpoints (default: %(default)s)")
    return str(parser.parse_args().folder)


def show(runs: list[Run]) -> None:
    """Print a table with one column per run."""
    table = Table(title="Handwritten digits")
    table.add_column(f"{runs[0].workers} workers, {runs[0].framework}")
    for run in runs:
        table.add_column(run.algorithm, justify="right")
    for rank in range(max(run.workers for run in runs)):
        accuracies = [run.worker_accuracy[rank : rank + 1] for run in runs]
        table.add_row(f"accuracy of worker {rank}", *(f"{a[0]:.4f}" if a else "" for a in accuracies))
    table.add_row("accuracy of the center", *(f"[bold]{run.center_accuracy:.4f}" for run in runs))
    if len(runs) > 1:
        equal = _equal_exchanges(runs)
        table.add_row(f"after {equal} exchanges", *(_number(_accuracy_after(equal, run), "", 4) for run in runs))
    table.add_section()
    table.add_row("local steps", *(str(run.steps) for run in runs))
    table.add_row("exchanges", *(str(run.exchanges) for run in runs))
    if any(run.staleness is not None for run in runs):
        table.add_row("pushes missed per exchange", *(_number(run.staleness, "") for run in runs))
    table.add_row("MB sent per worker", *(f"{run.bytes_sent / 1e6:.2f}" for run in runs))
    table.add_row("seconds in exchanges", *(_number(run.exchange_seconds, "unknown") for run in runs))
    table.add_row("seconds of training", *(f"{run.seconds:.2f}" for run in runs))
    Console(width=100, color_system=None).print(table)


def report(args: argparse.Namespace, run: Run) -> None:
    """Print the last run, or the comparison of all if that was asked for, and name what was written."""
    if args.algorithm == "all":
        compare(args.output)
    else:
        show([run])
        print(f"Record and plot: {args.output / run.algorithm}.json, .png")


def compare(folder: Path) -> None:
    """Print all runs of a folder side by side and plot them in ``comparison.png``.

    Raises:
        SystemExit: the folder holds no run.
    """
    files = [folder / f"{algorithm}.json" for algorithm in TITLES]
    runs = [Run(**json.loads(file.read_text())) for file in files if file.exists()]
    if not runs:
        raise SystemExit(f"No runs in {folder}: train first, with --output {folder}")
    show(runs)
    equal = _equal_exchanges(runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for run in runs:
        label = f"{_title(run)}: {run.center_accuracy:.3f}, {run.exchanges} exchanges"
        (line,) = left.plot(_steps(run), _smooth(np.mean(run.losses, axis=0)), linewidth=1, label=label)
        course = [(count, 1 - accuracy) for count, accuracy in run.course if count <= equal]
        if course:
            right.plot(*zip(*course, strict=True), marker=".", linewidth=1, color=line.get_color())
    left.set(xlabel="local step", ylabel="training loss, mean of workers", yscale="log")
    right.set(xlabel=f"exchanges (all runs have at least {equal})", ylabel="test error of the center", yscale="log")
    figure.legend(
        *left.get_legend_handles_labels(), title="test accuracy of the center", loc="outside lower center", ncols=2
    )
    figure.savefig(folder / "comparison.png", dpi=150)
    print(f"Plots: {', '.join(str(folder / f'{run.algorithm}.png') for run in runs)}, {folder / 'comparison.png'}")


def _plot(run: Run, file: Path) -> None:
    """Draw the loss and, if replicas ever leave the center, their distance to it, with the exchanges marked."""
    replicas_differ = run.algorithm != "allreduce"
    figure, panels = plt.subplots(
        1 + replicas_differ,
        1,
        figsize=(8, 3.5 + 2.5 * replicas_differ),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    top, bottom = panels[0, 0], panels[-1, 0]
    for rank, losses in enumerate(run.losses):
        top.plot(_steps(run), _smooth(np.array(losses)), linewidth=1, label=f"worker {rank}")
    top.set(yscale="log", ylabel="training loss", title=f"{_title(run)}, {run.workers} workers")
    if replicas_differ:
        for rank, distances in enumerate(run.distances):
            bottom.plot(_steps(run), distances, linewidth=1, label=f"worker {rank}")
        bottom.set(ylabel="distance to the center")
        bottom.set_ylim(bottom=0)
        for axes in (top, bottom):
            for step in run.exchange_steps:
                axes.axvline(step, color="0.85", linewidth=0.8, zorder=0)
            axes.plot([], [], color="0.85", label="exchange")
    for axes in panels[:, 0]:
        axes.legend(loc="upper right")
    bottom.set(xlabel="local step")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _title(run: Run) -> str:
    schedule = "" if run.schedule == "every" else f", {run.schedule}"
    return TITLES[run.algorithm] + schedule + (", asynchronous" if run.staleness is not None else "")


def _equal_exchanges(runs: list[Run]) -> int:
    """Return the number of exchanges that every run has seen."""
    return min(run.exchanges for run in runs)


def _accuracy_after(exchanges: int, run: Run) -> float | None:
    """Return the accuracy of the center after the last epoch that had at most so many exchanges."""
    if run.exchanges == exchanges:
        return run.center_accuracy
    return next((accuracy for count, accuracy in reversed(run.course) if count <= exchanges), None)


def _number(value: float | None, otherwise: str, digits: int = 2) -> str:
    return otherwise if value is None else f"{value:.{digits}f}"


def _steps(run: Run) -> NDArray[np.int64]:
    return np.arange(1, run.steps + 1)


def _smooth(values: NDArray[np.float64], width: int = 10) -> NDArray[np.float64]:
    """Return the mean of the last ``width`` values at every step."""
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    starts = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    ends = np.arange(1, len(values) + 1)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
