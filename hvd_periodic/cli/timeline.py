"""Turn a run log into a trace: exchanges, handshakes and waiting of all ranks, for Perfetto or chrome://tracing.

  hvdp timeline runs/easgd -o trace.json              # then open it at ui.perfetto.dev
  hvdp timeline runs/easgd --json | gzip > trace.gz   # a trace is JSON; both read it compressed, too

A process of the trace is a rank, and a thread of it an optimizer. An exchange lasts from the moment when a rank is
ready to meet the others until it resumes training; its first part, named handshake, is the one in which it waits
until all have arrived. Arrows lead from the rank that arrived last to the ranks that waited for it. With a quorum, a
round says who was in it, how long after its close the others came, and the waiting that saved. Clocks of hosts
differ: on several hosts, they are aligned by the ends of handshakes, which are simultaneous on all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hvd_periodic.cli import output, runs
from hvd_periodic.cli.rounds import RoundSummary, clocks, rounds_of
from hvd_periodic.cli.usage_error import UsageError, as_usage_error
from hvd_periodic.journal.base import Report
from hvd_periodic.journal.lines import seconds_of
from hvd_periodic.journal.runs import Part, Run, Segment

Event = dict[str, Any]

_OFTEN = 1000
"""Exchanges per advance of the progress bar."""


class TraceThread(NamedTuple):
    """A thread of the trace: an optimizer on one rank."""

    process: int
    thread: int


class Span(NamedTuple):
    """An exchange of one rank in whole microseconds, the precision of clocks: begin ≤ met ≤ end."""

    report: Report
    begin: int
    met: int
    end: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    runs.add_runs(parser, several=False)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="trace to write: .json")
    parser.add_argument("--json", action="store_true", help="print the trace, which is JSON; write a file only with -o")


def run(arguments: argparse.Namespace) -> int:
    """Read the log and write the trace."""
    path = runs.output_of(arguments)
    if path is not None:
        runs.check_output(path, (".json",))
    [found] = runs.read(arguments.runs, arguments.partial)
    runs.name_bad_lines([found])
    start, exchanges = _beginning(found)
    if path is not None:
        with as_usage_error("-o"), path.open("w", encoding="utf-8") as file:
            _write(file, found, start, exchanges)
    if arguments.json:
        _write(sys.stdout, found, start, exchanges)
    else:
        output.say(f"Wrote {path}: open it at ui.perfetto.dev, or in chrome://tracing")
    return 0


def _beginning(run: Run) -> tuple[float, int]:
    """Return the start of the first exchange, in seconds since 1970, and the number of exchanges of all ranks.

    Raises:
        UsageError: there is none, or the log does not say when ranks arrived.
    """
    segments = [segment for training in run.trainings for part in training.parts for segment in part.segments.values()]
    came = [report.came for segment in segments for report in segment.reports]
    if not came:
        raise UsageError("The run log contains no exchange: the run ended before the first one")
    if not all(came):
        raise UsageError("The run log does not record when ranks arrived: it was written by an earlier version")
    return min(came), len(came)


def _write(file: TextIO, run: Run, start: float, exchanges: int) -> None:
    """Write the trace, one event per line, so that a long one is never in memory as a whole."""
    with output.progress("writing the trace", exchanges) as advance:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(_events(run, start, advance)):
            text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            file.write(f"{',' if number else ''}\n{text}")
        file.write("\n]}\n")


def _events(run: Run, start: float, advance: output.Advance) -> Iterator[Event]:
    """Yield all events, in microseconds since the first exchange began."""
    arrows = count(1)
    # Viewers look up names of threads by their number alone: no two processes share a number.
    threads = {
        (rank, i): TraceThread(rank, rank * len(run.trainings) + i)
        for i, training in enumerate(run.trainings)
        for rank in training.ranks
    }
    yield from _names(run, threads)
    for i, training in enumerate(run.trainings):
        free = dict.fromkeys(training.ranks, 0)
        for part in training.parts:
            ahead, spans = clocks(part), {}
            met = {(each.number, tuple(each.members)): each for each in rounds_of(part)}
            for rank, segment in sorted(part.segments.items()):
                spans[rank] = _spans(segment, start + ahead[rank], free[rank])
                free[rank] = max((span.end for span in spans[rank]), default=free[rank])
                for number, span in enumerate(spans[rank], 1):
                    key = span.report.number or 0, tuple(sorted(span.report.members or ()))
                    yield from _exchange(span, threads[rank, i], met.get(key))
                    if number % _OFTEN == 0:
                        advance(_OFTEN)
                advance(len(spans[rank]) % _OFTEN)
            yield from _arrows(part, spans, {rank: threads[rank, i] for rank in spans}, arrows)


def _names(run: Run, threads: Mapping[tuple[int, int], TraceThread]) -> Iterator[Event]:
    """Yield the names and the order of processes and threads."""
    named: set[int] = set()
    for i, training in enumerate(run.trainings):
        hosts = {
            rank: segment.facts.get("host", "") for part in training.parts for rank, segment in part.segments.items()
        }
        for rank, host in sorted(hosts.items()):
            thread = threads[rank, i]
            if rank not in named:
                yield _meta("process_name", thread, {"name": f"rank {rank} on {host}" if host else f"rank {rank}"})
                yield _meta("process_sort_index", thread, {"sort_index": rank})
                named.add(rank)
            title = f"optimizer {training.number}: {training.parts[0].facts['algorithm']}"
            yield _meta("thread_name", thread, {"name": title})


def _spans(segment: Segment, start: float, free: int) -> list[Span]:
    """Return the exchanges of a rank; none begins before the previous one has ended.

    Clocks may be adjusted during a run: then a handshake may seem to end after its exchange, and an exchange to begin
    in the previous one. On one thread of a trace, slices must be nested or disjoint.
    """
    found = []
    for report in segment.reports:
        begin = max(_micro(report.came - start), free)
        end = max(_micro(report.time - start), begin)
        met = _micro(report.came + (report.waited or 0.0) - start)
        found.append(Span(report, begin, min(max(met, begin), end), end))
        free = end
    return found


def _exchange(span: Span, thread: TraceThread, met: RoundSummary | None) -> Iterator[Event]:
    """Yield an exchange of one rank, and the handshake in it; with a quorum, of the round that was ``met``."""
    report = span.report
    details: Event = {"step": report.step, "bytes sent": report.bytes_sent}
    more = {"loss": report.loss, "distance to the center": report.distance, "learning rate": report.learning_rate}
    known = {name: value for name, value in more.items() if value is not None}
    details |= {
        name: value if math.isfinite(value) else str(value) for name, value in known.items()
    }  # JSON has no NaN.
    name, waiting = f"exchange {report.rounds}", "handshake"
    if report.members is not None:
        name, waiting = f"round {report.number}", "waiting for the close"
        details |= {"ranks in it": ", ".join(map(str, report.members)), "rounds missed before": report.missed}
        if met is not None and met.late:
            details["came after the close"] = ", ".join(
                f"rank {rank}: {seconds_of(seconds)}" for rank, seconds in met.late.items()
            )
        if met is not None and met.saved is not None:
            details["seconds of waiting saved"] = met.saved
    elif report.waited is None:
        details["pushes of others missed"] = report.missed
    yield _slice(name, span.begin, span.end, thread, details)
    if report.waited is not None:
        yield _slice(waiting, span.begin, span.met, thread, {})


def _arrows(
    part: Part, spans: Mapping[int, list[Span]], threads: Mapping[int, TraceThread], numbers: Iterator[int]
) -> Iterator[Event]:
    """Yield an arrow from the rank that arrived last to each of the others, in every exchange that all have logged."""
    by_round: dict[int, dict[int, Span]] = {}
    for rank, of_rank in spans.items():
        for span in of_rank:
            if span.report.waited is not None:
                by_round.setdefault(span.report.number or span.report.rounds, {})[rank] = span
    for met in by_round.values():
        members = next(iter(met.values())).report.members or part.ranks
        if len(met) < len(members) or len(met) < 2:
            continue
        last = min(met, key=lambda rank: met[rank].report.waited or 0.0)
        since = met[last].begin
        for rank, span in met.items():
            # Both ends lie in the exchanges that they join; if clocks are too far apart for that, there is no arrow.
            until = min(max(span.met, since), span.end)
            if rank != last and since <= until:
                arrow = {"name": "all ranks arrived", "cat": "exchange", "id": next(numbers)}
                yield arrow | {"ph": "s", "ts": since, **_at(threads[last])}
                yield arrow | {"ph": "f", "bp": "e", "ts": until, **_at(threads[rank])}


def _micro(seconds: float) -> int:
    return max(round(1e6 * seconds), 0)


def _at(thread: TraceThread) -> Event:
    return {"pid": thread.process, "tid": thread.thread}


def _slice(name: str, since: int, until: int, thread: TraceThread, args: Event) -> Event:
    times = {"ts": since, "dur": until - since}
    return {"name": name, "cat": "exchange", "ph": "X", **times, **_at(thread), "args": args}


def _meta(what: str, thread: TraceThread, args: Event) -> Event:
    return {"name": what, "ph": "M", **_at(thread), "args": args}
