"""The findings of the GPU check: ranks append them to a file as they arise, and the check prints and stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """A comparison, or a measurement.

    Attributes:
        section: heading of the table that shows it.
        name: what was compared or measured.
        value: of the comparison, the largest difference on any rank, as a part of the largest value.
        unit: of the value; empty for a comparison.
        allowed: largest value that passes; None: the value is for information.
        note: further information.
    """

    section: str
    name: str
    value: float | None
    unit: str = ""
    allowed: float | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the value is larger than allowed, or not a number."""
        return self.allowed is not None and not (self.value is not None and self.value <= self.allowed)

    def line(self) -> str:
        """Return the finding as a line of text."""
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        allowed = "" if self.allowed is None else f", allowed {self.allowed:.0e}"
        return (
            " ".join(filter(None, (f"{self.name}: {value}", self.unit)))
            + allowed
            + (f" ({self.note})" * bool(self.note))
        )


class Findings:
    """Prints the findings of a job, and appends each to a file at once, so that none is lost if the job ends early.

    Args:
        path: the file; None: findings are printed only.
        shown: whether this rank prints and writes.
    """

    def __init__(self, path: Path | None, shown: bool) -> None:
        self._path, self._shown = path, shown
        self.failures: list[str] = []

    def add(self, finding: Finding) -> None:
        """Record a finding."""
        if finding.failed:
            self.failures.append(finding.line())
        if not self._shown:
            return
        print(finding.line(), flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(finding)) + "\n")


def read(path: Path) -> list[Finding]:
    """Return the findings in a file; none if the job wrote none."""
    if not path.exists():
        return []
    return [Finding(**json.loads(line)) for line in path.read_text().splitlines()]


def table(title: str, findings: Sequence[Finding]) -> str:
    """Return a table for a terminal; a section that holds only comparisons is summed up in a line, but for failures."""
    lines = [title, "=" * len(title)]
    for section, group in groupby(findings, key=lambda finding: finding.section):
        rows = list(group)
        failed = [row for row in rows if row.failed]
        compared = all(row.allowed is not None for row in rows)
        lines.append("")
        if compared:
            largest = max((row.value for row in rows if row.value is not None), default=0.0)
            lines.append(f"{section}: {len(rows) - len(failed)} of {len(rows)} passed; largest value {largest:.1e}")
        else:
            lines.append(section)
        lines += [f"  {row.line()}" + "  FAILED" * row.failed for row in (failed if compared else rows)]
    return "\n".join(lines)


def total(findings: Iterable[Finding]) -> int:
    """Return the number of failures."""
    return sum(finding.failed for finding in findings)
