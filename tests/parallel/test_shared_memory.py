"""A small /dev/shm, as containers have it; and what is left there when jobs end, in any way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.conftest import PATIENCE
from tests.parallel.launch import MPIRUN, ROOT, environment, kill_session
from tests.parallel.tiers import thorough

pytest.importorskip("mpi4py")

pytestmark = pytest.mark.timeout(120)

LEFT = "left in /dev/shm:"
SERVICE = "Asynchronous exchange of 2 ranks through messages to a service thread on rank 0"
WINDOW = "Asynchronous exchange of 2 ranks through a window of shared memory"

# The center has 7 buckets; each of the two ranks has room for one more of 16 MiB, and one of 4; and there is a log.
DOES_NOT_FIT = "it needs 141.0 MiB in /dev/shm and 8 MiB to spare for MPI, and 63."


def job(mib: int, end: str, by_signal: signal.Signals | None = None, transport: str = "") -> tuple[int, str, list[str]]:
    """Train on 2 ranks with 64 MB of /dev/shm of their own; return exit code, output, and what is left there."""
    program = [sys.executable, "-m", "tests.parallel.shared_memory_program", str(mib), end]
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; "$@" & echo mpirun $!; wait $!; code=$?; '
    script += f"echo {LEFT} $(ls -A /dev/shm); exit $code"
    lines: list[str] = []
    with subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", script, "bash", *MPIRUN, "-np", "2", *program],
        env=environment() | {"HVD_PERIODIC_TRANSPORT": transport},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if by_signal is not None and "".join(lines).count("in training") == 2:
                    os.kill(int(lines[0].split()[1]), by_signal)
                    by_signal = None
        finally:
            kill_session(process.pid)
    output = "".join(lines)
    return process.returncode, output, output.rpartition(LEFT)[2].split()


@pytest.fixture(scope="module", autouse=True)
def _namespace() -> None:
    if shutil.which("unshare") is None or shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no unshare, or no mpirun")
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tried = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE * 10, check=False)
    if tried.returncode != 0:
        pytest.skip(f"/dev/shm cannot be mounted here: {tried.stderr.strip()}")


def test_a_center_that_fits() -> None:
    """And that keeps its memory when others take the rest."""
    code, output, left = job(14, "full")
    assert code == 0, output
    assert output.count(WINDOW) == 1
    assert output.count("The center is") == 2
    assert left == []


def test_a_center_that_does_not() -> None:
    code, output, left = job(100, "end")
    assert code == 0, output
    assert (
        output.count(f"No shared memory for the asynchronous center; using a service thread: rank 0: {DOES_NOT_FIT}")
        == 1
    )
    assert output.count(SERVICE) == 1
    assert output.count("The center is") == 2
    assert left == []


def test_a_window_that_is_asked_for_and_does_not_fit() -> None:
    code, output, left = job(100, "end", transport="window")
    assert code == 1
    asked = "RuntimeError: HVD_PERIODIC_TRANSPORT=window, but the ranks cannot share the center's memory: rank 0: "
    assert asked + DOES_NOT_FIT in output
    assert left == []


@pytest.mark.parametrize(
    ("end", "by_signal"),
    [
        thorough("exception", None),
        ("killed", None),
        ("signal", signal.SIGTERM),
        thorough("signal", signal.SIGINT),
        thorough("signal", signal.SIGKILL),
    ],
)
def test_nothing_is_left(end: str, by_signal: signal.Signals | None) -> None:
    """Whatever ends the job. Open MPI's own files stay where mpirun, which removes them, is killed itself.

    A rank says that it is in training after all are; who is ended by another may not come to say so.
    """
    code, output, left = job(12, end, by_signal)
    assert code != 0, output
    assert "in training" in output
    if by_signal == signal.SIGKILL:
        left = [name for name in left if not name.startswith("vader_segment.")]
    assert left == []
