"""Draws panels with matplotlib, into a file or as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_periodic.cli.usage_error import UsageError, as_usage_error

HINT = "pip install 'hvd_periodic[cli]', or pip install matplotlib"


@dataclass(frozen=True)
class Curve:
    """A line of a panel; equal ``color`` numbers are one color, ``style`` is one of matplotlib's, or ``"bars"``."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        x, y: labels of the axes.
        curves: the lines.
        log: names of the logarithmic axes.
        marks: locations of vertical lines, by their labels.
        absent: labels of curves without data.
    """

    x: str
    y: str
    curves: Sequence[Curve]
    log: str = ""
    marks: dict[str, float] = field(default_factory=dict)
    absent: Sequence[str] = ()


def require(path: Path | None, option: str = "--plot") -> None:
    """Refuse a plot that cannot be drawn, before anything is computed for it.

    Args:
        path: path of the picture; None: none is wanted.
        option: the option that names the path.

    Raises:
        UsageError: matplotlib or the folder is missing, or matplotlib does not write this format.
    """
    if path is None:
        return
    kinds = _pyplot(option).figure().canvas.get_supported_filetypes()
    _pyplot().close("all")
    if path.suffix.lstrip(".").lower() not in kinds:
        raise UsageError(
            f"`{option}` must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}. Received: {path}"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"`{option}`: there is no folder {path.absolute().parent}")


def draw(path: Path, title: str, panels: Sequence[Panel], option: str = "--plot") -> None:
    """Draw panels side by side, with one legend below, into the file that an option names."""
    pyplot = _pyplot()
    figure, places = pyplot.subplots(
        ncols=len(panels), figsize=(1 + 4.5 * len(panels), 5.5), squeeze=False, layout="constrained"
    )
    shown: dict[str, Any] = {}
    for axes, panel in zip(places[0], panels, strict=True):
        shown = _draw(axes, panel) | shown
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncols=min(4 if len(panels) > 1 else 2, len(shown)),
        frameon=False,
        fontsize="small",
    )
    figure.suptitle(title, ha="left", x=0.01)
    with as_usage_error(option):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


def svg(panel: Panel, name: str, legend: bool) -> str:
    """Return one panel as an SVG element of a page, whose text has the color and the font of the page.

    The name is unique on the page. A legend tells curves apart, also from curves of other figures.
    """
    pyplot = _pyplot()
    plain = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": _TEXT, "axes.edgecolor": _TEXT}
    plain |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), _TEXT)
    plain |= {"font.family": "sans-serif", "axes.prop_cycle": pyplot.cycler(color=_COLORS)}
    with pyplot.rc_context(plain):
        figure, axes = pyplot.subplots(figsize=(3.7, 2.7), layout="constrained")
        shown = _draw(axes, panel)
        axes.locator_params(axis="x", nbins=5)
        if legend:
            figure.legend(
                shown.values(), shown.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8.5
            )
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r"(id=\"|#)(?=[mp][0-9a-f]{10})", rf"\1{name}-", text)
    text = re.sub(r"font: (\S+) 'DejaVu Sans'[^;\"]*", r"font-size: \1", text)
    for number, color in enumerate(_COLORS):
        text = text.replace(color, f"var(--c{number})")
    return text.replace(_TEXT, "currentColor").replace("<svg ", '<svg aria-hidden="true" ', 1)


_TEXT = "#123456"
"""Placeholder for the color of the page's text."""

_COLORS = [f"#{number}abcde" for number in range(8)]
"""Placeholders for the colors that the page gives to curves, in a light and in a dark scheme."""


def _draw(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw a panel; return the entries of a legend, by label."""
    shown: dict[str, Any] = {}
    bars = [curve for curve in panel.curves if curve.style == "bars"]
    for curve in panel.curves:
        color = f"C{curve.color}"  # Colors of the style, reused cyclically.
        if curve.style == "bars":
            width = 0.8 / len(bars)
            left = [x - 0.4 + (bars.index(curve) + 0.5) * width for x in curve.x]
            shown.setdefault(curve.label, axes.bar(left, curve.y, width, color=color, label=curve.label))
            axes.xaxis.get_major_locator().set_params(integer=True)
            continue
        # A single point makes no line: draw a marker.
        marker = "o" if sum(math.isfinite(y) for y in curve.y) == 1 else ""
        (line,) = axes.plot(
            curve.x, curve.y, color=color, linestyle=curve.style, linewidth=1.4, marker=marker, label=curve.label
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
    return shown


def _pyplot(option: str = "--plot") -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(f"`{option}` needs matplotlib: {HINT}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
