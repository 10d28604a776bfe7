"""A test that is skipped in all jobs makes its file fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.every_scenario import EveryScenario

def pytest_configure(config):
    config.pluginmanager.register(EveryScenario())
"""

TESTS = """
import pytest
from tests.parallel.program import column

@pytest.fixture(params=["first", pytest.param("second", marks=pytest.mark.thorough)])
def ranks(request):
    return [{request.param: 1, "not run": dict.fromkeys({"first", "second", "third"} - {request.param}, "why")}]

@pytest.mark.parametrize("mode", ["one", "another"])
def test_of_the_first(ranks, mode):
    assert column(ranks, "first") == [1]

def test_of_the_second(ranks):
    assert column(ranks, "second") == [1]
"""

OF_NONE = """
def test_of_none(ranks):
    assert column(ranks, "third") == [1]
"""


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        (TESTS, [], ""),
        (TESTS, ["-m", "not thorough"], ""),
        (TESTS + OF_NONE, [], "No job has the scenarios of test_jobs.py::test_of_none"),
        (TESTS + OF_NONE, ["-k", "of_none"], "No job has the scenarios of test_jobs.py::test_of_none"),
        (TESTS + OF_NONE, ["-m", "not thorough"], ""),
        (TESTS + OF_NONE, ["test_jobs.py::test_of_none"], ""),
    ],
)
def test_tests_that_no_job_runs(text: str, words: list[str], error: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_jobs.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:hypothesispytest", *words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert (done.returncode == 0) == (error == ""), done.stdout
    assert error in done.stdout
