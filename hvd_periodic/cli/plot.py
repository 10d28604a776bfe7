"""Draw one quantity of run logs: loss, distance to the center, bytes, waiting time, staleness.

  hvdp plot runs/easgd --what waiting -o waiting.png
  hvdp plot runs/easgd runs/average --what loss -o loss.svg
  hvdp plot runs/easgd --what loss --json                     # the points of its curves, for scripts

A RUN is a folder that run_log= or HVD_PERIODIC_RUN_LOG has named. For one training, there is a curve per rank (up to 8
ranks); for several, a curve per training, the mean over its ranks. If there are more exchanges than can be seen, points
are means over neighbors.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from hvd_periodic.cli import figures, output, plots, run_summary, runs
from hvd_periodic.cli.usage_error import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    runs.add_runs(parser)
    parser.add_argument("--what", choices=figures.FIGURES, default="loss", help="quantity to draw (default: loss)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="picture to write: .png, .svg, .pdf")
    parser.add_argument("--json", action="store_true", help="print the curves as JSON; draw them only with -o")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs and draw the quantity."""
    path = runs.output_of(arguments)
    plots.require(path, "-o")
    found = runs.read(arguments.runs, arguments.partial)
    runs.name_bad_lines(found)
    summaries = run_summary.summarize(found)
    figure, panel = figures.FIGURES[arguments.what], figures.panel(summaries, arguments.what)
    if panel is None:
        raise UsageError(figure.note_if_absent)
    if (note := figures.absent(panel, arguments.what)) is not None:
        warnings.warn(note, stacklevel=2)
    if path is not None:
        names = ", ".join(each.label for each in summaries if each.label not in panel.absent)
        plots.draw(path, f"{figure.title}: {names}", [panel], "-o")
    if arguments.json:
        curves = [{"label": curve.label, "x": list(curve.x), "y": list(curve.y)} for curve in panel.curves]
        head = {"what": arguments.what, "x": panel.x, "y": panel.y, "absent": list(panel.absent)}
        output.write_json(head | {"curves": curves})
    else:
        output.say(f"Wrote {path}")
    return 0
