"""What `report`, `plot` and `timeline` have in common: the run logs that they are given."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from hvd_periodic.cli import output
from hvd_periodic.cli.refusal import RefusalError, refusing
from hvd_periodic.journal.runs import Run, bad_lines, read_run
from hvd_periodic.ranks import named


def add_runs(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Add the folders, and what may be missing."""
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+" if several else 1, help="folder of a run log")
    parser.add_argument("--partial", action="store_true", help="go on where the logs of some ranks are not there")


def read(folders: Sequence[Path], partial: bool) -> list[Run]:
    """Return what folders of logs tell.

    Raises:
        RefusalError: one of them is not there, is none, is of another version, or not of all ranks.
    """
    found, distinct = [], list(dict.fromkeys(folders))
    files = [file for folder in distinct for file in sorted(folder.glob("rank-*.jsonl")) if file.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    with output.progress("reading", sum(sizes.values())) as advance:
        for folder in distinct:
            advance(0, f"reading {folder}")
            with refusing():
                found.append(read_run(folder, lambda file: advance(sizes.get(file, 0))))
    for run in found:
        missing = {rank for training in run.trainings for part in training.parts for rank in part.missing}
        if missing and not partial:
            raise RefusalError(
                f"{run.path} has no log of {named(missing)}: each rank writes where it "
                "runs. Copy the files of all hosts into one folder; or --partial, for those that are there"
            )
    return found


def name_bad_lines(found: Sequence[Run]) -> None:
    """Warn of lines that are left out, where no page names them."""
    for run in found:
        for text in bad_lines(run.bad):
            warnings.warn(f"{run.path}: {text}", stacklevel=2)


def output_of(arguments: argparse.Namespace) -> Path | None:
    """Return the file that is to be written; None: there is only to be JSON.

    Raises:
        RefusalError: neither was asked for.
    """
    if arguments.output is None and not arguments.json:
        raise RefusalError("Say where to, -o FILE; or --json, which prints the same for scripts")
    path: Path | None = arguments.output
    return path


def check_output(path: Path, endings: Sequence[str]) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        RefusalError: its folder is not there, or it ends in something else.
    """
    if path.suffix.lower() not in endings:
        raise RefusalError(f"`-o` must end in {' or '.join(endings)}. Received: {path}")
    if not path.absolute().parent.is_dir():
        raise RefusalError(f"`-o`: there is no folder {path.absolute().parent}")
