"""What the digits examples share, whatever the framework: flags, data, the record of a run, tables and plots."""

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

ALGORITHMS = ("allreduce", "easgd", "average", "agn")
TITLES = {
    "allreduce": "allreduce at every step",
    "easgd": "elastic averaging",
    "average": "model averaging",
    "agn": "accumulated gradient normalization",
}


def parse_arguments(
    description: str, loops: tuple[str, ...] = (), placements: tuple[str, ...] = (), checkpoints: bool = False
) -> argparse.Namespace:
    """Return the flags; they are the same for every framework, but for the choices that it has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="easgd", help="how the workers exchange")
    parser.add_argument("--period", type=int, default=10, help="local steps between exchanges")
    parser.add_argument("--moving-rate", type=float, help="easgd: moving rate; default: the largest without overshoot")
    parser.add_argument("--beta", type=float, help="easgd: moving rate times the number of workers, instead")
    parser.add_argument("--rho", type=float, default=0.0, help="easgd: elastic term in the local loss")
    parser.add_argument("--op", choices=("sum", "average"), default="sum", help="agn: over the workers' gradients")
    parser.add_argument("--asynchronous", action="store_true", help="easgd, agn: exchange without waiting for others")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the shard of each worker")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of the order of the images")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the record and the plot")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="train nothing; show the runs in FOLDER")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    if loops:
        parser.add_argument("--loop", choices=loops, default=loops[0], help="who writes the training loop")
    if placements:
        parser.add_argument("--center", choices=placements, default=placements[0], help="where the center lives")
    if checkpoints:
        text = "save here after every epoch and go on from there; SIGUSR1 stops with exit code 75"
        parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help=text)
    args = parser.parse_args()
    if args.asynchronous and args.algorithm not in ("easgd", "agn"):
        parser.error(f"--asynchronous is for easgd and agn, not for {args.algorithm}")
    if checkpoints and args.checkpoints and args.asynchronous:
        parser.error("--checkpoints are taken by all workers at the same epoch, and --asynchronous ones are not there")
    return args


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

    def save(self, folder: Path) -> None:
        """Write ``<algorithm>.json`` and ``<algorithm>.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.algorithm}.json").write_text(json.dumps(asdict(self)))
        _plot(self, folder / f"{self.algorithm}.png")


def show(runs: list[Run]) -> None:
    """Print a table with one column per run."""
    table = Table(title="Handwritten digits")
    table.add_column(f"{runs[0].workers} workers, {runs[0].framework}")
    for run in runs:
        table.add_column(run.algorithm, justify="right")
    for rank in range(max(run.workers for run in runs)):
        accuracies = [run.worker_accuracy[rank : rank + 1] for run in runs]
        table.add_row(f"accuracy of worker {rank}", *(f"{a[0]:.4f}" if a else "" for a in accuracies))
    table.add_row("accuracy of the center", *(f"[bold]{run.center_accuracy:.4f}" for run in runs), end_section=True)
    table.add_row("local steps", *(str(run.steps) for run in runs))
    table.add_row("exchanges", *(str(run.exchanges) for run in runs))
    if any(run.staleness is not None for run in runs):
        table.add_row("pushes missed per exchange", *(_number(run.staleness, "") for run in runs))
    table.add_row("MB sent per worker", *(f"{run.bytes_sent / 1e6:.2f}" for run in runs))
    table.add_row("seconds in exchanges", *(_number(run.exchange_seconds, "unknown") for run in runs))
    table.add_row("seconds of training", *(f"{run.seconds:.2f}" for run in runs))
    Console(width=100, color_system=None).print(table)


def compare(folder: Path) -> None:
    """Print all runs of a folder side by side and plot them in ``comparison.png``.

    Raises:
        SystemExit: the folder holds no run.
    """
    files = [folder / f"{algorithm}.json" for algorithm in ALGORITHMS]
    runs = [Run(**json.loads(file.read_text())) for file in files if file.exists()]
    if not runs:
        raise SystemExit(f"No runs in {folder}: train first, with --output {folder}")
    show(runs)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in runs:
        label = f"{_title(run)}: {run.center_accuracy:.3f}, {run.exchanges} exchanges"
        axes.plot(_steps(run), _smooth(np.mean(run.losses, axis=0)), label=label)
    axes.set(xlabel="local step", ylabel="training loss, mean of workers", yscale="log")
    axes.legend(title="test accuracy of the center")
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
    return TITLES[run.algorithm] + (", asynchronous" if run.staleness is not None else "")


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.2f}"


def _steps(run: Run) -> NDArray[np.int64]:
    return np.arange(1, run.steps + 1)


def _smooth(values: NDArray[np.float64], width: int = 10) -> NDArray[np.float64]:
    """Return the mean of the last ``width`` values at every step."""
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    starts = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    ends = np.arange(1, len(values) + 1)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
