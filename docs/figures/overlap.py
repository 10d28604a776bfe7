"""Local steps and exchanges of two ranks on one time line: waiting, overlapped, and in fragments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.figures import style

RANKS, PERIOD, SHOWN = 2, 8, 16
"""Ranks; local steps between exchanges, and of a window that is drawn."""

TITLES = {
    "waiting": "every exchange is waited for",
    "overlapped": "overlap=3",
    "in fragments": "overlap=3, fragments=2",
}

_FIRST = PERIOD + 6
"""A step shortly before an exchange."""

Times = list[list[float]]
Record = dict[str, Times]


def condensed(ranks: list[dict[str, Record]]) -> dict[str, list[Record]]:
    """Return the quickest window of every way to exchange, which least else has disturbed, in ms."""
    return {name: _window([rank[name] for rank in ranks]) for name in ranks[0]}


def _window(ranks: list[Record]) -> list[Record]:
    def bounds(first: int) -> tuple[float, float, int]:
        steps = [rank["steps"][first : first + SHOWN] for rank in ranks]
        begin, end = min(of_rank[0][0] for of_rank in steps), max(of_rank[-1][1] for of_rank in steps)
        return end - begin, begin, first

    _, zero, first = min(map(bounds, range(_FIRST, len(ranks[0]["steps"]) - SHOWN, PERIOD)))
    return [_part(rank, first, zero) for rank in ranks]


def _part(rank: Record, first: int, zero: float) -> Record:
    steps = rank["steps"][first : first + SHOWN]
    shown = {name: [one for one in times if steps[0][0] <= one[0] < steps[-1][1]] for name, times in rank.items()}
    return {name: [[round(1e3 * (time - zero), 1) for time in one] for one in times] for name, times in shown.items()}


def draw(recorded: dict[str, list[Record]], folder: Path) -> None:
    """Draw a panel for every way to exchange."""
    figure, axes = style.new(4.3, nrows=len(TITLES), sharex=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        ranks = recorded[name]
        for rank, record in enumerate(ranks):
            _draw_rank(ax, -2.2 * rank, record)
            ax.text(-2, -2.2 * rank + 0.45, f"rank {rank}", ha="right", va="center", color=style.GREY, fontsize=8)
        end = max(record["steps"][-1][1] for record in ranks)
        ax.set_title(title, loc="left", pad=4)
        ax.set_title(f"{SHOWN} steps in {end:.0f} ms", loc="right", pad=4, color=style.GREY, fontsize=8)
        ax.set(ylim=(-3.2, 1.0), yticks=[])
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="x", length=3)
    _name_parts(axes, recorded["waiting"][0], recorded["overlapped"][0])
    axes[-1].set_xlabel("ms")
    figure.subplots_adjust(left=0.12, right=0.98, top=0.94, bottom=0.1, hspace=0.42)
    style.save(figure, folder / "overlap.svg")


def _draw_rank(ax: Any, y: float, record: Record) -> None:
    """Draw the steps of one rank, what of them is exchange, and below them its messages."""
    for index, (begun, ended) in enumerate(record["steps"]):
        color = style.BLUE if index % 2 else style.SKY
        ax.barh(y, ended - begun, 0.9, begun, align="edge", color=color, linewidth=0)
    for begun, ended in record["exchanged"]:
        ax.barh(y, ended - begun, 0.9, begun, align="edge", color=style.VERMILLION, linewidth=0)
    for begun, ended in record["taken"]:
        ax.barh(y, ended - begun, 0.9, begun, align="edge", color=style.INK, linewidth=0)
    for begun, arrived in record["messages"]:
        ax.barh(y - 0.7, arrived - begun, 0.5, begun, align="edge", color=style.ORANGE, linewidth=0)


def _name_parts(axes: Any, waiting: Record, overlapped: Record) -> None:
    """Say at the first exchanges what the colors are."""
    (begun, ended), (_, arrived) = waiting["exchanged"][0], waiting["messages"][0]
    axes[0].text((begun + ended) / 2, 0.42, "waits", ha="center", va="center", color="white", fontsize=8)
    axes[0].text(arrived + 3, -0.5, "the message", va="center", fontsize=8)
    axes[0].text(waiting["messages"][1][1] + 3, -0.5, "local steps", va="center", color=style.BLUE, fontsize=8)
    axes[1].text(overlapped["taken"][0][1] + 3, -0.5, "its result is taken", va="center", fontsize=8)
