"""Tests of the core (``-m core``) import no framework and start no process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CORE, FRAMEWORKS, PATIENCE, TESTS

ROOT = TESTS.parent

ELSEWHERE = FRAMEWORKS | {"horovod", "mpi4py", "subprocess", "multiprocessing"}


def imported(file: Path) -> set[str]:
    """Return all packages that a file imports, also in functions and by name, and those inside of this one."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("importorskip", "import_module")):
            names += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return {part for name in names for part in name.split(".")[:2]}


@pytest.mark.parametrize("file", sorted(CORE), ids=lambda file: file.stem)
def test_no_test_imports_a_framework(file: Path) -> None:
    assert imported(file) & ELSEWHERE == set()


def test_nothing_that_they_import_does() -> None:
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sorted(CORE)]
    program = f"import sys, {', '.join(modules)}; print(sorted({set(FRAMEWORKS)} & sys.modules.keys()))"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 60, check=True)
    assert done.stdout == "[]\n"
