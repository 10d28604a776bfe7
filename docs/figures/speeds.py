"""The loss of the center over time where workers differ in speed: waiting for all, for a quorum, and for nobody."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from statistics import median
from typing import Any

from docs.figures import style

RANKS, POINTS = 4, 100
"""Workers; points of a curve."""

TASKS = {
    "digits": ("handwritten digits, SGD", "loss", (0.009, 3.0), ["--looks", "200"]),
    "language": ("characters, Adam", "bits per character", (2.9, 6.0), ["--milliseconds", "12", "--seeds", "2"]),
}
"""Title, unit, bounds of the axis, and arguments of the benchmark, by its name of the task."""

METHODS = {
    "synchronous": ("synchronous", style.INK),
    "quorum of 3": ("quorum=3", style.ORANGE),
    "asynchronous": ("asynchronous", style.BLUE),
    "asynchronous, DyLU": ("asynchronous, DyLU(10)", style.VERMILLION),
    "elastic averaging, asynchronous": ("elastic averaging, asynchronous", style.GREEN),
}
"""Names and colors of curves, by the benchmark's name of the method."""

_SMALL = ["--steps", "20", "--looks", "20", "--seeds", "1", "--milliseconds", "4"]

Curve = dict[str, list[float]]


def program(task: str, file: Path, small: bool) -> list[str]:
    """Return the module that measures a task on all ranks, and its arguments."""
    more = _SMALL if small else TASKS[task][3]
    return ["tests.benchmarks.worker_speeds", "--task", task, "--json", str(file), *more]


def condensed(measured: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, Curve]]:
    """Return curves by task and method: medians over seeds of the loss that was seen last, at equally spaced times."""
    return {
        task: {name: _curve(seeds) for name, seeds in of_task.items() if name in METHODS}
        for task, of_task in measured.items()
    }


def _curve(seeds: list[dict[str, Any]]) -> Curve:
    end = min(seen["seconds"][-1] for seen in seeds)
    times = [end * (point + 1) / POINTS for point in range(POINTS)]
    losses = [median(_loss_at(time, seen) for seen in seeds) for time in times]
    return {"seconds": [round(time, 2) for time in times], "losses": [round(loss, 4) for loss in losses]}


def _loss_at(time: float, seen: dict[str, Any]) -> float:
    return float(seen["losses"][max(0, bisect_right(seen["seconds"], time) - 1)])


def draw(recorded: dict[str, dict[str, Curve]], folder: Path) -> None:
    """Draw a panel for every task."""
    figure, axes = style.new(4.9, nrows=len(TASKS))
    for ax, (task, (title, unit, bounds, _)) in zip(axes, TASKS.items(), strict=True):
        ax.axhline(recorded[task]["synchronous"]["losses"][-1], color=style.GREY, linewidth=0.7, linestyle="--")
        for name, (_, color) in METHODS.items():
            curve = recorded[task][name]
            ax.plot(curve["seconds"], curve["losses"], color=color, linewidth=1.1)
        ax.set_title(title, loc="left", pad=4)
        ax.set(ylabel=unit, ylim=bounds, xlim=(0, None))
    axes[0].set_yscale("log")
    axes[-1].set_xlabel("seconds")
    for line, (name, color) in enumerate(METHODS.values()):
        axes[1].text(0.42, 0.95 - 0.105 * line, name, color=color, va="center", transform=axes[1].transAxes)
    figure.subplots_adjust(left=0.13, right=0.98, top=0.95, bottom=0.09, hspace=0.3)
    style.save(figure, folder / "speeds.svg")
