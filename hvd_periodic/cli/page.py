"""Makes one page about trainings, with numbers, figures and notable findings; it makes no network requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from hvd_periodic.cli import figures, output, plots
from hvd_periodic.cli.told import OfRank, Told, closed, edges
from hvd_periodic.journal.lines import bytes_of, seconds_of
from hvd_periodic.version import __version__

NOT_KNOWN = "not known"


def page(tolds: Sequence[Told]) -> str:
    """Return the HTML of the page."""
    labels = ", ".join(told.label for told in tolds)
    template = Template(files("hvd_periodic.cli").joinpath("report.html").read_text(encoding="utf-8"))
    begun = min(told.begun for told in tolds)
    trainings = "1 training" if len(tolds) == 1 else f"{len(tolds)} trainings"
    return template.substitute(
        title=escape(f"Exchanges of {labels}"),
        subtitle=escape(f"{trainings}; the first began {_date(begun)}."),
        body="\n".join(_body(tolds)),
        version=__version__,
    )


def _body(tolds: Sequence[Told]) -> Iterator[str]:
    yield "<h2>What stands out</h2>"
    yield '<div class="grid">' + "".join(_findings(told, len(tolds) > 1) for told in tolds) + "</div>"
    yield "<h2>What was trained</h2>" if len(tolds) == 1 else "<h2>Side by side</h2>"
    yield _table("card", "Of each training, by its logs.", ["", *(told.label for told in tolds)], _properties(tolds))
    yield "<h2>In pictures</h2>"
    yield '<div class="grid">' + "".join(_figures(tolds)) + "</div>"
    for told in tolds:
        yield f"<h2>Ranks of {escape(told.label)}</h2>"
        yield _table("card ranks", "Sums over all exchanges of a rank.", *_ranks(told))


def _findings(told: Told, several: bool) -> str:
    head = f"<h3>{escape(told.label)}</h3>" if several else ""
    if not told.findings:
        return f'<section class="card">{head}<p>Nothing that should be changed.</p></section>'
    items = "".join(f"<li>{escape(finding)}</li>" for finding in told.findings)
    return f'<section class="card">{head}<ul class="findings">{items}</ul></section>'


def _figures(tolds: Sequence[Told]) -> Iterator[str]:
    with output.progress("drawing", len(figures.FIGURES)) as advance:
        for what, figure in figures.FIGURES.items():
            advance(0, f"drawing: {figure.title}")
            yield _figure(tolds, what)
            advance(1)


def _figure(tolds: Sequence[Told], what: str) -> str:
    """Return a figure, or a note if no log has its quantity."""
    figure, panel = figures.FIGURES[what], figures.panel(tolds, what)
    head = f"<h3>{escape(figure.title)}</h3>"
    if panel is None:
        return f'<figure class="card">{head}<p>{escape(figure.where_none)}</p></figure>'
    said = f"{figure.title}: {figure.y} over {figure.x}. {' '.join(_said(curve) for curve in panel.curves)}"
    label, legend = escape(said, quote=True), len(panel.curves) > 1 or len(tolds) > 1
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


def _properties(tolds: Sequence[Told]) -> list[list[str]]:
    """Return rows of settings and results of trainings, without rows that are empty for all."""
    known = ([name, *(value(told) or "" for told in tolds)] for name, value in _PROPERTIES.items())
    return [row for row in known if any(row[1:])]


def _ranks(told: Told) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of numbers by rank, without columns that are empty for all ranks."""
    columns = {
        name: [value(each) for each in told.ranks]
        for name, value in _COLUMNS.items()
        if any(value(each) for each in told.ranks)
    }
    rows = [[column[i] or "" for column in columns.values()] for i in range(len(told.ranks))]
    return list(columns), rows


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


def _fact(name: str, shown: Callable[[Any], str] = str) -> Callable[[Told], str]:
    def value(told: Told) -> str:
        fact = told.facts.get(name)
        return "" if fact is None else shown(fact)

    return value


def _period(told: Told) -> str:
    period = told.facts.get("period")
    return f"{period:,} local steps ({told.facts.get('schedule')})" if period else str(told.facts.get("schedule", ""))


