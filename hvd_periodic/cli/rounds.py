"""Rounds with a quorum, from the logs of all ranks: who was in each, who came late to it, and the waiting saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_periodic.journal.base import Report
from hvd_periodic.journal.runs import Part


@dataclass(frozen=True)
class RoundSummary:
    """A round of one part of a training.

    Attributes:
        number: its number, from 1.
        members: the ranks that were in it.
        staleness: of each of these with a log, the rounds that closed since it was in one.
        late: seconds from the close to the arrival of each rank that was not in it; of those that have come to a later
            round, as their logs say.
        saved: seconds for which a synchronous exchange would have waited longer for those of them that were in the
            round before: the largest of their ``late``, 0 if all others are in the round; None if it is not known. A
            rank that misses several rounds in a row counts in the first of them alone.
    """

    number: int
    members: Sequence[int]
    staleness: Mapping[int, int]
    late: Mapping[int, float]
    saved: float | None


def clocks(part: Part) -> dict[int, float]:
    """Return the seconds by which the clock of every rank is ahead of the first rank's: 0 on the same host."""
    reference = min(part.segments)
    hosts = {rank: segment.facts.get("host") for rank, segment in part.segments.items()}
    ends: dict[int, dict[tuple[int, tuple[int, ...]], float]] = {
        rank: {
            (report.number or report.rounds, tuple(report.members or ())): report.came + report.waited
            for report in reversed(segment.reports)
            if report.waited is not None
        }
        for rank, segment in part.segments.items()
    }
    ahead = dict.fromkeys(part.segments, 0.0)
    for rank in part.segments:
        common = ends[rank].keys() & ends[reference].keys()
        if hosts[rank] != hosts[reference] and common:
            ahead[rank] = float(np.median([ends[rank][i] - ends[reference][i] for i in common]))
    return ahead


def rounds_of(part: Part) -> list[RoundSummary]:
    """Return the rounds of a part in their order; none without a quorum."""
    ahead = clocks(part)
    reports: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    """By number and members: a round that moves nothing has the number of the one before."""
    for rank, segment in part.segments.items():
        for report in segment.reports:
            if report.number is not None and report.members is not None and report.waited is not None:
                reports.setdefault((report.number, tuple(sorted(report.members))), {}).setdefault(rank, report)

    def closing(key: tuple[int, tuple[int, ...]]) -> float:
        return min(each.came + (each.waited or 0.0) - ahead[rank] for rank, each in reports[key].items())

    order = sorted(reports, key=lambda key: (key[0], closing(key)))
    following: dict[int, float] = {}
    """When every rank came to the next round that it was in, by the clock of the first rank."""
    found: list[RoundSummary] = []
    for place in reversed(range(len(order))):
        (number, members), met, closed = order[place], reports[order[place]], closing(order[place])
        absent = [rank for rank in part.ranks if rank not in members]
        late = {rank: max(0.0, following[rank] - closed) for rank in absent if rank in following}
        known = place > 0 and order[place - 1][0] >= number - 1
        newly = order[place - 1][1] if known else part.ranks
        missing = [rank for rank in absent if rank in newly]
        saved = None if any(rank not in late for rank in missing) else max((late[r] for r in missing), default=0.0)
        following |= {rank: each.came - ahead[rank] for rank, each in met.items()}
        missed = {rank: each.missed for rank, each in met.items()}
        found.append(RoundSummary(number, list(members), missed, late, saved))
    return found[::-1]
