"""The run log: one file per rank, with one line of JSON per event."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from hvd_periodic.journal.base import Facts, Listener, Report, Total
from hvd_periodic.logs import logger

VARIABLE = "HVD_PERIODIC_RUN_LOG"
"""Environment variable: folder of the run log, for optimizers that were not given one."""

VERSION = 1

_FILE = re.compile(r"rank-(\d+)\.jsonl")


class RunLog(Listener):
    """Appends to ``FOLDER/rank-K.jsonl``; all optimizers of a process share the file, and each line is one write.

    A line is ``{"event": "began" | "exchanged" | "ended", "optimizer": number, "name": name, ...}`` with the facts of
    :meth:`~hvd_periodic.journal.Listener.began`, or the fields of :class:`~hvd_periodic.journal.Report` or
    :class:`~hvd_periodic.journal.Total`; values that are None are omitted. NaN and infinity are strings. A full disk
    ends the log, not the training.

    Args:
        folder: folder of the run; created if missing.
        place: returns the rank in the job, which may change under elastic Horovod; the number of this optimizer among
            the optimizers of its ranks; and its name, the same on all these ranks and unique in this process.

    Raises:
        OSError: the folder cannot be created or written to.
    """

    wants_distance = True

    def __init__(self, folder: Path, place: Callable[[], tuple[int, int, str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"The run log cannot be written: {folder} is not writable")
        self._folder, self._place = folder, place
        self._path: Path | None = None
        self._close: Callable[[], object] = lambda: None
        self._file = -1
        self._over = False

    def began(self, facts: Facts) -> None:
        """Write the description of the training."""
        self._write("began", {"version": VERSION, **facts})

    def exchanged(self, report: Report) -> None:
        """Write an exchange."""
        self._write("exchanged", asdict(report))

    def ended(self, total: Total) -> None:
        """Write the totals of all exchanges."""
        self._write("ended", asdict(total))

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        if self._over:
            return
        rank, optimizer, name = self._place()
        path = self._folder / f"rank-{rank}.jsonl"
        known = {key: _plain(value) for key, value in values.items() if value is not None}
        try:
            if path != self._path:
                self._close()
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                self._path, self._close = path, finalize(self, os.close, self._file)
                if _is_cut_off(path):
                    os.write(self._file, b"\n")
            line = {"event": event, "optimizer": optimizer, "name": name, **known}
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._over = True
            logger.warning("Stopped writing the run log %s: %s", path, error)


def _is_cut_off(path: Path) -> bool:
    """Return whether the last line of an earlier job was not written completely."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 1, 0))
        return file.read(1) not in (b"", b"\n")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def requested_folder(given: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the folder of the run log that the argument or the environment names; None if there is none.

    Raises:
        TypeError: not a path.
    """
    if given is False:
        return None
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"`run_log` must be the path of a folder, None, or False for none. Received: {given!r}")
    asked = os.environ.get(VARIABLE) if given is None else given
    return Path(asked).absolute() if asked else None


class BadLine(NamedTuple):
    """A line of a file that is skipped: its number, from 1, and the problem with it."""

    number: int
    why: str


def read_run_log(folder: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of a run log by rank, in order; incomplete lines are skipped.

    Raises:
        FileNotFoundError: there is no run log in the folder.
    """
    return {rank: [line for _, line in parse_lines(path)[0]] for rank, path in log_files(folder).items()}


def log_files(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files of a run log by rank.

    Raises:
        FileNotFoundError: there is no run log in the folder.
    """
    numbered = ((_FILE.fullmatch(path.name), path) for path in Path(folder).glob("rank-*.jsonl") if path.is_file())
    found = {int(match[1]): path for match, path in numbered if match is not None}
    if not found:
        trainings = sorted({str(path.parent) for path in Path(folder).glob("training-of-rank-*/rank-*.jsonl")})
        among = f". Each of several trainings of a job has its own: {', '.join(trainings)}" if trainings else ""
        raise FileNotFoundError(f"There is no run log in {folder}: it has no file rank-0.jsonl{among}")
    return dict(sorted(found.items()))


def parse_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[BadLine]]:
    """Return the lines of a file with their numbers, and the lines that are not JSON objects."""
    found, bad = [], []
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            bad.append(BadLine(number, "it is not JSON: a job may have ended while writing it"))
            continue
        if isinstance(line, dict):
            found.append((number, line))
        else:
            bad.append(BadLine(number, "it is not a JSON object"))
    return found, bad
