"""Make a page of run logs: setup, loss, distance to the center, exchanges, bytes, waiting, and notable findings.

  hvdp report runs/easgd                               # report.html
  hvdp report runs/easgd runs/average -o both.html     # side by side
  hvdp report runs/easgd --json                        # the same numbers, for scripts

A RUN is a folder that run_log= or HVD_PERIODIC_RUN_LOG has named, with the file of every rank. The page is one file,
which makes no network requests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_periodic.cli import output, page, plots, run_summary, runs
from hvd_periodic.cli.usage_error import as_usage_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    runs.add_runs(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="page to write (default: report.html)")
    parser.add_argument("--json", action="store_true", help="print JSON; write a page only with -o")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs; write the page, and print JSON or the findings."""
    path = arguments.output or (None if arguments.json else Path("report.html"))
    if path is not None:
        runs.check_output(path, (".html", ".htm"))
        plots.require(path.with_suffix(".svg"), "-o")
    summaries = run_summary.summarize(runs.read(arguments.runs, arguments.partial))
    if path is not None:
        with as_usage_error("-o"):
            path.write_text(page.page(summaries), encoding="utf-8")
    if arguments.json:
        output.write_json({"trainings": [each.record() for each in summaries]})
        return 0
    for each in summaries:
        for finding in each.findings:
            output.say(f"{each.label}: {finding}")
    output.say(f"Wrote {path}")
    return 0
