"""What the sources import, and the modules that an import loads; `lint-imports` checks the directions."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_periodic
from tests.conftest import PATIENCE

PACKAGE = Path(hvd_periodic.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

COMMAND_LINE = {"cli", "__main__.py"}

MAY_NAME_HOROVOD = {"torch", "tensorflow", *COMMAND_LINE}
"""Front ends and commands; of the core, only its communicator may."""

HEAVY = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py", "rich", "matplotlib"}

NAMES_HOROVOD = re.compile(r"horovod(\.\w+)*")


def room(path: Path) -> str:
    """Return the part of the package that a source file belongs to."""
    return path.relative_to(PACKAGE).parts[0]


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, anywhere in it, ``import_module`` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ``from hvd_periodic import synchronizer`` names a module in its second half.
            whole = node.module == "hvd_periodic"
            yield from (f"{node.module}.{alias.name}" if whole else str(node.module) for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def external(path: Path) -> set[str]:
    """Return the top-level packages that a file imports from outside the package and the standard library."""
    tops = {name.partition(".")[0] for name in imports(path)}
    return {top for top in tops if top not in sys.stdlib_module_names and top != "hvd_periodic"}


def test_the_core_does_not_name_horovod() -> None:
    """Not as a module that is imported by its name, either; one communicator may."""
    for path in SOURCES:
        if room(path) in MAY_NAME_HOROVOD or path == PACKAGE / "comm/horovod.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not NAMES_HOROVOD.fullmatch(node.value), f"{path}:{node.lineno} names {node.value}"


def test_commands_import_other_packages_when_they_are_run() -> None:
    """They say then how to install what is missing."""
    found = [path for path in SOURCES if room(path) in COMMAND_LINE]
    assert found
    for path in found:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                tops = {name.partition(".")[0] for name in names}
                assert tops <= {"numpy", "hvd_periodic", *sys.stdlib_module_names}, path


@pytest.mark.parametrize(
    "module",
    [
        *("hvd_periodic", "hvd_periodic.comm.threads", "hvd_periodic.comm.horovod"),
        *("hvd_periodic.sync.synchronizer", "hvd_periodic.cli.main"),
    ],
)
def test_the_core_loads_no_framework(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=True,
    )
    modules = json.loads(done.stdout)
    loaded = {name.partition(".")[0] for name in modules}
    assert "hvd_periodic" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert module.startswith("hvd_periodic.cli") or "hvd_periodic.cli" not in modules


def test_what_the_package_offers_is_there() -> None:
    for name in hvd_periodic.__all__:
        assert getattr(hvd_periodic, name) is not None
