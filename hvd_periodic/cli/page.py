"""Renders one HTML page about trainings, with numbers, figures and findings; it makes no network requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from hvd_periodic.cli import figures, output, plots
from hvd_periodic.cli.run_summary import RankSummary, RunSummary, edges
from hvd_periodic.journal.lines import bytes_of, seconds_of
from hvd_periodic.version import __version__

UNKNOWN = "unknown"


def page(summaries: Sequence[RunSummary]) -> str:
    """Return the HTML of the page."""
    labels = ", ".join(summary.label for summary in summaries)
    template = Template(files("hvd_periodic.cli").joinpath("report.html").read_text(encoding="utf-8"))
    begun = min(summary.begun for summary in summaries)
    trainings = "1 training" if len(summaries) == 1 else f"{len(summaries)} trainings"
    return template.substitute(
        title=escape(f"Exchanges of {labels}"),
        subtitle=escape(f"{trainings}; the first started {_date(begun)}."),
        body="\n".join(_body(summaries)),
        version=__version__,
    )


def _body(summaries: Sequence[RunSummary]) -> Iterator[str]:
    yield "<h2>Findings</h2>"
    yield '<div class="grid">' + "".join(_findings(summary, len(summaries) > 1) for summary in summaries) + "</div>"
    yield "<h2>Training</h2>" if len(summaries) == 1 else "<h2>Comparison</h2>"
    yield _table(
        "card",
        "Settings and totals, from the logs.",
        ["", *(summary.label for summary in summaries)],
        _properties(summaries),
    )
    yield "<h2>Figures</h2>"
    yield '<div class="grid">' + "".join(_figures(summaries)) + "</div>"
    for summary in summaries:
        yield f"<h2>Ranks of {escape(summary.label)}</h2>"
        yield _table("card ranks", "Totals over all exchanges, by rank.", *_ranks(summary))


def _findings(summary: RunSummary, several: bool) -> str:
    head = f"<h3>{escape(summary.label)}</h3>" if several else ""
    items = "".join(f"<li>{escape(finding)}</li>" for finding in summary.findings)
    shown = f'<ul class="findings">{items}</ul>' if items else "<p>None.</p>"
    return f'<section class="card">{head}{shown}</section>'


def _figures(summaries: Sequence[RunSummary]) -> Iterator[str]:
    with output.progress("drawing", len(figures.FIGURES)) as advance:
        for what, figure in figures.FIGURES.items():
            advance(0, f"drawing: {figure.title}")
            yield _figure(summaries, what)
            advance(1)


def _figure(summaries: Sequence[RunSummary], what: str) -> str:
    """Return a figure, or a note if no log has its quantity."""
    figure, panel = figures.FIGURES[what], figures.panel(summaries, what)
    head = f"<h3>{escape(figure.title)}</h3>"
    if panel is None:
        return f'<figure class="card">{head}<p>{escape(figure.note_if_absent)}</p></figure>'
    said = f"{figure.title}: {figure.y} over {figure.x}. {' '.join(_said(curve) for curve in panel.curves)}"
    label, legend = escape(said, quote=True), len(panel.curves) > 1 or len(summaries) > 1
    drawn, absent = plots.svg(panel, what, legend), figures.absent(panel, what)
    note = "" if absent is None else f"<p>{escape(absent)}</p>"
    return f'<figure class="card">{head}<div role="img" aria-label="{label}">{drawn}</div>{note}</figure>'


def _said(curve: plots.Curve) -> str:
    """Return a description of a curve, for screen readers."""
    known = [y for y in curve.y if y == y]
    if curve.style == "bars":
        each = ", ".join(f"{y:.3g} for rank {x:.0f}" for x, y in zip(curve.x, curve.y, strict=True))
        return f"{curve.label}: {each}."
    if not known:
        return f"{curve.label}: not a number."
    return f"{curve.label}: from {known[0]:.4g} to {known[-1]:.4g}, between {min(known):.4g} and {max(known):.4g}."


def _properties(summaries: Sequence[RunSummary]) -> list[list[str]]:
    """Return rows of settings and results of the trainings, without empty rows."""
    known = ([name, *(value(summary) for summary in summaries)] for name, value in _PROPERTIES.items())
    return [row for row in known if any(row[1:])]


def _ranks(summary: RunSummary) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of numbers by rank, without empty columns."""
    cells = {name: [value(each) for each in summary.ranks] for name, value in _COLUMNS.items()}
    columns = {name: column for name, column in cells.items() if any(column)}
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _table(kind: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{_breakable(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide {kind}" role="region" tabindex="0" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _breakable(text: str) -> str:
    """Return HTML of a text in which calls may break before an argument, for narrow columns."""
    return re.sub(r"(?<=[=(])", "<wbr>", escape(text))


def _or_nothing(value: Any, shown: Callable[[Any], str]) -> str:
    return "" if value is None else shown(value)


def _fact(name: str, shown: Callable[[Any], str] = str) -> Callable[[RunSummary], str]:
    return lambda summary: _or_nothing(summary.facts.get(name), shown)


def _period(summary: RunSummary) -> str:
    period = summary.facts.get("period")
    return (
        f"{period:,} local steps ({summary.facts.get('schedule')})"
        if period
        else str(summary.facts.get("schedule", ""))
    )


def _sum(name: str) -> Callable[[RunSummary], str]:
    return lambda summary: _or_nothing(summary.total(name), _whole)


def _mean(name: str, shown: Callable[[float], str]) -> Callable[[RunSummary], str]:
    return lambda summary: _or_nothing(summary.total(name), lambda total: shown(total / len(summary.ranks)))


def _share(name: str) -> Callable[[RunSummary], str]:
    return lambda summary: _or_nothing(summary.share(name), _percent)


def _edges(what: str) -> Callable[[RunSummary], str]:
    def value(summary: RunSummary) -> str:
        found = edges(summary, what)
        return UNKNOWN if found is None else f"{found['first']:.4g} → {found['last']:.4g}"

    return value


def _per_exchange(summary: RunSummary) -> str:
    sent, exchanges = summary.total("bytes_sent") or 0, summary.total("exchanges") or 0
    return bytes_of(sent / exchanges) if exchanges else ""


def _beginnings(summary: RunSummary) -> str:
    return ", ".join(
        f"{_date(part.facts['time'])} at step {part.facts.get('step', 0):,}" for part in summary.training.parts
    )


def _versions(summary: RunSummary) -> str:
    titles = {"framework": "", "package": "hvd_periodic ", "python": "Python "}
    return ", ".join(f"{title}{summary.facts[name]}" for name, title in titles.items() if name in summary.facts)


def _rounds(summary: RunSummary) -> str:
    without = sum(len(each.members) < len(summary.training.ranks) for each in summary.rounds)
    return f"{len(summary.rounds):,}, {without:,}" if summary.rounds else ""


def _ranks_of(summary: RunSummary) -> str:
    ranks = summary.training.ranks
    return f"{len(ranks)} ({', '.join(map(str, ranks))})" if len(ranks) <= 16 else f"{len(ranks)}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


_PROPERTIES: dict[str, Callable[[RunSummary], str]] = {
    "Algorithm": _fact("algorithm"),
    "Outer optimizer": _fact("outer_optimizer"),
    "Ranks": _ranks_of,
    "Period": _period,
    "Distance closed per exchange": _fact("closes", _percent),
    "Exchange": lambda summary: summary.waits,
    "Overlap": _fact("overlap"),
    "Fragments": _fact("fragments"),
    "Compression": _fact("compression"),
    "Center": _fact("center"),
    "Transport": _fact("transport"),
    "Parameters": _fact("elements", _whole),
    "Hosts": lambda summary: ", ".join(dict.fromkeys(each.host for each in summary.ranks)),
    "Versions": _versions,
    "Started": _beginnings,
    "Duration": lambda summary: seconds_of(summary.seconds),
    "Local steps per rank": _mean("steps", _whole),
    "Exchanges per rank": _mean("exchanges", _whole),
    "Loss, first → last": _edges("loss"),
    "Distance to the center, first → last": _edges("distance"),
    "Distance closed by all exchanges": lambda summary: _or_nothing(summary.closed, _percent),
    "Sent per rank": _mean("bytes_sent", bytes_of),
    "Sent per rank and exchange": _per_exchange,
    "Time in exchanges": _share("exchange_seconds"),
    "Time waiting for others": _share("waited"),
    "Rounds, without some ranks": _rounds,
    "Waiting saved by the quorum": lambda summary: _or_nothing(summary.waiting_saved, seconds_of),
    "Exclusions from exchanges": _sum("left_out"),
    "Updates skipped": _sum("skipped_updates"),
}


_COLUMNS: dict[str, Callable[[RankSummary], str]] = {
    "rank": lambda each: str(each.rank),
    "local steps": lambda each: _whole(each.steps),
    "exchanges": lambda each: _whole(each.exchanges),
    "time": lambda each: seconds_of(each.seconds),
    "in exchanges": lambda each: seconds_of(each.exchange_seconds),
    "waited": lambda each: _or_nothing(each.waited, seconds_of),
    "arrived last": lambda each: _or_nothing(each.last, lambda last: f"{100 * last:.0f} %"),
    "others waited for it": lambda each: _or_nothing(each.kept, seconds_of),
    "sent": lambda each: bytes_of(each.bytes_sent),
    "missed pushes or rounds, mean": lambda each: _or_nothing(each.staleness, lambda missed: f"{missed:.3g}"),
    "missed at most": lambda each: _or_nothing(each.staleness_max, _whole),
    "excluded": lambda each: _whole(each.left_out) if each.left_out else "",
    "updates skipped": lambda each: _whole(each.skipped_updates) if each.skipped_updates else "",
    "host": lambda each: each.host,
}
