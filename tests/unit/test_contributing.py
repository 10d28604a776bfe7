"""What the pages *Extend* add to the project, in a copy of it: one file each, with its test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SUITES = [
    "conformance/test_algorithms.py",
    "conformance/test_schedules.py",
    "conformance/test_placements.py",
]
"""They find what is new by themselves."""


@pytest.mark.timeout(60)
def test_every_file_works_as_it_stands(tmp_path: Path) -> None:
    pages = [path.read_text() for path in sorted((ROOT / "docs/extend").glob("*.md"))]
    listed = [FILE.findall(page) for page in pages]
    for of_page in listed:
        rooms = [path.partition("/")[0] for path, _ in of_page]
        assert rooms == ["hvd_periodic", "tests"] * (len(of_page) // 2), "every file is followed by its test"
    files = {path: content for of_page in listed for path, content in of_page}
    for folder in ("hvd_periodic", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    for file in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    for path, content in files.items():
        assert not (tmp_path / path).exists(), path
        (tmp_path / path).write_text(content)
    names = [Path(path).stem for path in files if path.startswith("hvd_periodic/")]
    tests = [path for path in files if path.startswith("tests/")]
    assert len(names) == len(tests) == 9
    tested = run_in(
        tmp_path,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-k",
        " or ".join(names),
        *tests,
        *(f"tests/{suite}" for suite in SUITES),
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    for found in ("test_it_is_a_value[Damped]", "test_it_is_a_value[Growing]"):
        assert f"{found} PASSED" in tested.stdout, tested.stdout
    checked = run_in(tmp_path, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package that is in a folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
