"""Starts real jobs from plain pytest, with a hard timeout, and collects what every rank reports.

Jobs whose framework is named share its imports: their ranks are forked from processes that have imported it, see
``warm.py``. The others start Python anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE
from tests.parallel.program import CHOSEN
from tests.parallel.warm import SERVERS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

WARM = str(Path(__file__).with_name("warm.py"))
CLIENT = [sys.executable, "-S", WARM]

MODULES = {
    "torch alone": ("torch", "torch._dynamo", "torch.distributed.run", "tests.oracle"),
    "torch": ("horovod.torch", "hvd_periodic.torch", "tests.helpers"),
    "trainers alone": ("accelerate", "transformers.trainer", "lightning.pytorch", "ignite.engine"),
    "trainers": ("horovod.torch", "hvd_periodic.torch", "tests.helpers"),
    "tensorflow": (
        *("horovod.tensorflow", "hvd_periodic.tensorflow", "hvd_periodic.tensorflow.contrib_opt"),
        *("keras", "tensorflow.compat.v1", "horovod.runner.launch", "tests.oracle", "tests.helpers"),
    ),
}
"""What the ranks of a framework share; nothing of it may start a thread, or MPI. For trainers, see ``beside.py``.

``alone``: for scenarios that have no Horovod, as under torchrun.
"""

BEYOND = {"torch": "torch alone", "trainers alone": "torch alone", "trainers": "trainers alone"}
"""What has the modules of another, and more: its processes are forked from those of the other."""

OF_EXAMPLES = ("matplotlib.pyplot", "rich", "sklearn.datasets", "sklearn.model_selection", "tqdm")
"""What examples import besides, where it is installed."""

MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none"]
LAUNCHERS = {
    "python": [],
    "mpirun": MPIRUN,
    "mpirun, Horovod": ["env", "HVD_PERIODIC_COMM=horovod", *MPIRUN],
    "mpirun, MPI": ["env", "HVD_PERIODIC_COMM=mpi", *MPIRUN],
    "mpirun, torch.distributed": ["env", "HVD_PERIODIC_COMM=torch", *MPIRUN],
    "horovodrun --gloo": ["horovodrun", "--gloo"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "--mpi-args=--oversubscribe"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "accelerate launch": [sys.executable, "-m", "accelerate.commands.launch", "--cpu"],
}
"""``--standalone``: at a port that is free."""

NUMBER = {"torchrun": "--nproc-per-node", "accelerate launch": "--num_processes"}
"""How launchers that start Python themselves are told the number of ranks."""

NO_PYTHON = {"torchrun": "--no-python", "accelerate launch": "--no_python"}
"""How those are told that the command is a program."""


def environment() -> dict[str, str]:
    """Return the environment of a fresh shell: without what an MPI in this very process may have left."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "PMI_"))}
    return inherited | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Ranks that wait let others have their core: there are more processes than cores.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # libfabric, which no test uses, sleeps for a second at the end of every job.
        "OMPI_MCA_btl": "^ofi",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


