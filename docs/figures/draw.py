"""Draws the figures of the documentation, from recordings of real runs that are in the tree.

python -m docs.figures.draw             # from docs/figures/recorded; the same files wherever it runs
python -m docs.figures.draw --record    # repeats the runs, with two to four ranks under mpirun, in a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from docs.figures import buckets, overlap, placements, speeds, trajectories

HERE = Path(__file__).parent
OF_JOBS: dict[str, Any] = {"placements": placements, "overlap": overlap, "buckets": buckets}
"""What draws them; each says on how many ranks it is recorded, and what is kept of what ranks have noted."""


def record(folder: Path, small: bool = False) -> None:
    """Run everything that is drawn, and write what is kept of it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "trajectories.json", trajectories.recorded())
    with TemporaryDirectory() as noted:
        for ranks in sorted({module.RANKS for module in OF_JOBS.values()}):
            names = [name for name, module in OF_JOBS.items() if ranks == module.RANKS]
            _run(ranks, ["docs.figures.job", *names, "--folder", noted, *(["--small"] if small else [])])
        for name, module in OF_JOBS.items():
            _write(folder / f"{name}.json", module.condensed(json.loads(Path(noted, f"{name}.json").read_text())))
        files = {task: Path(noted, f"{task}.json") for task in speeds.TASKS}
        for task, file in files.items():
            _run(speeds.RANKS, speeds.program(task, file, small))
        measured = {task: json.loads(file.read_text()) for task, file in files.items()}
        _write(folder / "speeds.json", speeds.condensed(measured))


def _run(ranks: int, program: Sequence[str]) -> None:
    """Run a module, with its arguments, on all ranks."""
    launcher = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    command = [sys.executable, "-m", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    subprocess.run([*launcher, *command], cwd=HERE.parents[1], env=environment, check=True)


def _write(file: Path, recorded: Any) -> None:
    """Write JSON with a line for each of the outermost parts."""
    if isinstance(recorded, dict):
        lines, (first, last) = [f"{json.dumps(key)}: {json.dumps(part)}" for key, part in recorded.items()], "{}"
    else:
        lines, (first, last) = [json.dumps(part) for part in recorded], "[]"
    separator = ",\n"
    file.write_text(f"{first}\n{separator.join(lines)}\n{last}\n")


def draw(recorded: Path, folder: Path) -> None:
    """Draw all figures."""
    for name, module in {"trajectories": trajectories, "speeds": speeds, **OF_JOBS}.items():
        module.draw(json.loads((recorded / f"{name}.json").read_text()), folder)


def main() -> None:
    """Record, if that is asked for, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the jobs, in place of reading what they once noted")
    parser.add_argument("--small", action="store_true", help="with --record: small models, to see that this runs")
    parser.add_argument("--folder", type=Path, default=HERE, help="where figures and recordings go (default: here)")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.folder / "recorded", arguments.small)
    draw((arguments.folder if arguments.record else HERE) / "recorded", arguments.folder)


if __name__ == "__main__":
    main()
