"""Figures of trainings: one panel per quantity, with a curve per training, or per rank of a single training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_periodic.cli.plots import Curve, Panel
from hvd_periodic.cli.told import Told, curve

RANKS = 8
"""Maximum number of ranks for which a single training has separate curves; with more, it has their mean."""

STYLES = ("-", "--", "-.", ":")
"""Line styles: two identical curves are both visible, and color alone need not tell curves apart."""


@dataclass(frozen=True)
class Figure:
    """A quantity to draw.

    Attributes:
        title: its heading.
        x, y: labels of the axes.
        where_none: note for logs that lack the quantity.
        of_ranks: whether ranks differ in it, so that a single training shows each of them.
    """

    title: str
    x: str
    y: str
    where_none: str
    of_ranks: bool = True


FIGURES = {
    "loss": Figure(
        "Loss",
        "local step",
        "loss",
        "No loss was noted: call optimizer.synchronizer.report(loss) before step(); in Keras, add "
        "callbacks.ReportLoss(). Graphs of TensorFlow 1 note none.",
    ),
    "distance": Figure(
        "Distance to the center",
        "local step",
        "‖x − c‖₂ before an exchange",
        "No distance was measured: it is where every rank can read the center by itself, which is neither on the root "
        "nor in shards.",
    ),
    "exchanges": Figure("Exchanges", "minutes since the beginning", "exchanges", "There was no exchange.", False),
    "sent": Figure("Bytes of an exchange", "local step", "MB sent by a rank", "There was no exchange."),
    "bytes": Figure("Bytes so far", "local step", "MB sent by a rank", "There was no exchange."),
    "waiting": Figure(
        "Waiting", "rank", "seconds", "No rank waits for others: there is one, or exchange is asynchronous."
    ),
    "staleness": Figure(
        "Staleness",
        "local step",
        "pushes of others missed",
        "There is none: exchange is synchronous, and every rank takes part in all of them.",
    ),
}
"""Figures by name, in the order of the page."""


def panel(tolds: Sequence[Told], what: str) -> Panel | None:
    """Return the panel of a quantity of trainings; None if no log has it."""
    figure = FIGURES[what]
    curves = _bars(tolds) if what == "waiting" else _curves(tolds, what, figure)
    drawn = [curve for curve in curves if curve.x]
    absent = [curve.label for curve in curves if not curve.x]
    return Panel(figure.x, figure.y, drawn, absent=absent) if drawn else None


def absent(panel: Panel, what: str) -> str | None:
    """Return which trainings or ranks a panel does not show, and why; None if it shows all."""
    return f"Not shown: {', '.join(panel.absent)}. {FIGURES[what].where_none}" if panel.absent else None


def _curves(tolds: Sequence[Told], what: str, figure: Figure) -> list[Curve]:
    """Return a curve for each training, or for each rank of a single one; it is empty if no log has the quantity."""
    alone = tolds[0].ranks if len(tolds) == 1 else ()
    wanted: list[tuple[str, Told, int | None]]
    if figure.of_ranks and 1 < len(alone) <= RANKS:
        wanted = [(f"rank {each.rank}", tolds[0], each.rank) for each in alone]
    else:
        wanted = [(told.label, told, None) for told in tolds]
    found = [
        (label, curve(told, what, rank) if told.asynchronous or what != "staleness" else ([], []))
        for label, told, rank in wanted
    ]
    return [Curve(label, x, y, color, STYLES[color % len(STYLES)]) for color, (label, (x, y)) in enumerate(found)]


def _bars(tolds: Sequence[Told]) -> list[Curve]:
    """Return how long every rank has waited and, for a single training, how long others have waited for it."""
    found = []
    for color, told in enumerate(tolds):
        ranks = [each for each in told.ranks if each.waited is not None and len(told.ranks) > 1]
        label = "waited" if len(tolds) == 1 else told.label
        places = [float(each.rank) for each in ranks]
        found.append(Curve(label, places, [each.waited or 0.0 for each in ranks], color, "bars"))
        if len(tolds) == 1:
            kept = [each.kept or 0.0 for each in ranks]
            found.append(Curve("others waited for it, all together", places, kept, 1, "bars"))
    return found
