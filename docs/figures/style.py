"""How all figures look, and how they are written: the same file from the same recording, wherever it is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

WIDTH = 4.6
"""Inches. As wide as a phone shows without making letters too small to read."""

BLUE, VERMILLION, GREEN, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9"
"""Told apart by people who see few colors. Okabe and Ito: Color universal design. 2008."""

INK, GREY, PALE = "#1a1a1a", "#666666", "#dddddd"

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def new(height: float, **grid: Any) -> tuple[Any, Any]:
    """Return a figure of this height in inches, and its axes, with nothing of what users have set."""
    plt.rcdefaults()
    plt.rcParams.update(
        {
            "svg.fonttype": "path",
            "svg.hashsalt": "hvd_periodic",
            "font.size": 8.5,
            "axes.titlesize": 9,
            "axes.labelsize": 8.5,
            "axes.edgecolor": GREY,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.color": INK,
            "axes.labelcolor": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "path.simplify": False,
        }
    )
    return plt.subplots(figsize=(WIDTH, height), **grid)


def save(figure: Any, file: Path) -> None:
    """Write a figure on a white ground, without a date, and with numbers that other processors round alike."""
    figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)
    text = NUMBER.sub(lambda number: _rounded(float(number[0])), file.read_text())
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def _rounded(number: float) -> str:
    """Return a hundredth of a point where it is a place, and more digits where it may be the scale of a letter."""
    return f"{number:.2f}" if abs(number) >= 1 else f"{number:.4f}"
