"""Options and reading of run logs, shared by `report`, `plot` and `timeline`."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from hvd_periodic.cli import output
from hvd_periodic.cli.usage_error import UsageError, as_usage_error
from hvd_periodic.journal.runs import Run, bad_lines, read_run
from hvd_periodic.ranks import named


def add_runs(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Add the folders, and the option to accept missing logs."""
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+" if several else 1, help="folder of a run log")
    parser.add_argument("--partial", action="store_true", help="use only the rank logs that exist")


def read(folders: Sequence[Path], partial: bool) -> list[Run]:
    """Return the runs that are logged in these folders.

    Raises:
        UsageError: a folder does not exist, is no run log, is of another version, or lacks the logs of some ranks.
    """
    found, distinct = [], list(dict.fromkeys(folders))
    files = [file for folder in distinct for file in sorted(folder.glob("rank-*.jsonl")) if file.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    with output.progress("reading", sum(sizes.values())) as advance:
        for folder in distinct:
            advance(0, f"reading {folder}")
            with as_usage_error():
                found.append(read_run(folder, lambda file: advance(sizes.get(file, 0))))
    for run in found:
        missing = {rank for training in run.trainings for part in training.parts for rank in part.missing}
        if missing and not partial:
            raise UsageError(
                f"{run.path} has no log of {named(missing)}: each rank writes on its own "
                "host. Copy the files of all hosts into one folder, or pass --partial to use only these"
            )
    return found


def name_bad_lines(found: Sequence[Run]) -> None:
    """Warn of bad lines, which are left out, in commands that write no page to name them."""
    for run in found:
        for text in bad_lines(run.bad):
            warnings.warn(f"{run.path}: {text}", stacklevel=2)


def output_of(arguments: argparse.Namespace) -> Path | None:
    """Return the file to write; None: only JSON is wanted.

    Raises:
        UsageError: neither was requested.
    """
    if arguments.output is None and not arguments.json:
        raise UsageError("Pass -o FILE to write a file, or --json to print the same data for scripts")
    path: Path | None = arguments.output
    return path


def check_output(path: Path, endings: Sequence[str]) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        UsageError: its folder does not exist, or it has another ending.
    """
    if path.suffix.lower() not in endings:
        raise UsageError(f"`-o` must end in {' or '.join(endings)}. Received: {path}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"`-o`: there is no folder {path.absolute().parent}")
