"""The figures of a report: one panel per quantity, with a curve per training, or per rank of a single training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_periodic.cli.plots import Curve, Panel
from hvd_periodic.cli.run_summary import RunSummary, curve

RANKS = 8
"""Maximum number of ranks for which a single training has separate curves; with more, it has their mean."""

STYLES = ("-", "--", "-.", ":")
"""Line styles: two identical curves are both visible, and color alone need not tell curves apart."""


@dataclass(frozen=True)
class Figure:
    """A quantity to draw: its heading, labels of the axes, and a note for logs that lack the quantity.

    If it is of ranks, they differ in it, so that a single training shows each of them.
    """

    title: str
    x: str
    y: str
    note_if_absent: str
    of_ranks: bool = True


FIGURES = {
    "loss": Figure(
        "Loss",
        "local step",
        "loss",
        "No loss was reported: call optimizer.synchronizer.report(loss) before step(); in Keras, add "
        "callbacks.ReportLoss(). Graphs of TensorFlow 1 report none.",
    ),
    "distance": Figure(
        "Distance to the center",
        "local step",
        "‖x − c‖₂ before an exchange",
        "No distance was measured: this requires that every rank can read the center without the others, and excludes "
        "center='root' and center='sharded'.",
    ),
    "exchanges": Figure("Exchanges", "minutes since the start", "exchanges", "No exchange was logged.", False),
    "sent": Figure("Bytes of an exchange", "local step", "MB sent by a rank", "No exchange was logged."),
    "bytes": Figure("Bytes so far", "local step", "MB sent by a rank", "No exchange was logged."),
    "waiting": Figure(
        "Waiting", "rank", "seconds", "No rank waits for others: there is only one, or exchanges are asynchronous."
    ),
    "staleness": Figure(
        "Staleness",
        "local step",
        "pushes of others, or rounds, missed",
        "There is no staleness: exchanges are synchronous, and every rank takes part in all of them.",
    ),
}
"""Figures by name, in the order of the page."""


def panel(summaries: Sequence[RunSummary], what: str) -> Panel | None:
    """Return the panel of a quantity of trainings; None if no log has it."""
    figure = FIGURES[what]
    curves = _bars(summaries) if what == "waiting" else _curves(summaries, what, figure)
    drawn = [curve for curve in curves if curve.x]
    absent = [curve.label for curve in curves if not curve.x]
    return Panel(figure.x, figure.y, drawn, absent=absent) if drawn else None


def absent(panel: Panel, what: str) -> str | None:
    """Return which trainings or ranks a panel does not show, and why; None if it shows all."""
    return f"Not shown: {', '.join(panel.absent)}. {FIGURES[what].note_if_absent}" if panel.absent else None


def _curves(summaries: Sequence[RunSummary], what: str, figure: Figure) -> list[Curve]:
    """Return a curve for each training, or for each rank of a single one; it is empty if no log has the quantity."""
    alone = summaries[0].ranks if len(summaries) == 1 else ()
    wanted: list[tuple[str, RunSummary, int | None]]
    if figure.of_ranks and 1 < len(alone) <= RANKS:
        wanted = [(f"rank {each.rank}", summaries[0], each.rank) for each in alone]
    else:
        wanted = [(summary.label, summary, None) for summary in summaries]
    found = [
        (label, curve(summary, what, rank) if summary.waits != "synchronous" or what != "staleness" else ([], []))
        for label, summary, rank in wanted
    ]
    return [Curve(label, x, y, color, STYLES[color % len(STYLES)]) for color, (label, (x, y)) in enumerate(found)]


def _bars(summaries: Sequence[RunSummary]) -> list[Curve]:
    """Return how long every rank has waited and, for a single training, how long others have waited for it."""
    found = []
    for color, summary in enumerate(summaries):
        ranks = [each for each in summary.ranks if each.waited is not None and len(summary.ranks) > 1]
        label = "waited" if len(summaries) == 1 else summary.label
        places = [float(each.rank) for each in ranks]
        found.append(Curve(label, places, [each.waited or 0.0 for each in ranks], color, "bars"))
        if len(summaries) == 1:
            kept = [each.kept or 0.0 for each in ranks]
            found.append(Curve("others waited for it, in total", places, kept, 1, "bars"))
    return found