@cache
def _shared_folder() -> tuple[Path, int]:
    """Return a folder for this run of pytest, whose workers share it, and the process that lives as long as the run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return Path(tempfile.mkdtemp(prefix="hvd_periodic_")), os.getpid()
    return Path(tempfile.gettempdir(), f"hvd_periodic_{run}"), os.getppid()


@cache
def _servers(framework: str) -> str:
    """Start the processes that become ranks, unless another worker has; they end with the run."""
    shared, owner = _shared_folder()
    folder = shared / framework.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "0").exists():
            _start_servers(framework, f"{folder}/", owner)
    finally:
        os.close(lock)
    return f"{folder}/"


def _start_servers(framework: str, prefix: str, owner: int) -> None:
    modules = [*MODULES[framework], *(name for name in OF_EXAMPLES if find_spec(name.partition(".")[0]) is not None)]
    before = BEYOND.get(framework)
    processes = []
    for number in range(SERVERS):
        words = [sys.executable] if before is None else [*CLIENT, "on", f"{_servers(before)}{number}"]
        process = subprocess.Popen(
            [*words, WARM, "server", f"{prefix}{number}", str(owner), *modules],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        processes.append(process)
        _STARTED.append(process)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"Imports of {framework}: the reason is above"


_STARTED: list[subprocess.Popen[str]] = []
"""What is not waited for: it ends after this process."""


def python(framework: str | None) -> list[str]:
    """Return the words before a Python command: a new interpreter, or one that has imported a framework."""
    return [sys.executable] if framework is None else [*CLIENT, "client", _servers(framework)]


def _words(launcher: str) -> list[str]:
    """Return how a launcher is started; horovodrun, which imports all frameworks, from one that has."""
    words = LAUNCHERS[launcher]
    if words[:1] != ["horovodrun"] or find_spec("tensorflow") is None:
        return words
    return [*python("tensorflow"), "-m", "horovod.runner.launch", *words[1:]]


def start(
    launcher: str, ranks: int, command: Sequence[str], timeout_seconds: float, framework: str | None = None
) -> str:
    """Run a Python command on some ranks and return what they printed.

    Args:
        framework: what the ranks share the imports of; ``None``: they start anew.

    Raises:
        AssertionError: the job failed or ran out of time; with its output. Nothing of it is left running.
    """
    code, output = run(launcher, ranks, command, timeout_seconds, framework)
    assert code == 0, f"Exit {code}: {launcher} {ranks} {command}\n{output}"
    return output


def run(
    launcher: str, ranks: int, command: Sequence[str], timeout_seconds: float, framework: str | None = None
) -> tuple[int, str]:
    """Run a Python command on some ranks, as ``start``; return exit code and what it printed.

    Raises:
        AssertionError: the job ran out of time; with its output.
    """
    words = _words(launcher)
    if launcher in NUMBER:
        words = [*words, NUMBER[launcher], str(ranks)]
        if framework is None:
            return _run([*words, *command], timeout_seconds)
        shared = python(f"{framework} alone")
        return _run([*shared, *words[1:], NO_PYTHON[launcher], *shared, *command], timeout_seconds)
    numbers = ["-np", str(ranks)] if words else []
    return _run([*words, *numbers, *python(framework), *command], timeout_seconds)


def run_elastic(
    ranks: int,
    discovery: Path,
    command: Sequence[str],
    timeout_seconds: float,
    framework: str,
    most: int = 2,
    joins: bool = True,
) -> tuple[int, str]:
    """Run a Python command under elastic Horovod with one to ``most`` ranks; return exit code and what it printed.

    The ranks share the imports of the framework, those that join as well.

    So long as Gloo's timeout takes it until the last of several survivors knows of a loss. Ranks that are started
    while others wait for them need more, where cores are busy; ``joins`` says that there may be some.
    """
    words = [*_words("horovodrun --gloo"), "--gloo-timeout-seconds", "60" if joins else "15"]
    words += ["--network-interface", "lo"]
    words += ["-np", str(ranks), "--min-np", "1"]
    words += ["--max-np", str(most), "--host-discovery-script", str(discovery)]
    return _run([*words, *python(framework), *command], timeout_seconds)


def _run(words: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    process = subprocess.Popen(
        words,
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE * timeout_seconds)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"No end within {PATIENCE * timeout_seconds} s: {' '.join(words)}\n{output}") from None
    return process.returncode, output


def kill_session(leader: int) -> None:
    """End a process and all that it has started, also where Open MPI has put it into process groups of its own."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def run_scenarios(
    launcher: str,
    ranks: int,
    program: str,
    folder: Path,
    timeout_seconds: float,
    *arguments: str,
    framework: str | None = None,
    only: Sequence[str] = (),
) -> list[Any]:
    """Run a program of this folder, which writes ``<rank>.json``; return the contents in rank order.

    Where scenarios are named by ``only``, the program runs these: what does not depend on the number of ranks needs no
    job of every size.

    Raises:
        AssertionError: as ``start``; with the scenario that each rank was in.
    """
    if only:
        (folder / CHOSEN).write_text("\n".join(only))
    try:
        command = ["-m", f"tests.parallel.{program}", str(folder), *arguments]
        start(launcher, ranks, command, timeout_seconds, framework)
    except AssertionError as error:
        places = {rank: folder / f"{rank}.now" for rank in range(ranks)}
        under_way = [f"rank {rank}: {file.read_text()}" for rank, file in places.items() if file.exists()]
        raise AssertionError(f"{error}\nUnder way: {', '.join(under_way) or 'no scenario'}") from None
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