def _sum(name: str, shown: Callable[[Any], str], each: bool = False) -> Callable[[Told], str]:
    def value(told: Told) -> str:
        total = told.total(name)
        return "" if total is None else shown(total / len(told.ranks) if each else total)

    return value


def _share(name: str) -> Callable[[Told], str]:
    def value(told: Told) -> str:
        share = told.share(name)
        return "" if share is None else f"{100 * share:.3g} %"

    return value


def _edges(what: str) -> Callable[[Told], str]:
    def value(told: Told) -> str:
        found = edges(told, what)
        return NOT_KNOWN if found is None else f"{found['first']:.4g} → {found['last']:.4g}"

    return value


def _closed(told: Told) -> str:
    gone = closed(told.training.parts[-1])
    return "" if gone is None else f"{100 * gone:.3g} %"


def _per_exchange(told: Told) -> str:
    sent, exchanges = told.total("bytes_sent") or 0, told.total("exchanges") or 0
    return bytes_of(sent / exchanges) if exchanges else ""


def _beginnings(told: Told) -> str:
    return ", ".join(
        f"{_date(part.facts['time'])} at step {part.facts.get('step', 0):,}" for part in told.training.parts
    )


def _hosts(told: Told) -> str:
    return ", ".join(dict.fromkeys(each.host for each in told.ranks))


def _versions(told: Told) -> str:
    facts = told.facts
    own = [f"hvd_periodic {facts['package']}"] if "package" in facts else []
    python = [f"Python {facts['python']}"] if "python" in facts else []
    return ", ".join([*([facts["framework"]] if "framework" in facts else []), *own, *python])


def _ranks_of(told: Told) -> str:
    ranks = told.training.ranks
    return f"{len(ranks)} ({', '.join(map(str, ranks))})" if len(ranks) <= 16 else f"{len(ranks)}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


_PROPERTIES: dict[str, Callable[[Told], str]] = {
    "Algorithm": _fact("algorithm"),
    "Optimizer of the center": _fact("outer_optimizer"),
    "Ranks": _ranks_of,
    "Period": _period,
    "Way of the center in an exchange": _fact("closes", lambda closes: f"{100 * closes:.3g} %"),
    "Exchange": lambda told: "asynchronous" if told.asynchronous else "synchronous",
    "Overlap": _fact("overlap"),
    "Fragments": _fact("fragments"),
    "Compression": _fact("compression"),
    "Center": _fact("center"),
    "Through": _fact("transport"),
    "Parameters": _fact("elements", _whole),
    "Hosts": _hosts,
    "Versions": _versions,
    "Began": _beginnings,
    "Length": lambda told: seconds_of(told.seconds),
    "Local steps of a rank": _sum("steps", _whole, each=True),
    "Exchanges of a rank": _sum("exchanges", _whole, each=True),
    "Loss, first → last": _edges("loss"),
    "Distance to the center, first → last": _edges("distance"),
    "Way of the center in all of them": _closed,
    "Sent by a rank": _sum("bytes_sent", lambda number: bytes_of(number), each=True),
    "Sent by a rank in an exchange": _per_exchange,
    "Time in exchanges": _share("exchange_seconds"),
    "Time waiting for others": _share("waited"),
    "Exchanges left out": _sum("left_out", _whole),
    "Updates skipped": _sum("skipped_updates", _whole),
}


def _or_nothing(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


_COLUMNS: dict[str, Callable[[OfRank], str]] = {
    "rank": lambda each: str(each.rank),
    "local steps": lambda each: _whole(each.steps),
    "exchanges": lambda each: _whole(each.exchanges),
    "time": lambda each: seconds_of(each.seconds),
    "in exchanges": lambda each: seconds_of(each.exchange_seconds),
    "waited": lambda each: _or_nothing(each.waited, seconds_of),
    "came last": lambda each: _or_nothing(each.last, lambda last: f"{100 * last:.0f} %"),
    "others waited for it": lambda each: _or_nothing(each.kept, seconds_of),
    "sent": lambda each: bytes_of(each.bytes_sent),
    "missed pushes an exchange": lambda each: _or_nothing(each.staleness, lambda missed: f"{missed:.3g}"),
    "left out": lambda each: _whole(each.left_out) if each.left_out else "",
    "updates skipped": lambda each: _whole(each.skipped_updates) if each.skipped_updates else "",
    "host": lambda each: each.host,
}
