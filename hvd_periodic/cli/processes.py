"""Runs other programs, which may crash or hang, with a time limit; none of their processes is left running."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "hvdp-probe "
"""Marks the report of a probe, which may start anywhere in a line, as launchers prepend text."""

_BELONGS = "HVDP_CHECK"
"""Environment variable that marks the processes that a program has started."""

_NOISE = re.compile(r"^\S*\s*(WARNING: All log messages before absl|[IW]\d{4} )")
"""Beginnings of lines that TensorFlow prints whenever it is imported."""

_GRACE = 5.0
"""Seconds that a program has to end its own children."""

_running: dict[str, subprocess.Popen[str]] = {}
"""Programs that have not ended, by the mark of their processes."""

_starting = threading.Lock()
"""Held while a program starts and is listed, so that a signal meets none that is not listed yet."""

_ending = threading.Event()
"""Set once a signal has come that ends all programs; none starts after it."""


@dataclass(frozen=True)
class ProgramResult:
    """Exit code of a program, None if it ran out of time, and the text that it printed."""

    code: int | None
    output: str

    @property
    def report(self) -> dict[str, Any] | None:
        """First report of a probe among its processes; None: there is none."""
        return next(iter(self.reports), None)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Reports of probes among its processes."""
        found = []
        for line in self.output.splitlines():
            _, mark, text = line.partition(MARK)
            if mark:
                with suppress(ValueError):
                    found.append(json.JSONDecoder().raw_decode(text)[0])
        return found

    def last(self, lines: int = 3) -> str:
        """Return the last lines of its output, joined to one line."""
        told = (line for line in self.output.splitlines() if MARK not in line and not _NOISE.match(line))
        stripped = (line.strip(" -\t") for line in told)
        return " / ".join([line for line in stripped if line][-lines:]) or "it printed nothing"

    @property
    def hung(self) -> str | None:
        """Location of a probe among its processes when its time was up, or its last output; None: it did not hang."""
        found = re.search(r"Timeout \(.*?most recent call first\):\s*(?:\S*:)?\s*(File .*)", self.output, re.DOTALL)
        if found:
            return found[1].partition("\n")[0].strip()
        return self.last() if self.code is None else None


def probe(*words: str) -> list[str]:
    """Return the command that runs a probe of this package with this Python."""
    return [sys.executable, "-m", "hvd_periodic.cli.probe", *words]


def run(words: Sequence[str], seconds: float, environment: Mapping[str, str]) -> ProgramResult:
    """Run a program for at most ``seconds``.

    It imports this package from the same folder as this process.

    Raises:
        OSError: there is no such program.
        SystemExit: a signal has ended all programs (:func:`ended_by_signals`).
    """
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    mark = uuid.uuid4().hex
    with _starting:
        if _ending.is_set():
            raise SystemExit("A signal has ended all programs.")
        process = _running[mark] = subprocess.Popen(
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
        return ProgramResult(None, output)
    finally:
        del _running[mark]
    return ProgramResult(process.returncode, output)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the programs that run in any thread if SIGINT or SIGTERM comes; SIGTERM becomes a SystemExit of 143.

    A thread of its own ends them. The main thread runs the handlers of Python only between two instructions, and a
    signal does not wake it if it comes just before the main thread waits for the thread that runs a program: the main
    thread would then wait until the program ends.
    """

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    _ending.clear()
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    watcher = threading.Thread(target=_kill_all_at, args=(signals, handlers.keys()), daemon=True)
    with signals:
        watcher.start()
        wakeup_before = signal.set_wakeup_fd(wakeup.fileno())
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)
            wakeup.close()
            watcher.join()


def _kill_all_at(signals: socket.socket, numbers: Collection[int]) -> None:
    """Kill all programs when one of these signals comes; a byte tells the number of each signal."""
    while number := signals.recv(1):
        if number[0] in numbers:
            _kill_all()


def _kill_all() -> None:
    """Kill the programs that run in any thread, and all processes that they have started."""
    with _starting:
        _ending.set()
        for mark, process in list(_running.items()):
            _kill_program(mark, process)


def _kill_program(mark: str, process: subprocess.Popen[str]) -> None:
    """Kill a program and all processes that it has started."""
    _kill_marked(mark)
    with suppress(ProcessLookupError):
        process.kill()


def _kill(process: int) -> None:
    """Kill a process, and wait until it has ended."""
    descriptor = os.pidfd_open(process)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], _GRACE)
    finally:
        os.close(descriptor)


def _kill_marked(mark: str) -> None:
    """Kill the processes of a program: launchers start them in groups and sessions of their own, but tell them all."""
    belongs = f"{_BELONGS}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if belongs in (entry / "environ").read_bytes().split(b"\0"):
                _kill(int(entry.name))


def _end(process: subprocess.Popen[str], mark: str) -> str:
    """End a program and all processes that it has started; return its output."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    _kill_program(mark, process)
    try:
        return process.communicate(timeout=_GRACE)[0]
    except subprocess.TimeoutExpired:
        return ""
