"""Tables and plots of what benchmarks have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def bars(path: Path, title: str, unit: str, values: dict[str, tuple[float, float, float]]) -> None:
    """Draw a bar for each name, with its lowest and highest value.

    Args:
        path: of the picture.
        title: above it.
        unit: of the values.
        values: value, lowest and highest, by name; the first on top.
    """
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


def lines(
    path: Path, title: str, labels: tuple[str, str], places: Sequence[float], curves: dict[str, Sequence[float]]
) -> None:
    """Draw a curve for each name, over places on a logarithmic axis.

    Args:
        path: of the picture.
        title: above it.
        labels: of both axes.
        places: where the curves have values.
        curves: by name; those that are named alike but for a suffix ", overlap" have one color.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colors: dict[str, str] = {}
    for name, values in curves.items():
        base = name.removesuffix(", overlap")
        color = colors.setdefault(base, f"C{len(colors)}")
        axes.plot(places, values, color=color, linestyle="-" if name == base else "--", label=name)
    axes.set_xscale("log", base=2)
    axes.set_title(title, loc="left")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
