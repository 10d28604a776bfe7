"""Tables, plots and files of what benchmarks have measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def parser(description: str | None, seen: str = "the results") -> argparse.ArgumentParser:
    """Return a parser of the options that name where to write and to draw."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help=f"also write {seen} here")
    made.add_argument("--plot", type=Path, help=f"also draw {seen} here")
    return made


def write(path: Path | None, found: Any) -> None:
    """Write what was found, where that is wanted."""
    if path:
        path.write_text(json.dumps(found, indent=1))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def bars(path: Path | None, title: str, unit: str, values: dict[str, tuple[float, float, float]]) -> None:
    """Draw a bar for each name, with its lowest and highest value, where that is wanted.

    Args:
        path: of the picture.
        title: above it.
        unit: of the values.
        values: value, lowest and highest, by name; the first on top.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(values) + 1.2), layout="constrained")
    names = list(values)[::-1]
    middles = [values[name][0] for name in names]
    ranges = [[values[n][0] - values[n][1] for n in names], [values[n][2] - values[n][0] for n in names]]
    axes.barh(names, middles, xerr=ranges, color="tab:blue", ecolor="0.3", capsize=3)
    for place, middle in enumerate(middles):
        axes.text(0.01 * max(middles), place, f"{middle:.2f}", va="center", color="white")
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


Curve = tuple[Sequence[float], Sequence[float]]
"""Places and values."""


def curves(path: Path | None, title: str, unit: str, panels: dict[str, dict[str, Curve]], base: int = 10) -> None:
    """Draw curves by name, in panels side by side, over a logarithmic axis, where that is wanted.

    Args:
        path: of the picture.
        title: above it.
        unit: of the values.
        panels: by what the places are; curves of one name have one color, those with overlap are dashed.
        base: of the logarithm.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        ncols=len(panels), figsize=(4 + 5 * len(panels), 5), sharey=True, squeeze=False, layout="constrained"
    )
    colors: dict[str, str] = {}
    for axes, (label, panel) in zip(all_axes[0], panels.items(), strict=True):
        for name, (places, values) in panel.items():
            plain = name.removesuffix(", overlap")
            color = colors.setdefault(plain, f"C{len(colors)}")
            style = "-" if plain == name else "--"
            axes.plot(places, values, color=color, linestyle=style, marker=".", label=name)
        axes.set_xscale("log", base=base)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0, 0].set_ylabel(unit)
    handles, names = all_axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(title, ha="left", x=0.01)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
