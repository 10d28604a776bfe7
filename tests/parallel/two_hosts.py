"""Two hosts emulated on one machine, by the script that does so for users."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, environment
from tests.parallel.program import THOROUGH


def two_hosts() -> list[str]:
    """Return the words that run a command on the first host; skip the test where there can be none."""
    words = ["bash", str(ROOT / "run_scripts" / "two_hosts.sh"), "unlimited"]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=PATIENCE * 20, check=False)
    if tried.returncode != 0:
        pytest.skip(tried.stderr.strip())
    return words


def mpirun_on_two_hosts() -> list[str]:
    """Return the words that start Open MPI's ranks on both hosts, in turn."""
    given = environment()
    mpirun = shutil.which("mpirun", path=given["PATH"])
    passed = [word for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", THOROUGH) for word in ("-x", name)]
    return [*two_hosts(), str(mpirun), "-H", "h1:8,h2:8", "--map-by", "node", "--bind-to", "none", *passed]
