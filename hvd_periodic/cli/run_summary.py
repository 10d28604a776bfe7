"""Summarizes the logs of a training: numbers by rank, curves, and findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvd_periodic.cli import output
from hvd_periodic.cli.rounds import RoundSummary, rounds_of
from hvd_periodic.journal.base import Report
from hvd_periodic.journal.lines import ENOUGH, seconds_of
from hvd_periodic.journal.runs import Part, Run, Segment, Training, bad_lines
from hvd_periodic.ranks import named

POINTS = 200
"""Maximum number of points of a curve; with more exchanges, points are means over several."""

_MUCH = 0.1
"""Share of the time above which waiting, or exchanging, is a finding."""

_MOSTLY = 0.6
"""Share of the exchanges above which the rank that arrives last at them is said to delay the others."""

_SEVERAL = 10
"""Minimum number of exchanges for that; with fewer, it may be chance."""


@dataclass(frozen=True)
class RankSummary:
    """Totals over all exchanges of one rank.

    Attributes:
        rank: the rank, counted over the job.
        host: its last host.
        steps, exchanges: local steps and exchanges since every start that is in the log.
        seconds: duration of training, from starts to ends.
        exchange_seconds: seconds of ``seconds`` in exchanges.
        waited: seconds of ``exchange_seconds`` until all ranks had arrived; None if ranks do not wait.
        kept: seconds for which others waited for this rank, the last to arrive, summed over them; None likewise.
        last: share of the exchanges at which it arrived last; None likewise.
        bytes_sent: bytes handed to collectives, or pushed.
        staleness: mean number of pushes of others between two of its own; with a quorum, of rounds without it; None if
            exchange is synchronous.
        staleness_max: the largest such number; None likewise.
        left_out: exchanges from which it was excluded because its replica was not finite.
        skipped_updates: local steps whose update was skipped.
    """

    rank: int
    host: str
    steps: int
    exchanges: int
    seconds: float
    exchange_seconds: float
    waited: float | None
    kept: float | None
    last: float | None
    bytes_sent: int
    staleness: float | None
    staleness_max: int | None
    left_out: int
    skipped_updates: int


@dataclass(frozen=True)
class RunSummary:
    """A training and its summary.

    Attributes:
        label: distinguishes it from the other trainings shown.
        run: the run log, a folder.
        training: the training, as read from its logs.
        ranks: totals by rank.
        findings: findings, with suggested changes.
    """

    label: str
    run: Run
    training: Training
    ranks: Sequence[RankSummary]
    findings: Sequence[str]

    @property
    def facts(self) -> Any:
        """Settings of training since its last start."""
        return self.training.parts[-1].facts

    @property
    def asynchronous(self) -> bool:
        """Whether ranks exchanged without waiting for each other."""
        return bool(self.facts.get("asynchronous"))

    @property
    def waits(self) -> str:
        """For whom ranks waited at an exchange."""
        quorum = self.facts.get("quorum")
        if quorum is not None:
            return f"with a quorum of {quorum}"
        return "asynchronous" if self.asynchronous else "synchronous"

    @cached_property
    def rounds(self) -> list[RoundSummary]:
        """The rounds with a quorum; empty without one."""
        return [each for part in self.training.parts for each in rounds_of(part)]

    @property
    def waiting_saved(self) -> float | None:
        """Seconds for which synchronous exchanges would have waited longer than these rounds; None without a quorum."""
        return sum(each.saved or 0.0 for each in self.rounds) if self.rounds else None

    @property
    def begun(self) -> float:
        """Start of the first part, in seconds since 1970."""
        return float(self.training.parts[0].facts["time"])

    @property
    def seconds(self) -> float:
        """Duration of all parts, each as long as its longest rank."""
        return sum(max(s.seconds for s in part.segments.values()) for part in self.training.parts)

    @property
    def closed(self) -> float | None:
        """Fraction of its distance to the replicas that the center has closed since the last start; None: unknown."""
        totals = [segment.total for segment in self.training.parts[-1].segments.values() if segment.total is not None]
        return next((total.closed for total in totals if total.closed is not None), None)

    def total(self, name: str) -> float | None:
        """Return the sum over ranks of one of their numbers; None if no rank has it."""
        known = [getattr(each, name) for each in self.ranks if getattr(each, name) is not None]
        return sum(known) if known else None

    def share(self, name: str) -> float | None:
        """Return the share of their time that ranks have spent on something."""
        spent, whole = self.total(name), self.total("seconds")
        return None if spent is None or not whole else spent / whole

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "label": self.label,
            "folder": str(self.run.path),
            "optimizer": self.training.number,
            "name": self.training.name,
            "facts": dict(self.facts),
            "seconds": self.seconds,
            "beginnings": [
                {"time": part.facts["time"], "step": part.facts.get("step", 0), "ranks": list(part.ranks)}
                for part in self.training.parts
            ],
            "ranks": [asdict(each) for each in self.ranks],
            "rounds": [asdict(each) for each in self.rounds],
            "waiting_saved": self.waiting_saved,
            "waiting_share": self.share("waited"),
            "exchange_share": self.share("exchange_seconds"),
            "closed": self.closed,
            "loss": edges(self, "loss"),
            "distance": edges(self, "distance"),
            "bad_lines": {name: {str(each.number): each.why for each in bad} for name, bad in self.run.bad.items()},
            "findings": list(self.findings),
        }


def summarize(runs: Sequence[Run]) -> list[RunSummary]:
    """Return summaries of all trainings of some runs, with distinct labels."""
    names = [run.path.resolve().name for run in runs]
    found = []
    with output.progress(
        "summarizing", sum(len(training.ranks) for run in runs for training in run.trainings)
    ) as advance:
        for run, name in zip(runs, names, strict=True):
            label = name if names.count(name) == 1 else str(run.path)
            for training in run.trainings:
                advance(0, f"summarizing {label}")
                ranks = list(_of_ranks(training, advance))
                several = f", optimizer {training.number} of {named(training.ranks)}"
                full = label + (several if len(run.trainings) > 1 else "")
                summary = RunSummary(full, run, training, ranks, [])
                found.append(RunSummary(full, run, training, ranks, list(_findings(summary))))
    return found


def curve(summary: RunSummary, what: str, rank: int | None = None) -> tuple[list[float], list[float]]:
    """Return a quantity over local steps, or exchanges over minutes; NaN separates the parts of a training.

    Args:
        summary: the training.
        what: ``"loss"``, ``"distance"``, ``"bytes"``, ``"sent"``, ``"staleness"`` or ``"exchanges"``.
        rank: rank to show; None: the mean over ranks that have it, or of exchanges over minutes the first rank.
    """
    x: list[float] = []
    y: list[float] = []
    sent: Counter[int] = Counter()
    value = _VALUES[what]
    for part in summary.training.parts:
        points: dict[float, list[float]] = {}
        clock = min(part.segments) if what == "exchanges" else None  # Times differ between ranks and have no mean.
        wanted = clock if rank is None else rank
        for each, segment in part.segments.items():
            if wanted not in (None, each):
                continue
            for report in segment.reports:
                sent[each] += report.bytes_sent
                found = value(report, sent[each])
                if found is not None:
                    place = (report.time - summary.begun) / 60 if what == "exchanges" else float(report.step)
                    points.setdefault(place, []).append(found)
        if points:
            places, means = _thinned(points)
            x += [*([math.nan] if x else []), *places]
            y += [*([math.nan] if y else []), *means]
    return x, y


_VALUES: dict[str, Callable[[Report, int], float | None]] = {
    "loss": lambda report, sent: report.loss,
    "distance": lambda report, sent: report.distance,
    "bytes": lambda report, sent: sent / 1e6,
    "sent": lambda report, sent: report.bytes_sent / 1e6,
    "staleness": lambda report, sent: report.missed,
    "exchanges": lambda report, sent: report.rounds,
}
"""Quantities of curves, by name, as functions of an exchange and the bytes that its rank has sent so far."""


def edges(summary: RunSummary, what: str) -> dict[str, float] | None:
    """Return the first and last value of a quantity, means over ranks; None if there is none."""
    values = [value for value in curve(summary, what)[1] if math.isfinite(value)]
    return {"first": values[0], "last": values[-1]} if values else None


def _thinned(points: dict[float, list[float]]) -> tuple[list[float], list[float]]:
    """Return points sorted by location; if there are more than can be seen, means over neighbors."""
    places = sorted(points)
    if len(places) <= POINTS:
        return places, [float(np.mean(points[place])) for place in places]
    groups = [group.tolist() for group in np.array_split(np.array(places), POINTS)]
    means = [float(np.mean([value for place in group for value in points[place]])) for group in groups]
    return [float(np.mean(group)) for group in groups], means


def _segments(training: Training, rank: int) -> list[Segment]:
    return [part.segments[rank] for part in training.parts if rank in part.segments]


def _of_ranks(training: Training, advance: output.Advance) -> Iterator[RankSummary]:
    """Yield the totals of every rank."""
    rounds = [round_ for part in training.parts for round_ in _rounds(part)]
    for rank in training.ranks:
        if _segments(training, rank):
            yield _of_rank(training, rank, rounds)
        advance(1)


def _of_rank(training: Training, rank: int, rounds: Sequence[dict[int, float]]) -> RankSummary:
    """Return the totals of one rank; a part without an end counts up to its last report."""
    segments = _segments(training, rank)
    reports = [report for segment in segments for report in segment.reports]
    waits = [report.waited for report in reports if report.waited is not None]
    met = [round_ for round_ in rounds if rank in round_]
    last = [_last(round_) == rank for round_ in met]
    kept = [sum(round_.values()) - len(round_) * round_[rank] for round_ in met if _last(round_) == rank]
    stale = bool(segments[-1].facts.get("asynchronous") or segments[-1].facts.get("quorum"))

    def ended(name: str) -> Any:
        """Return the sum of the totals, which include the last handshake; without a total, of the reports."""
        return sum(
            getattr(segment.total, name) if segment.total else sum(getattr(report, name) for report in segment.reports)
            for segment in segments
        )

    return RankSummary(
        rank,
        str(segments[-1].facts.get("host", "")),
        ended("steps"),
        len(reports),
        sum(segment.seconds for segment in segments),
        ended("seconds"),
        sum(waits) if waits else None,
        sum(kept) if met else None,
        sum(last) / len(last) if last else None,
        ended("bytes_sent"),
        sum(report.missed for report in reports) / max(len(reports), 1) if stale else None,
        max((report.missed for report in reports), default=0) if stale else None,
        ended("left_out"),
        ended("skipped_updates"),
    )


def _rounds(part: Part) -> Iterator[dict[int, float]]:
    """Yield the waiting times of the ranks in each exchange that all of several ranks in it have logged."""
    by_round: dict[tuple[int, int], dict[int, float]] = {}
    for rank, segment in part.segments.items():
        for report in segment.reports:
            if report.waited is not None:
                met = report.number or report.rounds, len(report.members or part.ranks)
                by_round.setdefault(met, {})[rank] = report.waited
    yield from (waits for (_, size), waits in by_round.items() if len(waits) == size > 1)


def _last(waits: dict[int, float]) -> int:
    """Return the rank that arrived last: it waited least. This does not require that clocks of hosts agree."""
    return min(waits, key=waits.__getitem__)


def _findings(summary: RunSummary) -> Iterator[str]:
    """Yield findings, with suggested changes."""
    yield from _of_files(summary)
    yield from _of_waiting(summary)
    working = (summary.total("exchange_seconds") or 0.0) - (summary.total("waited") or 0.0)
    share = working / (summary.total("seconds") or math.inf)
    if share > _MUCH:
        yield (
            f"Exchanges take {100 * share:.0f} % of the time, not counting waiting: exchange less often (a longer "
            "period), overlap exchanges with local steps (overlap=...), or send fewer bytes (compression=...). `hvdp "
            "plan` estimates the effect of each."
        )
    gone = summary.closed
    if gone is not None and gone < ENOUGH:
        yield (
            f"The center has closed {100 * gone:.0f} % of its distance to the replicas, and may be worse than they "
            "are: exchange more often (a shorter period), or move it further (a larger moving rate)."
        )
    for each in summary.ranks:
        if each.left_out:
            yield (
                f"Rank {each.rank} was excluded from {each.left_out} exchanges because its replica was not finite: "
                "check its learning rate, loss and data."
            )
    skipped, steps = summary.total("skipped_updates") or 0, summary.total("steps") or 0
    if steps and skipped > _MUCH * steps:
        yield (
            f"{100 * skipped / steps:.0f} % of the local steps made no update: with mixed precision, because "
            "gradients overflowed; otherwise because some ranks have less data than others."
        )
    loss = edges(summary, "loss")
    if loss is not None and loss["last"] > loss["first"]:
        yield (
            f"The loss rose from {loss['first']:.4g} to {loss['last']:.4g}. Use a smaller learning rate (that of a "
            "single worker), or exchange more often."
        )


def _of_files(summary: RunSummary) -> Iterator[str]:
    """Yield findings about the log files themselves."""
    yield from bad_lines(summary.run.bad)
    for part in summary.training.parts:
        if part.missing:
            yield f"There is no log of {named(part.missing)}: totals cover only the other ranks."
    if len(summary.training.parts) > 1:
        begun = ", ".join(f"{part.facts.get('step', 0):,}" for part in summary.training.parts)
        times = len(summary.training.parts)
        yield f"Training was started {times} times, at local steps {begun}: curves have gaps there."
    last = summary.training.parts[-1]
    open_ends = [rank for rank, segment in last.segments.items() if segment.total is None]
    if open_ends:
        yield (
            f"The log of {named(open_ends)} has no final entry: training is still running, was stopped, or did not "
            "call finalize()."
        )


def _of_waiting(summary: RunSummary) -> Iterator[str]:
    """Yield findings about long waiting, and about high staleness."""
    share = summary.share("waited")
    if share is not None and share > _MUCH:
        slowest = max(summary.ranks, key=lambda each: each.last or 0.0)
        waiting = f"Ranks wait for each other {100 * share:.0f} % of the time"
        if (slowest.last or 0.0) > _MOSTLY and slowest.exchanges >= _SEVERAL:
            yield (
                f"Rank {slowest.rank} ({slowest.host}) delays the others: it arrived last at "
                f"{100 * (slowest.last or 0):.0f} % of the exchanges, and others waited "
                f"{seconds_of(slowest.kept or 0.0)} for it. {waiting}. Check whether its steps do more than those of "
                "others, such as loading data or evaluation, and whether its device is slower or shared."
            )
        else:
            yield (
                f"{waiting}, and no single rank is the cause: exchange less often (a longer period), so that slow and "
                "fast steps even out, or asynchronously (asynchronous=True)."
            )
    if summary.rounds:
        size = len(summary.training.ranks)
        without = sum(len(each.members) < size for each in summary.rounds)
        yield (
            f"{without} of {len(summary.rounds)} rounds closed without some ranks; synchronous exchanges would have "
            f"waited {seconds_of(summary.waiting_saved or 0.0)} longer for those, as far as the logs tell."
        )
    stale = [each for each in summary.ranks if each.staleness is not None]
    if len(stale) > 1:
        most = max(stale, key=lambda each: each.staleness or 0.0)
        others = np.mean([each.staleness or 0.0 for each in stale if each is not most])
        if (most.staleness or 0.0) > 2 * max(float(others), 1.0):
            late = f"Rank {most.rank} ({most.host}) misses {most.staleness:.3g}"
            if summary.asynchronous:
                yield (
                    f"{late} pushes of others between its own, and the others {others:.3g}: it is slower, and pulls "
                    "towards a center that has moved on."
                )
            else:
                yield (
                    f"{late} rounds between two of its own, and the others {others:.3g}: it is late again and "
                    "again, and asynchronous=True suits it better than a quorum."
                )
