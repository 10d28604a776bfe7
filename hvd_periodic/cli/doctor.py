"""Check the installation, and run an exchange between two ranks; findings name the command that fixes them.

  hvdp doctor            all checks; under a minute on two idle cores
  hvdp doctor --quick    starts no jobs

Every check that may hang or crash runs in a separate process with a time limit. The exit code is 0 if there is no
problem, otherwise 1. With a warning, some features fail or are slow; with a problem, training does not work.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.cli import job_checks, machine_checks, output, processes, software_checks
from hvd_periodic.cli.findings import OK, PROBLEM, WARNING, Finding, fresh
from hvd_periodic.cli.usage_error import as_usage_error
from hvd_periodic.version import __version__

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--quick", action="store_true", help="start no jobs")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="number of ranks to run on this host (default: 2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="time limit of a check in seconds (default: 120)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    with as_usage_error():
        require_int(arguments.ranks, "`--ranks`", 1)
        require_real(arguments.timeout, "`--timeout`", positive=True)
    checks = CheckRunner(fresh(os.environ), arguments.timeout)
    findings = []
    with processes.ended_by_signals():
        for found in checks.findings(arguments.ranks, arguments.quick):
            findings.append(found)
            if not arguments.json:
                output.item(found.status, STYLES[found.status], f"{found.what}: {found.text}", found.mend)
    counts = {status: sum(found.status == status for found in findings) for status in STYLES}
    if arguments.json:
        output.write_json({"ok": not counts[PROBLEM], "findings": [asdict(found) for found in findings]})
    else:
        output.say()
        output.say(f"{_several(counts[PROBLEM], 'problem')}, {_several(counts[WARNING], 'warning')}")
    return 1 if counts[PROBLEM] else 0


class CheckRunner:
    """Runs checks, one after another, in processes with these environment variables and this time limit."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self._environment, self._seconds = environment, seconds

    def findings(self, ranks: int, quick: bool) -> Iterator[Finding]:
        """Yield the findings for ``ranks`` ranks on this host, as they come; ``quick``: start no jobs."""
        environment = self._environment
        yield Finding(OK, "hvd_periodic", f"{__version__}, numpy {np.__version__}")
        with output.progress("checking", 1 if quick else 8) as advance:
            names = (*software_checks.FRAMEWORKS, "mpi", "name")
            advance(0, "importing frameworks")
            with ThreadPoolExecutor() as threads:
                facts = dict(zip(names, threads.map(self._probe, names), strict=True))
            advance(1, "checking this machine")
            frameworks = {name: facts[name] for name in software_checks.FRAMEWORKS}
            yield from self._checked("frameworks", lambda: software_checks.frameworks(frameworks, environment))
            path = environment.get("PATH", os.defpath)
            mpiruns, horovodruns = software_checks.on_path("mpirun", path), software_checks.on_path("horovodrun", path)
            installed = {name: facts for name, facts in frameworks.items() if "version" in facts}
            horovod = any("missing" not in facts["horovod"] for facts in installed.values())
            yield from self._checked(
                "launchers",
                lambda: software_checks.launchers(mpiruns, horovodruns, horovod=horovod, torch="torch" in installed),
            )
            version = ""
            if mpiruns:
                version = processes.run([str(mpiruns[0]), "--version"], self._seconds, environment).output
            mpi4py = facts["mpi"]
            yield from self._checked("mpirun", lambda: software_checks.mpi(version, mpi4py, horovod))
            yield from self._checked("host name", lambda: machine_checks.host_name(facts["name"]))
            cores = len(os.sched_getaffinity(0))
            open_mpi = "Open MPI" in version or "Open RTE" in version
            yield from self._checked("/dev/shm", machine_checks.shared_memory)
            yield from self._checked("network interfaces", machine_checks.interfaces)
            yield from self._checked("cores", lambda: machine_checks.processor(environment, cores, ranks, open_mpi))
            yield from self._checked(
                "settings", lambda: machine_checks.settings(environment, os.geteuid() == 0, open_mpi, horovod)
            )
            mpirun, horovodrun = (str(files[0]) if files else None for files in (mpiruns, horovodruns))
            built = {name: each["horovod"] if software_checks.works(each) else {} for name, each in installed.items()}
            software = job_checks.Software(mpirun, horovodrun, built, "version" in mpi4py)
            yield from software.missing()
            for job in [] if quick else software.jobs():
                advance(1, f"trying {job.what}")
                yield from self._checked(job.what, partial(self._tried, job))

    def _probe(self, name: str) -> dict[str, Any]:
        """Return the report of a probe, or the reason why it has none."""
        ended = processes.run(processes.probe(name), self._seconds, self._environment)
        if ended.report is not None:
            return ended.report
        reason = f"it did not finish within {self._seconds:g} s" if ended.code is None else ended.last(1)
        return {"failed": reason, "host": "", "error": reason}

    def _tried(self, job: job_checks.Job) -> list[Finding]:
        return job_checks.try_job(job, self._seconds, self._environment)

    def _checked(self, what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Return the findings of a check; if it fails, the others still run."""
        try:
            return list(check())
        except Exception as error:
            return [Finding(WARNING, what, f"this check failed: {type(error).__name__}: {error}")]


def _several(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
