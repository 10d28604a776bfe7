"""Run logs as what they tell of: trainings, their parts, and what every rank has seen of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from hvd_periodic.journal.base import Report, Total
from hvd_periodic.journal.files import VERSION, lines_of, log_files

T = TypeVar("T", Report, Total)


@dataclass
class Segment:
    """What one rank has written from one beginning on.

    Attributes:
        facts: what training is.
        reports: of exchanges, in their order.
        total: what they came to; None where the job did not get to its end.
    """

    facts: Mapping[str, Any]
    reports: list[Report] = field(default_factory=list)
    total: Total | None = None

    @property
    def seconds(self) -> float:
        """From the beginning to the last that was written."""
        if self.total is not None:
            return self.total.wall_seconds
        return self.reports[-1].time - float(self.facts["time"]) if self.reports else 0.0


@dataclass(frozen=True)
class Part:
    """A training from one beginning to the next; it has several where a job was started again, or its ranks changed.

    Attributes:
        ranks: that trained together, counted over the job.
        segments: what each of them has written.
    """

    ranks: tuple[int, ...]
    segments: dict[int, Segment]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What training was, on the first rank."""
        return self.segments[min(self.segments)].facts

    @property
    def missing(self) -> list[int]:
        """Ranks of which there is no log."""
        return sorted(set(self.ranks) - self.segments.keys())


@dataclass(frozen=True)
class Training:
    """What one optimizer did, on all ranks that exchanged by it.

    Attributes:
        name: of the optimizer, the same on all ranks.
        number: which of the optimizers of its ranks.
        parts: from beginning to beginning, in the order of time.
    """

    name: str
    number: int
    parts: Sequence[Part]

    @property
    def ranks(self) -> list[int]:
        """All that ever were among its ranks."""
        return sorted({rank for part in self.parts for rank in part.ranks})


@dataclass(frozen=True)
class Run:
    """A folder of logs.

    Attributes:
        path: as given.
        trainings: of which they tell, in the order of time.
        cut_off: lines that the end of a job has cut off, by file.
    """

    path: Path
    trainings: Sequence[Training]
    cut_off: Mapping[str, int]


def read_run(folder: str | os.PathLike[str], told: Callable[[Path], object] = lambda file: None) -> Run:
    """Return what a folder of logs tells.

    Args:
        folder: of the logs.
        told: is called with each file that has been read.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: a file is no log of this version, or none at all.
    """
    path = Path(folder)
    if path.is_file():
        raise FileNotFoundError(f"A run log is a folder of files rank-0.jsonl and so on. Received: the file {path}")
    parts: dict[tuple[str, tuple[int, ...], int], dict[int, Segment]] = {}
    numbers: dict[str, int] = {}
    cut_off: dict[str, int] = {}
    for rank, file in log_files(path).items():
        lines, broken = lines_of(file)
        if broken:
            cut_off[file.name] = broken
        begun: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for name, number, segment in _segments(file, lines):
            ranks = tuple(segment.facts["ranks"])
            parts.setdefault((name, ranks, begun[name, ranks]), {})[rank] = segment
            begun[name, ranks] += 1
            numbers[name] = number
        told(file)
    found = [(name, Part(ranks, segments)) for (name, ranks, _), segments in parts.items()]
    kept = [(name, part) for name, part in found if any(s.reports or s.total for s in part.segments.values())]
    if not kept:
        raise ValueError(f"The run log {path} tells of no exchange: training has ended before the first, or not begun")
    return Run(path, list(_trainings(kept, numbers)), cut_off)


def _segments(file: Path, lines: Sequence[Any]) -> Iterator[tuple[str, int, Segment]]:
    """Yield name and number of an optimizer, and what was written from each of its beginnings on."""
    latest: dict[str, Segment] = {}
    found = []
    for line in lines:
        if not isinstance(line, dict) or line.get("event") not in ("began", "exchanged", "ended"):
            raise ValueError(f"{file} is no run log: {str(line)[:80]!r} says of no event")
        number = int(line.get("optimizer", 0))
        name = str(line.get("name", number))
        if line["event"] == "began":
            if line.get("version") != VERSION:
                raise ValueError(
                    f"{file} is a run log of version {line.get('version')}, and this is read by version {VERSION}: use "
                    f"hvd_periodic {line.get('package', 'of the version that wrote it')}"
                )
            if not _is_beginning(line):
                raise ValueError(f"{file} is no run log: a beginning does not say time, ranks and algorithm")
            latest[name] = Segment(line)
            found.append((name, number, latest[name]))
        elif name not in latest:
            raise ValueError(f"{file} has no beginning: its first lines are gone; use the whole file")
        elif line["event"] == "exchanged":
            latest[name].reports.append(_read(Report, line, file))
        else:
            latest[name].total = _read(Total, line, file)
    if not found:
        raise ValueError(f"{file} is no run log: it has no line that could be read")
    yield from found


def _is_beginning(line: Mapping[str, Any]) -> bool:
    """Return whether a line says when which ranks began what."""
    ranks = line.get("ranks")
    of_integers = isinstance(ranks, list) and ranks != [] and all(isinstance(rank, int) for rank in ranks)
    return of_integers and isinstance(line.get("time"), (int, float)) and "algorithm" in line


def _read(kind: type[T], line: Mapping[str, Any], file: Path) -> T:
    """Return what a line tells; what it does not is None, NaN and infinity were strings."""
    known: dict[str, Any] = {}
    for name, has_default, may_be_none in _FIELDS[kind]:
        value = line.get(name)
        if value is None and has_default:
            continue
        if value is None and not may_be_none:
            raise ValueError(f"{file} is no run log: a line {line['event']!r} does not say {name}")
        if not (value is None or isinstance(value, (int, float)) or value in _NOT_FINITE):
            raise ValueError(
                f"{file} is no run log: a line {line['event']!r} says {name}={value!r}, which is no number"
            )
        known[name] = float(value) if isinstance(value, str) else value
    return kind(**known)


_NOT_FINITE = ("nan", "inf", "-inf")
"""How numbers are written that JSON does not have."""

_FIELDS = {
    kind: [(each.name, each.default is not MISSING, "None" in str(each.type)) for each in fields(kind)]
    for kind in (Report, Total)
}
"""Of what lines tell: name, whether there is a default, and whether it may be None."""


def _trainings(parts: Sequence[tuple[str, Part]], numbers: Mapping[str, int]) -> Iterator[Training]:
    """Yield trainings: the parts of an optimizer of one name, among ranks that have one in common."""
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
