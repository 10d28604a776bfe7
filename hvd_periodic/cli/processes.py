"""Other programs, which may crash or hang: they have a time limit, and nothing of them is left running."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "hvdp-probe "
"""Before what a probe reports, wherever in a line a launcher puts it."""

_BELONGS = "HVDP_CHECK"
"""Variable by which what a program has started is known."""

_NOISE = re.compile(r"^\S*\s*(WARNING: All log messages before absl|[IW]\d{4} )")
"""How lines begin that TensorFlow prints whenever it is imported."""

_GRACE = 5.0
"""Seconds that a program has to end its own children."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: its exit code; None: it ran out of time.
        output: what it printed.
    """

    code: int | None
    output: str

    @property
    def report(self) -> dict[str, Any] | None:
        """What a probe among its processes has reported, if one did."""
        for line in self.output.splitlines():
            _, mark, text = line.partition(MARK)
            if mark:
                with suppress(ValueError):
                    found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
                    return found
        return None

    def last(self, lines: int = 3) -> str:
        """Return the end of what it printed, in one line."""
        stripped = (line.strip(" -\t") for line in self.output.splitlines() if not self._passed(line))
        return " / ".join([line for line in stripped if line][-lines:]) or "it printed nothing"

    @staticmethod
    def _passed(line: str) -> bool:
        return MARK in line or _NOISE.match(line) is not None

    @property
    def hung(self) -> str | None:
        """Where it was when its time was up, as a probe among its processes says, or what it printed last."""
        found = re.search(r"Timeout \(.*?most recent call first\):\s*(?:\S*:)?\s*(File .*)", self.output, re.DOTALL)
        if found:
            return found[1].partition("\n")[0].strip()
        return self.last() if self.code is None else None


def probe(*words: str) -> list[str]:
    """Return the command that runs a probe of this package in a Python like this one."""
    return [sys.executable, "-m", "hvd_periodic.cli.probe", *words]


def run(words: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Ended:
    """Run a program, for so long at most.

    It finds this package wherever this process has found it.

    Raises:
        OSError: there is no such program.
    """
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        words,
        env={**environment, "PYTHONPATH": path, _BELONGS: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        output = _end(process, mark)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Ended(None, output)
    return Ended(process.returncode, output)


def _kill(process: int) -> None:
    """Kill a process, and wait until it is no more."""
    descriptor = os.pidfd_open(process)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], _GRACE)
    finally:
        os.close(descriptor)


def _end(process: subprocess.Popen[str], mark: str) -> str:
    """End a program and all that it has started; return what it printed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    # Launchers put what they start into groups and sessions of their own; their environment goes with it.
    belongs = f"{_BELONGS}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if belongs in (entry / "environ").read_bytes().split(b"\0"):
                _kill(int(entry.name))
    with suppress(ProcessLookupError):
        process.kill()
    try:
        return process.communicate(timeout=_GRACE)[0]
    except subprocess.TimeoutExpired:
        return ""
