"""Draws algorithms.svg: two workers on a problem in two dimensions, by algorithm, from real runs.

python docs/figures/draw.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import hvd_periodic
from hvd_periodic import Algorithm, Communicator
from hvd_periodic.comm.threads import run

STEPS, PERIOD, RANKS = 60, 10, 2
START, HEIGHTS = np.array([-3.0, 1.6]), np.array([0.2, 1.0])
"""Where all start, and how steep the valley ½ Σ h_k x_k² is along both axes."""

ALGORITHMS: dict[str, tuple[Algorithm, Any]] = {
    "model averaging": (hvd_periodic.Averaging(), None),
    "elastic averaging, α = 0.15": (hvd_periodic.EASGD(moving_rate=0.15), None),
    "AGN": (hvd_periodic.AGN(), hvd_periodic.SGD(1.0)),
    "DiLoCo": (hvd_periodic.DiLoCo(), None),
}
GREY, COLORS = "#808080", ("#2a9d8f", "#e07a3f")
"""Readable on white and on black."""

Path2D = np.ndarray[Any, Any]


def walk(communicator: Communicator, algorithm: Algorithm, outer: Any) -> tuple[Path2D, Path2D]:
    """Return replica and center after every local step of one worker, whose valley lies a little aside."""
    noise = np.random.default_rng(communicator.rank)
    aside = np.array([0.5, -1.3]) * (2 * communicator.rank - 1)
    x = START.copy()
    optimizer = hvd_periodic.PeriodicOptimizer(
        hvd_periodic.SGD(0.15), {"x": x}, algorithm, PERIOD, outer_optimizer=outer, communicator=communicator
    )
    replica, center = [x.copy()], [x.copy()]
    for _ in range(STEPS):
        optimizer.step([HEIGHTS * (x - aside) + noise.normal(scale=0.35, size=2)])
        replica.append(x.copy())
        with optimizer.center():
            center.append(x.copy())
    return np.array(replica), np.array(center)


def draw(axes: Any, title: str, paths: Sequence[tuple[Path2D, Path2D]]) -> None:
    """Draw the valley, replicas and the center."""
    grid = np.meshgrid(np.linspace(-3.6, 1.6, 80), np.linspace(-1.9, 2.3, 80))
    axes.contour(*grid, sum(h * g**2 for h, g in zip(HEIGHTS, grid, strict=True)), 9, colors=GREY, linewidths=0.4)
    for (replica, _), color in zip(paths, COLORS, strict=True):
        for begin in range(0, STEPS, PERIOD):
            axes.plot(*replica[begin : begin + PERIOD + 1].T, color=color, linewidth=1.0)
    center = paths[0][1][::PERIOD]
    axes.plot(*center.T, color="#7b5cd6", linewidth=2.6, marker="o", markersize=4.5)
    axes.set_title(title, color=GREY, fontsize=12)
    axes.set_axis_off()


def main() -> None:
    """Run and draw all."""
    plt.rcParams["svg.hashsalt"] = "hvd_periodic"
    figure, axes = plt.subplots(1, len(ALGORITHMS), figsize=(12, 3.0))
    for ax, (title, (algorithm, outer)) in zip(axes, ALGORITHMS.items(), strict=True):
        draw(ax, title, run(RANKS, lambda communicator, a=algorithm, o=outer: walk(communicator, a, o)))
    figure.text(0.36, 0.02, "replica of worker 0", color=COLORS[0], ha="right", fontsize=11)
    figure.text(0.40, 0.02, "replica of worker 1", color=COLORS[1], ha="left", fontsize=11)
    figure.text(0.57, 0.02, "● center, after each exchange", color="#7b5cd6", ha="left", fontsize=11)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.12, wspace=0.04)
    file = Path(__file__).with_name("algorithms.svg")
    figure.savefig(file, transparent=True, metadata={"Date": None})
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    main()
