"""What is kept: trajectories, and for every front end which one each case has to follow.

Front ends, placements and dtypes share a trajectory where they agree to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.golden.course import HERE, difference

Reports = list[dict[str, list[str]]]
"""Of every rank, the lines of every case."""

TRAJECTORIES = HERE / "trajectories.json"


def read(front_end: str, size: int) -> Reports:
    """Return what the ranks of a job have to report."""
    trajectories = json.loads(TRAJECTORIES.read_text())
    followed: dict[str, str] = json.loads((HERE / f"{front_end}.json").read_text())[str(size)]
    return [{case: trajectories[name][rank] for case, name in followed.items()} for rank in range(size)]


def write(jobs: Mapping[tuple[str, int], Reports]) -> None:
    """Replace all that is kept."""
    trajectories: dict[str, list[list[str]]] = {}
    followed: dict[str, dict[str, dict[str, str]]] = {}
    for (front_end, size), reports in jobs.items():
        names = followed.setdefault(front_end, {}).setdefault(str(size), {})
        for case in reports[0]:
            lines = [report[case] for report in reports]
            names[case] = next((name for name, other in trajectories.items() if agree(lines, other)), "")
            if not names[case]:
                names[case] = (
                    f"{size}, {case}" if f"{size}, {case}" not in trajectories else f"{size}, {front_end}, {case}"
                )
                trajectories[names[case]] = lines
    put(TRAJECTORIES, trajectories)
    for front_end, sizes in followed.items():
        put(HERE / f"{front_end}.json", sizes)


def agree(lines: list[list[str]], others: list[list[str]]) -> bool:
    """Return whether two trajectories are the same on all ranks."""
    same_size = len(lines) == len(others)
    return same_size and not any(difference(*pair) for pair in zip(lines, others, strict=True))


def put(path: Path, value: object) -> None:
    """Write a file, a line per line."""
    path.write_text(f"{json.dumps(value, indent=1, ensure_ascii=False)}\n")
