"""The buckets of one exchange: packed, on their way, and taken, each while others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.figures import style

RANKS = 2
PARTS = {
    "packed": ("message formed, packed", style.BLUE),
    "travels": ("sent, and summed over ranks", style.ORANGE),
    "taken": ("center moved, replica unpacked", style.GREEN),
}


def condensed(ranks: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Return the buckets of the first rank in the quickest of all exchanges, which least else has disturbed, in ms."""
    one = min(ranks[0]["exchanges"][1:], key=lambda one: one["finish"][-1][1] - one["begin"][0][0])
    zero = one["begin"][0][0]
    rows = zip(one["begin"], one["messages"], one["finish"], strict=True)
    return [
        {
            "packed": _in_ms(zero, begin[0], message[0]),
            "travels": _in_ms(zero, message[0], message[1]),
            "taken": _in_ms(zero, max(finish[0], message[1]), finish[1]),
        }
        for begin, message, finish in rows
    ]


def _in_ms(zero: float, *times: float) -> list[float]:
    return [round(1e3 * (time - zero), 1) for time in times]


def draw(recorded: list[dict[str, list[float]]], folder: Path) -> None:
    """Draw a line for every bucket, from top to bottom."""
    figure, ax = style.new(2.7)
    for row, bucket in enumerate(recorded):
        for part, (begin, end) in bucket.items():
            ax.barh(-row, end - begin, 0.72, begin, color=PARTS[part][1], linewidth=0)
    for line, (name, color) in enumerate(PARTS.values()):
        ax.plot(0.46, 0.95 - 0.09 * line, "s", color=color, transform=ax.transAxes)
        ax.text(0.49, 0.95 - 0.09 * line, name, va="center", transform=ax.transAxes)
    ax.set_yticks([-row for row in range(len(recorded))], [f"bucket {row}" for row in range(len(recorded))])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms")
    figure.subplots_adjust(left=0.14, right=0.98, top=0.97, bottom=0.16)
    style.save(figure, folder / "buckets.svg")
