"""Checks of the doctor that start jobs of two ranks: with each launcher, and with each asynchronous transport."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_periodic.cli import processes
from hvd_periodic.cli.findings import OK, PROBLEM, SETUP, WARNING, Finding
from hvd_periodic.cli.machine_checks import ROOT, TRANSPORT, YIELD
from hvd_periodic.cli.software_checks import TITLES

RANKS = 2

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
    """

    what: str
    launcher: Sequence[str]
    program: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False


def jobs(
    mpirun: str | None, horovodrun: str | None, built: Mapping[str, Mapping[str, bool]], mpi4py: bool
) -> Iterator[Job]:
    """Yield the jobs that should work here.

    Args:
        mpirun: path of mpirun; None: there is none.
        horovodrun: path of horovodrun; likewise.
        built: by framework, whether its Horovod was built with the controllers ``"mpi"`` and ``"gloo"``.
        mpi4py: whether mpi4py can be imported.
    """
    for framework, controllers in built.items():
        exchange, title = processes.probe("exchange", framework), TITLES[framework]
        by_mpi = bool(mpirun) and controllers["mpi"]
        if mpirun and by_mpi:
            yield Job(f"{title}, mpirun", [mpirun], exchange, needed=True)
        if horovodrun and controllers["gloo"]:
            yield Job(f"{title}, horovodrun --gloo", [horovodrun, "--gloo"], exchange, needed=not by_mpi)
        if horovodrun and by_mpi:
            yield Job(f"{title}, horovodrun --mpi", [horovodrun, "--mpi"], exchange)
    if mpirun and mpi4py and any(controllers["mpi"] for controllers in built.values()):
        for transport in ("window", "service"):
            program = processes.probe("asynchronous")
            yield Job(f"asynchronous, {transport}", [mpirun], program, {TRANSPORT: transport})


def try_job(job: Job, seconds: float, environment: Mapping[str, str]) -> Finding:
    """Start a job; return its result.

    It works around problems that other checks report, such as root's permissions, so that one run finds all of them.
    """
    complete = {**environment, **dict.fromkeys((*ROOT, YIELD), "1"), "OMP_NUM_THREADS": "1", **job.variables}
    words = [*job.launcher, "-np", str(RANKS), *job.program, f"{seconds:g}"]
    started = time.perf_counter()
    ended = processes.run(words, seconds + 10, complete)
    oversubscribed = bool(_SLOTS.search(ended.output))
    if oversubscribed:
        more = ["--mpi-args=--oversubscribe"] if "--mpi" in job.launcher else ["--oversubscribe"]
        words = [*job.launcher, *more, *words[len(job.launcher) :]]
        started = time.perf_counter()
        ended = processes.run(words, seconds + 10, complete)
    finding = judge(job, ended, time.perf_counter() - started, words)
    if oversubscribed and finding.status == OK:
        mend = shlex.join([*words[: len(job.launcher) + 1], "-np", str(RANKS), "..."])
        return Finding(WARNING, job.what, f"{finding.text}; the launcher counts fewer than {RANKS} slots", mend)
    return finding


def judge(job: Job, ended: processes.ProgramResult, seconds: float, words: Sequence[str]) -> Finding:
    """Return the finding about a job that has ended."""
    bad = PROBLEM if job.needed else WARNING
    assignments = [f"{name}={value}" for name, value in job.variables.items()]
    again = " ".join([*assignments, shlex.join(words)])
    report = ended.report
    if report is None or "error" in report:
        if ended.hung is not None:
            text = f"{RANKS} ranks did not complete an exchange in time: {ended.hung}"
        else:
            reason = ended.last() if report is None else report["error"]
            text = f"{RANKS} ranks ended with exit code {ended.code}: {reason}"
        return Finding(bad, job.what, text, _mend(ended.output, again))
    if report["ranks"] != RANKS:
        text = (
            f"{RANKS} processes were started, and each sees {report['ranks']} rank: the launcher belongs to another MPI"
        )
        return Finding(bad, job.what, text, SETUP)
    if not report["right"]:
        return Finding(bad, job.what, "ranks exchange, but the results are wrong", again)
    if report.get("world") not in (None, RANKS):
        text = f"Horovod sees {RANKS} ranks, but mpi4py {report['world']}: it was built for another MPI"
        return Finding(WARNING, job.what, text, "pip install --force-reinstall --no-binary mpi4py 'mpi4py>=4'")
    if report.get("threads") is False:
        text = "ranks exchange; MPI has no MPI_THREAD_MULTIPLE, so that asynchronous exchange is refused"
        return Finding(WARNING, job.what, text, SETUP)
    if ended.code != 0:
        return Finding(bad, job.what, f"ranks exchange, but end with exit code {ended.code}: {ended.last()}", again)
    return Finding(OK, job.what, f"{RANKS} ranks exchange; {seconds:.0f} s from start to end")


def _mend(output: str, again: str) -> str:
    """Return the command that fixes an error of the launcher; for any other error, the command that reproduces it."""
    if "allow-run-as-root" in output:
        return f"export {' '.join(f'{name}=1' for name in ROOT)}"
    if _FLAGS.search(output):
        return "mpirun -np 2 ...  # or horovodrun --gloo"
    return again
