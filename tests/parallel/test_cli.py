"""The command line with real jobs: the doctor on this machine, and a plan for the network between ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from hvd_periodic.cli.software_checks import TITLES
from hvd_periodic.comm.selection import LIBRARIES
from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, environment, start
from tests.parallel.tiers import thorough


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_doctor_finds_that_ranks_exchange() -> None:
    """Of each front end over each library, and through each transport; this machine runs all of these tests."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_periodic", "doctor", "--json", "--timeout", str(PATIENCE * 30)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 300,
        check=False,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout + done.stderr
    jobs = [each for each in found["findings"] if "ranks exchange" in each["text"]]
    front_ends = [title for name, title in TITLES.items() if name == "numpy" or find_spec(name) is not None]
    names = {f"{title} over {library}, mpirun" for title in front_ends for library in LIBRARIES.values()}
    names |= {f"{front_ends[0]} over Horovod, horovodrun --gloo", "asynchronous, window", "asynchronous, service"}
    assert {each["what"] for each in jobs} == names, done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["mpirun", thorough("horovodrun --gloo")])
def test_a_plan_for_the_network_of_a_job(launcher: str) -> None:
    """One rank prints; a number of bytes takes some time."""
    words = ["-m", "hvd_periodic", "plan", "--parameters", "1M", "--step", "10", "--measure", "--algorithm", "easgd"]
    shared = "torch" if find_spec("torch") is not None and find_spec("horovod") is not None else None
    output = start(launcher, 2, words, 120, shared)
    assert output.count("allreduce of gradients") == output.count("easgd, int8, overlap        10") == 1
    assert "2 ranks" in output
    assert "\x1b" not in output
    assert "Period: " in output
