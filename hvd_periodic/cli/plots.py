"""Plots, by matplotlib, into a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_periodic.cli.refusal import RefusalError, refusing

HINT = "pip install 'hvd_periodic[cli]', or pip install matplotlib"


@dataclass(frozen=True)
class Curve:
    """A line of a panel; those of one ``color`` have one color, and ``style`` is one of matplotlib's."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        x, y: what the axes are of.
        curves: the lines.
        log: names of axes that are logarithmic.
        marks: places at which a vertical line stands, by what it says.
    """

    x: str
    y: str
    curves: Sequence[Curve]
    log: str = ""
    marks: dict[str, float] = field(default_factory=dict)


def require(path: Path | None) -> None:
    """Refuse a plot that cannot be drawn, before anything is computed for it.

    Raises:
        RefusalError: no matplotlib, no such folder, or no such kind of picture.
    """
    if path is None:
        return
    kinds = _pyplot().figure().canvas.get_supported_filetypes()
    _pyplot().close("all")
    if path.suffix.lstrip(".").lower() not in kinds:
        raise RefusalError(
            f"`--plot` must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}. Received: {path}"
        )
    if not path.absolute().parent.is_dir():
        raise RefusalError(f"`--plot`: there is no folder {path.absolute().parent}")


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, with one legend below."""
    pyplot = _pyplot()
    figure, places = pyplot.subplots(
        ncols=len(panels), figsize=(1 + 4.5 * len(panels), 5.5), squeeze=False, layout="constrained"
    )
    shown: dict[str, Any] = {}
    for axes, panel in zip(places[0], panels, strict=True):
        for curve in panel.curves:
            (line,) = axes.plot(
                curve.x, curve.y, color=f"C{curve.color % 10}", linestyle=curve.style, linewidth=1.4, label=curve.label
            )
            shown.setdefault(curve.label, line)
        for text, place in panel.marks.items():
            axes.axvline(place, color="0.75", linewidth=1, zorder=0)
            axes.annotate(text, (place, 1), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                          va="top", fontsize="small", color="0.4")  # fmt: skip
        axes.set(xlabel=panel.x, ylabel=panel.y)
        if "x" in panel.log:
            axes.set_xscale("log")
        if "y" in panel.log:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncols=min(4, len(shown)),
        frameon=False,
        fontsize="small",
    )
    figure.suptitle(title, ha="left", x=0.01)
    with refusing("--plot"):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RefusalError(f"`--plot` needs matplotlib: {HINT}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
