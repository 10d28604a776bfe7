"""Reads run logs as trainings, their parts, and the reports of every rank in each part."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from hvd_periodic.journal.base import Report, Total
from hvd_periodic.journal.files import VERSION, BadLine, log_files, parse_lines
from hvd_periodic.journal.validation import beginning, count, read, text

_NAMED = 3
"""Number of bad lines of a file that are named one by one."""


@dataclass
class Segment:
    """The lines of one rank from one beginning to the next.

    Attributes:
        facts: description of the training.
        reports: reports of exchanges, in order.
        total: totals of the exchanges; None if the job did not reach its end.
    """

    facts: Mapping[str, Any]
    reports: list[Report] = field(default_factory=list)
    total: Total | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the last line."""
        if self.total is not None:
            return self.total.wall_seconds
        return self.reports[-1].time - float(self.facts["time"]) if self.reports else 0.0


@dataclass(frozen=True)
class Part:
    """A training from one beginning to the next; there are several parts if a job was restarted or its ranks changed.

    Attributes:
        ranks: global ranks that trained together.
        segments: the lines that each of them has written.
    """

    ranks: tuple[int, ...]
    segments: dict[int, Segment]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Description of the training, from the first rank."""
        return self.segments[min(self.segments)].facts

    @property
    def missing(self) -> list[int]:
        """Ranks without a log."""
        return sorted(set(self.ranks) - self.segments.keys())


@dataclass(frozen=True)
class Training:
    """The training with one optimizer, on all ranks that exchanged through it.

    Attributes:
        name: name of the optimizer, the same on all ranks.
        number: number of the optimizer among the optimizers of its ranks.
        parts: from one beginning to the next, in order of time.
    """

    name: str
    number: int
    parts: Sequence[Part]

    @property
    def ranks(self) -> list[int]:
        """All ranks that ever took part."""
        return sorted({rank for part in self.parts for rank in part.ranks})


@dataclass(frozen=True)
class Run:
    """A folder of logs.

    Attributes:
        path: as given.
        trainings: the trainings in the logs, in order of time.
        bad: lines that are skipped, by file name.
    """

    path: Path
    trainings: Sequence[Training]
    bad: Mapping[str, Sequence[BadLine]]


def read_run(folder: str | os.PathLike[str], on_read: Callable[[Path], object] = lambda file: None) -> Run:
    """Return the contents of a folder of logs.

    Args:
        folder: folder of the logs.
        on_read: called with each file after it has been read.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: a file is a log of another version, or not a log.
    """
    path = Path(folder)
    if path.is_file():
        raise FileNotFoundError(f"A run log is a folder of files rank-0.jsonl and so on. Received: the file {path}")
    parts: dict[tuple[str, tuple[int, ...], int], dict[int, Segment]] = {}
    numbers: dict[str, int] = {}
    bad: dict[str, Sequence[BadLine]] = {}
    for rank, file in log_files(path).items():
        segments, left_out = _segments(file, rank)
        if left_out:
            bad[file.name] = left_out
        begun: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for name, number, segment in segments:
            ranks = tuple(segment.facts["ranks"])
            parts.setdefault((name, ranks, begun[name, ranks]), {})[rank] = segment
            begun[name, ranks] += 1
            numbers[name] = number
        on_read(file)
    found = [(name, Part(ranks, segments)) for (name, ranks, _), segments in parts.items()]
    kept = [(name, part) for name, part in found if any(s.reports or s.total for s in part.segments.values())]
    if not kept:
        more = "".join(f". {each}" for each in bad_lines(bad))
        raise ValueError(
            f"The run log {path} contains no exchange: training ended before the first one, or never began{more}"
        )
    return Run(path, list(_trainings(kept, numbers)), bad)


def _segments(file: Path, rank: int) -> tuple[list[tuple[str, int, Segment]], list[BadLine]]:
    """Return the segments, each with the name and number of its optimizer, and the bad lines."""
    latest: dict[str, Segment] = {}
    found: list[tuple[str, int, Segment]] = []
    lines, bad = parse_lines(file)
    for number, line in lines:
        try:
            _add_line(line, rank, latest, found)
        except ValueError as error:
            bad.append(BadLine(number, str(error)))
        except _VersionError as error:
            raise ValueError(f"{file} is a run log of {error}") from None
    if not found:
        first = f"line {min(bad).number}: {min(bad).why}" if bad else "it is empty"
        raise ValueError(f"{file} is not a run log: {first}")
    return found, sorted(bad)


class _VersionError(Exception):
    """A log was written by another version of the package."""


def _add_line(
    line: dict[str, Any], rank: int, latest: dict[str, Segment], found: list[tuple[str, int, Segment]]
) -> None:
    """Add a line to the latest segment of its optimizer, or begin a new segment.

    Raises:
        ValueError: a value in the line is invalid.
    """
    event = line.get("event")
    if event not in ("began", "exchanged", "ended"):
        raise ValueError(f"it has an unknown event={shortened(event)}")
    number = count(line.get("optimizer", 0))
    name = text(line.get("name", str(number)))
    if event == "began":
        latest.pop(name, None)  # Lines after a bad beginning do not belong to the segment before.
        _check_version(line)
        latest[name] = Segment(beginning(line, rank))
        found.append((name, number, latest[name]))
    elif name not in latest:
        raise ValueError("the beginning of its training is missing or bad")
    elif event == "exchanged":
        latest[name].reports.append(read(Report, line))
    else:
        latest[name].total = read(Total, line)


def _check_version(line: Mapping[str, Any]) -> None:
    """Refuse a log written by another version."""
    version, package = line.get("version"), line.get("package")
    if isinstance(version, int) and version != VERSION:
        known = package if isinstance(package, str) else "of the version that wrote it"
        raise _VersionError(
            f"version {shortened(version)}, but this hvd_periodic reads version {VERSION}: use hvd_periodic {known:.40}"
        )


def bad_lines(bad: Mapping[str, Sequence[BadLine]]) -> Iterator[str]:
    """Yield a sentence for each file with skipped lines, with their numbers and the reasons."""
    for name, of_file in bad.items():
        named = "; ".join(f"line {each.number}: {each.why}" for each in of_file[:_NAMED])
        more = f"; and {len(of_file) - _NAMED} more" if len(of_file) > _NAMED else ""
        yield f"{name}: skipped {len(of_file)} bad line{'' if len(of_file) == 1 else 's'}: {named}{more}."


def _trainings(parts: Sequence[tuple[str, Part]], numbers: Mapping[str, int]) -> Iterator[Training]:
    """Yield trainings: the parts with one optimizer name whose sets of ranks overlap."""
    together: list[tuple[str, list[Part]]] = []
    for name, part in sorted(parts, key=lambda pair: float(pair[1].facts["time"])):
        for known, others in together:
            if known == name and any(set(part.ranks) & set(other.ranks) for other in others):
                others.append(part)
                break
        else:
            together.append((name, [part]))
    for name, of_name in together:
        yield Training(name, numbers[name], of_name)
