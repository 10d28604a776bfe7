"""Who holds what of the center, and what every rank hands to collectives in one exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from docs.figures import style

RANKS = 3
PLACES = ("replicated", "root", "sharded")
HELD = {
    "replica": ("x", "replica", style.BLUE),
    "center": ("c", "center", style.INK),
    "state": ("s", "optimizer state", style.GREEN),
}
COLLECTIVES = {
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
}
"""In the order in which they follow each other."""

_FULL, _COLUMN, _ROW, _BAR = 8.7, 10.5, 8.4, 0.9
"""Width of as many bytes as the model has; from rank to rank; from place to place; height of a bar."""

Record = dict[str, dict[str, dict[str, int]]]


def condensed(ranks: list[Record]) -> list[Record]:
    """Return what is drawn of a recording: all of it."""
    return ranks


def draw(ranks: list[Record], folder: Path) -> None:
    """Draw a column for every rank, and a row for every place of the center."""
    figure, ax = style.new(4.9)
    for rank in range(len(ranks)):
        ax.text(rank * _COLUMN + 0.9, 0.3, f"rank {rank}" + (", the root" if rank == 0 else ""), weight="bold")
    for row, place in enumerate(PLACES):
        top = -0.4 - row * _ROW
        ax.axhline(top, color=style.PALE, linewidth=0.8)
        ax.text(0, top - 0.5, f'center="{place}"', va="top", family="monospace")
        for rank, record in enumerate(ranks):
            left = rank * _COLUMN + 0.9
            _draw_held(ax, left, top - 2.9, rank / len(ranks), record[place]["held"], named=row == 0)
            _draw_sent(ax, left, top - 6.3, record[place])
    ax.set(xlim=(-0.1, _COLUMN * len(ranks) - 0.6), ylim=(-0.4 - len(PLACES) * _ROW, 1.2))
    ax.set_axis_off()
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    style.save(figure, folder / "placements.svg")


def _draw_held(ax: Any, left: float, top: float, offset: float, held: dict[str, int], named: bool) -> None:
    """Draw what one rank holds, each in its place within the whole; ``offset`` is where its part begins."""
    whole = held["replica"]
    for line, (key, (letter, name, color)) in enumerate(HELD.items()):
        y = top - 1.05 * line
        begin = offset * _FULL if held[key] < whole else 0.0
        ax.text(left - 0.25, y + 0.4, letter, ha="right", va="center", style="italic")
        ax.add_patch(Rectangle((left, y), _FULL, _BAR, facecolor="none", edgecolor=style.PALE, linewidth=0.8))
        ax.add_patch(Rectangle((left + begin, y), held[key] / whole * _FULL, _BAR, color=color, linewidth=0))
        if named:
            ax.text(left + 0.3, y + 0.42, name, va="center", color="white", fontsize=8)


def _draw_sent(ax: Any, left: float, y: float, record: dict[str, dict[str, int]]) -> None:
    """Draw what one rank hands to each collective."""
    whole, sent = record["held"]["replica"], record["sent"]
    for collective, name in COLLECTIVES.items():
        nbytes = sent.get(collective, 0)
        if nbytes:
            ax.add_patch(Rectangle((left, y), nbytes / whole * _FULL, _BAR, color=style.ORANGE, linewidth=0))
            ax.text(left + 0.3, y + 0.42, f"{name} {nbytes / 1e6:g} MB", va="center", fontsize=8)
            y -= 1.05
