"""Look at what is installed, and let two ranks exchange: each finding with the command that mends it.

  hvdp doctor            everything; a minute or two
  hvdp doctor --quick    starts no jobs

Everything that may hang or crash runs in processes of its own, with a time limit. The exit code is 0 if there is no
problem, otherwise 1. Of what is a warning, some things do not work, or slowly; with a problem training does not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.cli import installed, jobs, machine, output, processes
from hvd_periodic.cli.findings import OK, PROBLEM, WARNING, Finding, cores, fresh
from hvd_periodic.cli.refusal import refusing
from hvd_periodic.version import __version__

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--quick", action="store_true", help="start no jobs")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="that are to run on this host (default: 2)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for a check (default: 120)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")


def run(arguments: argparse.Namespace) -> int:
    """Look, and print."""
    with refusing():
        require_int(arguments.ranks, "`--ranks`", 1)
        require_real(arguments.timeout, "`--timeout`", positive=True)
    examination = Examination(fresh(os.environ), arguments.timeout)
    findings = examination.findings(arguments.ranks, arguments.quick)
    counts = {status: sum(found.status == status for found in findings) for status in STYLES}
    if arguments.json:
        output.write_json({"ok": not counts[PROBLEM], "findings": [asdict(found) for found in findings]})
    else:
        for found in findings:
            output.item(found.status, STYLES[found.status], f"{found.what}: {found.text}", found.mend)
        output.say()
        output.say(f"{_several(counts[PROBLEM], 'problem')}, {_several(counts[WARNING], 'warning')}")
    return 1 if counts[PROBLEM] else 0


class Examination:
    """Runs checks, one after another.

    Args:
        environment: of the processes that are started.
        seconds: for each of them.
    """

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self._environment, self._seconds = environment, seconds

    def findings(self, ranks: int, quick: bool) -> list[Finding]:
        """Return what is found, for so many ranks on this host; ``quick``: no jobs."""
        environment = self._environment
        found = [Finding(OK, "hvd_periodic", f"{__version__}, numpy {np.__version__}")]
        with output.progress("looking", 4 if quick else 12) as advance:

            def facts(name: str) -> dict[str, Any]:
                advance(1, f"looking at {name}")
                return self._probe(name)

            frameworks = {name: facts(name) for name in installed.TITLES}
            found += self._checked("frameworks", lambda: installed.frameworks(frameworks, environment))
            path = environment.get("PATH", os.defpath)
            mpiruns, horovodruns = installed.on_path("mpirun", path), installed.on_path("horovodrun", path)
            found += self._checked("launchers", lambda: installed.launchers(mpiruns, horovodruns))
            version = self._printed([str(mpiruns[0]), "--version"]) if mpiruns else ""
            mpi4py = facts("mpi")
            found += self._checked("mpirun", lambda: installed.mpi(version, mpi4py))
            name = facts("name")
            found += self._checked("host name", lambda: machine.host_name(name))
            open_mpi = "Open MPI" in version or "Open RTE" in version
            found += self._checked("/dev/shm", machine.shared_memory)
            found += self._checked("network interfaces", machine.interfaces)
            found += self._checked("cores", lambda: machine.processor(environment, cores(), ranks, open_mpi))
            found += self._checked("settings", lambda: machine.settings(environment, os.geteuid() == 0, open_mpi))
            works = [name for name, facts in frameworks.items() if installed.works(facts)]
            if not quick and works:
                built = {name: frameworks[name]["horovod"] for name in works}
                mpirun, horovodrun = (str(files[0]) if files else None for files in (mpiruns, horovodruns))
                for job in jobs.jobs(mpirun, horovodrun, built, "version" in mpi4py):
                    advance(1, f"trying {job.what}")
                    found += self._checked(job.what, partial(self._tried, job))
        return found

    def _probe(self, name: str) -> dict[str, Any]:
        """Return what a process has found out; what went wrong, if it did."""
        ended = processes.run(processes.probe(name), self._seconds, self._environment)
        if ended.report is not None:
            return ended.report
        reason = f"no end within {self._seconds:g} s" if ended.code is None else ended.last(1)
        return {"failed": reason, "host": "", "error": reason}

    def _tried(self, job: jobs.Job) -> list[Finding]:
        return [jobs.tried(job, self._seconds, self._environment)]

    def _printed(self, words: list[str]) -> str:
        return processes.run(words, self._seconds, self._environment).output

    def _checked(self, what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Return what a check finds; one that fails ends no others."""
        try:
            return list(check())
        except Exception as error:
            return [Finding(WARNING, what, f"this could not be looked at: {type(error).__name__}: {error}")]


def _several(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
