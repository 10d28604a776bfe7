"""Starts real jobs from plain pytest, with a hard timeout, and collects what every rank reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none"]
LAUNCHERS = {
    "python": [],
    "mpirun": MPIRUN,
    "horovodrun --gloo": ["horovodrun", "--gloo"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "--mpi-args=--oversubscribe"],
}


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
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def start(launcher: str, ranks: int, command: Sequence[str], timeout_seconds: float) -> str:
    """Run a Python command on some ranks and return what they printed.

    Raises:
        AssertionError: the job failed or ran out of time; with its output. Nothing of it is left running.
    """
    words = LAUNCHERS[launcher]
    numbers = ["-np", str(ranks)] if words else []
    code, output = _run([*words, *numbers, sys.executable, *command], timeout_seconds)
    assert code == 0, f"Exit {code}: {launcher} {ranks} {command}\n{output}"
    return output


def run_elastic(ranks: int, discovery: Path, command: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    """Run a Python command under elastic Horovod; return the exit code and what it printed."""
    words = ["horovodrun", "--gloo", "--network-interface", "lo", "-np", str(ranks), "--min-np", "1", "--max-np", "2"]
    words += ["--host-discovery-script", str(discovery)]
    return _run([*words, sys.executable, *command], timeout_seconds)


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
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"No end within {PATIENCE * timeout_seconds} s: {' '.join(words)}\n{output}") from None
    return process.returncode, output


def run_scenarios(
    launcher: str, ranks: int, program: str, folder: Path, timeout_seconds: float, *arguments: str
) -> list[Any]:
    """Run a program of this folder, which writes ``<rank>.json``; return the contents in rank order."""
    start(launcher, ranks, ["-m", f"tests.parallel.{program}", str(folder), *arguments], timeout_seconds)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
