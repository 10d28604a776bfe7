"""Two workers on a problem in two dimensions, by algorithm: where they walk, and how far they have come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Ellipse

import hvd_periodic
import hvd_periodic.numpy as hvdp
from docs.figures import style
from hvd_periodic import Algorithm, Communicator
from hvd_periodic.comm.threads import run

STEPS, PERIOD, RANKS = 60, 10, 2
START, HEIGHTS = np.array([-3.0, 1.6]), np.array([0.2, 1.0])
"""Where all start, and how steep the valley ½ Σ h_k x_k² is along both axes."""

ALGORITHMS: dict[str, tuple[Algorithm, Any]] = {
    "model averaging": (hvd_periodic.Averaging(), None),
    "elastic averaging": (hvd_periodic.EASGD(), None),
    "AGN": (hvd_periodic.AGN(), hvdp.SGD(1.0)),
    "DiLoCo": (hvd_periodic.DiLoCo(), None),
    "SlowMo": (hvd_periodic.SlowMo(), None),
    "BMUF": (hvd_periodic.BMUF(), None),
}
COLORS = (style.BLUE, style.VERMILLION)

Walk = dict[str, list[list[float]]]


def recorded() -> dict[str, list[Walk]]:
    """Return what every worker saw, by algorithm."""
    return {
        name: run(RANKS, lambda communicator, a=algorithm, o=outer: walk(communicator, a, o))
        for name, (algorithm, outer) in ALGORITHMS.items()
    }


def walk(communicator: Communicator, algorithm: Algorithm, outer: Any) -> Walk:
    """Return replica and center after every local step of one worker, whose valley lies a little aside."""
    noise = np.random.default_rng(communicator.rank)
    aside = np.array([0.5, -1.3]) * (2 * communicator.rank - 1)
    x = START.copy()
    optimizer = hvdp.PeriodicOptimizer(
        hvdp.SGD(0.15), {"x": x}, algorithm, PERIOD, outer_optimizer=outer, process_set=communicator
    )
    replica, center = [x.tolist()], [x.tolist()]
    for _ in range(STEPS):
        optimizer.step([HEIGHTS * (x - aside) + noise.normal(scale=0.35, size=2)])
        replica.append([round(value, 4) for value in x.tolist()])
        with optimizer.center():
            center.append([round(value, 4) for value in x.tolist()])
    return {"replica": replica, "center": center}


def draw(walked: dict[str, list[Walk]], folder: Path) -> None:
    """Draw both figures."""
    style.save(_valley(walked), folder / "algorithms.svg")
    style.save(_course(walked), folder / "course.svg")


def _valley(walked: dict[str, list[Walk]]) -> Any:
    figure, axes = style.new(3.5, nrows=2, ncols=3)
    for ax, (title, walks) in zip(axes.flat, walked.items(), strict=True):
        for height in range(1, 8):
            width, depth = 2 * np.sqrt(height / HEIGHTS / 2)
            ax.add_patch(Ellipse((0, 0), width, depth, fill=False, color=style.PALE, linewidth=0.7))
        for worker, color in zip(walks, COLORS, strict=True):
            replica = np.array(worker["replica"])
            for begin in range(0, STEPS, PERIOD):
                ax.plot(*replica[begin : begin + PERIOD + 1].T, color=color, linewidth=0.9)
        center = np.array(walks[0]["center"])[::PERIOD]
        ax.plot(*center.T, color=style.INK, linewidth=1.8, marker="o", markersize=3.2)
        ax.set_title(title, pad=2)
        ax.set(xlim=(-3.4, 1.8), ylim=(-1.9, 2.1))
        ax.set_axis_off()
    _name_lines(figure, 0.028, "center, after each exchange")
    figure.subplots_adjust(left=0.01, right=0.99, top=0.93, bottom=0.09, wspace=0.03, hspace=0.16)
    return figure


def _course(walked: dict[str, list[Walk]]) -> Any:
    figure, axes = style.new(4.6, nrows=3, ncols=2, sharex=True, sharey=True)
    for ax, (title, walks) in zip(axes.flat, walked.items(), strict=True):
        for step in range(PERIOD, STEPS + 1, PERIOD):
            ax.axvline(step, color=style.PALE, linewidth=0.7)
        ax.axhline(0, color=style.GREY, linewidth=0.7, linestyle="--")
        for worker, color in zip(walks, COLORS, strict=True):
            replica = np.array(worker["replica"])[:, 0]
            for begin in range(0, STEPS, PERIOD):
                ax.plot(
                    range(begin, begin + PERIOD + 1), replica[begin : begin + PERIOD + 1], color=color, linewidth=0.9
                )
        center = np.array(walks[0]["center"])[:, 0]
        ax.step(range(STEPS + 1), center, where="post", color=style.INK, linewidth=1.6)
        ax.set_title(title, pad=3, loc="left")
        ax.set_xticks(range(0, STEPS + 1, 20))
    axes[0, 0].text(0.5, 0.12, "minimum", color=style.GREY, fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel("local steps")
    _name_lines(figure, 0.02, "center")
    figure.subplots_adjust(left=0.07, right=0.98, top=0.94, bottom=0.15, wspace=0.1, hspace=0.3)
    return figure


def _name_lines(figure: Any, height: float, center: str) -> None:
    for place, text, color, side in (
        (0.02, "replica of worker 0", COLORS[0], "left"),
        (0.34, "replica of worker 1", COLORS[1], "left"),
        (0.98, center, style.INK, "right"),
    ):
        figure.text(place, height, text, color=color, ha=side)
