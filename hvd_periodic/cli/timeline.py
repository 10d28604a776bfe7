"""Turn a run log into a trace: exchanges, meetings and waiting of all ranks, for Perfetto or chrome://tracing.

  hvdp timeline runs/easgd -o trace.json      # then open it at ui.perfetto.dev

A process is a rank, a thread of it an optimizer. An exchange lasts from where a rank is ready to meet the others until
it trains on; where it waits for others, and from where on all have come, are parts of it. Arrows lead from the rank
that came last to those that waited for it. Clocks of hosts differ: where ranks are on several, they are set by the ends
of their meetings, which are the same moment for all.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_periodic.cli import output, runs
from hvd_periodic.cli.refusal import RefusalError, refusing
from hvd_periodic.journal.base import Report
from hvd_periodic.journal.runs import Part, Run

Event = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    runs.add_runs(parser, several=False)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace: .json")


def run(arguments: argparse.Namespace) -> int:
    """Read, and write."""
    runs.check_output(arguments.output, (".json",))
    [found] = runs.read(arguments.runs, arguments.partial)
    events = list(_events(found))
    with refusing("-o"):
        arguments.output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False))
    output.say(f"Wrote {arguments.output}: open it at ui.perfetto.dev, or in chrome://tracing")
    return 0


def _events(run: Run) -> Iterator[Event]:
    """Yield all events, in microseconds since the first beginning."""
    reports = [report for _, _, report in _all(run)]
    if not all(report.came for report in reports):
        raise RefusalError("The run log does not say when ranks came: it was written by an earlier version")
    if not reports:
        raise RefusalError("The run log tells of no exchange: the run ended before its first")
    start = min(report.came for report in reports)
    named: set[tuple[int, int]] = set()
    for thread, training in enumerate(run.trainings):
        for part in training.parts:
            ahead = clocks(part)
            for rank, segment in sorted(part.segments.items()):
                host = segment.facts.get("host", "")
                if (rank, -1) not in named:
                    yield _meta("process_name", rank, 0, f"rank {rank} on {host}")
                    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
                if (rank, thread) not in named:
                    title = f"optimizer {training.number}: {part.facts['algorithm']}"
                    yield _meta("thread_name", rank, thread, title)
                named |= {(rank, -1), (rank, thread)}
                for report in segment.reports:
                    yield from _exchange(report, rank, thread, start + ahead[rank])
            yield from _arrows(part, thread, start, ahead)


def clocks(part: Part) -> dict[int, float]:
    """Return by how many seconds the clock of every rank is ahead of the first one's: 0 on the same host."""
    reference = min(part.segments)
    hosts = {rank: segment.facts.get("host") for rank, segment in part.segments.items()}
    ends: dict[int, dict[int, float]] = {
        rank: {report.rounds: report.came + report.waited for report in segment.reports if report.waited is not None}
        for rank, segment in part.segments.items()
    }
    ahead = dict.fromkeys(part.segments, 0.0)
    for rank in part.segments:
        common = ends[rank].keys() & ends[reference].keys()
        if hosts[rank] != hosts[reference] and common:
            ahead[rank] = float(np.median([ends[rank][i] - ends[reference][i] for i in common]))
    return ahead


def _exchange(report: Report, rank: int, thread: int, start: float) -> Iterator[Event]:
    """Yield an exchange of one rank, and in it where ranks met."""
    told: Event = {"step": report.step, "bytes sent": report.bytes_sent}
    more = {"loss": report.loss, "distance to the center": report.distance, "learning rate": report.learning_rate}
    known = {name: value for name, value in more.items() if value is not None}
    told |= {name: value if math.isfinite(value) else str(value) for name, value in known.items()}  # JSON has no NaN.
    if report.missed:
        told["pushes of others missed"] = report.missed
    yield _span(f"exchange {report.rounds}", report.came, report.time, rank, thread, start, told)
    if report.waited is not None:
        yield _span("meeting", report.came, report.came + report.waited, rank, thread, start, {})


def _arrows(part: Part, thread: int, start: float, ahead: dict[int, float]) -> Iterator[Event]:
    """Yield an arrow from the rank that came last to each of the others, in every exchange for which all tell."""
    by_round: dict[int, dict[int, Report]] = {}
    for rank, segment in part.segments.items():
        for report in segment.reports:
            if report.waited is not None:
                by_round.setdefault(report.rounds, {})[rank] = report
    for number, reports in by_round.items():
        if len(reports) < len(part.ranks) or len(reports) < 2:
            continue
        last = min(reports, key=lambda rank: reports[rank].waited or 0.0)
        for rank, report in reports.items():
            if rank == last:
                continue
            flow = {"name": "all have come", "cat": "exchange", "id": f"{thread}.{part.facts['time']}.{number}.{rank}"}
            came = reports[last].came - ahead[last] - start
            met = report.came + (report.waited or 0.0) - ahead[rank] - start
            yield flow | {"ph": "s", "ts": 1e6 * came, "pid": last, "tid": thread}
            yield flow | {"ph": "f", "bp": "e", "ts": 1e6 * max(met, came), "pid": rank, "tid": thread}


def _span(name: str, since: float, until: float, rank: int, thread: int, start: float, args: Event) -> Event:
    return {
        "name": name,
        "cat": "exchange",
        "ph": "X",
        "ts": 1e6 * (since - start),
        "dur": 1e6 * max(until - since, 0.0),
        "pid": rank,
        "tid": thread,
        "args": args,
    }


def _meta(what: str, rank: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _all(run: Run) -> Iterator[tuple[Part, int, Report]]:
    for training in run.trainings:
        for part in training.parts:
            for rank, segment in part.segments.items():
                for report in segment.reports:
                    yield part, rank, report
