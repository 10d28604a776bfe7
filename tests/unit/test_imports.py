"""What the sources import, and the modules that an import loads; `lint-imports` checks the directions."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvd_periodic
from tests.conftest import PATIENCE

PACKAGE = Path(hvd_periodic.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

COMMAND_LINE = {"cli", "__main__.py"}

MAY_NAME_HOROVOD = {"torch", "keras", "tensorflow", "numpy", *COMMAND_LINE}
"""Front ends and commands; of the core, only its communicator may."""

HEAVY = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py", "rich", "matplotlib"}

IN_ONE_FILE = {
    r"\b(_getframe|currentframe|_current_frames|f_locals|f_back|gi_frame)\b": "frames.py",
    r"\bos\._exit\b": "comm/process_end.py",
    r"\bexcepthook = ": "comm/exit_notice.py",
    r"\b_foreach_": "torch/foreach.py",
    r"\btensorflow\.python\b|__internal__|\bkeras\.src\b": "tensorflow/private.py",
}
"""What reaches into Python or a framework, and the file of each kind."""

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
    """Not as a module that is imported by its name, either; its communicator may, and the choice of a library."""
    for path in SOURCES:
        if room(path) in MAY_NAME_HOROVOD or path in (PACKAGE / "comm/horovod.py", PACKAGE / "comm/selection.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not NAMES_HOROVOD.fullmatch(node.value), f"{path}:{node.lineno} names {node.value}"


def test_no_front_end_needs_horovod() -> None:
    found = set()
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "horovod" for name in names):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == set()


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
        *("hvd_periodic.sync.synchronizer", "hvd_periodic.numpy", "hvd_periodic.cli.main"),
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


def test_what_reaches_into_python_or_a_framework_is_in_one_file_of_each_kind() -> None:
    for pattern, home in IN_ONE_FILE.items():
        found = [path.relative_to(PACKAGE).as_posix() for path in SOURCES if re.search(pattern, code_of(path))]
        assert found == [home]


@cache
def code_of(path: Path) -> str:
    """Return a source file without comments."""
    return ast.unparse(ast.parse(path.read_text()))


def test_importing_the_package_has_no_side_effects() -> None:
    program = """
import atexit, gc, json, logging, os, signal, sys, threading, warnings
import numpy

def state():
    signals = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    threads = [thread.name for thread in threading.enumerate()]
    loggers = [logging.getLogger().handlers, logging.getLogger("hvd_periodic").handlers, logging.getLogger().level]
    hooks = [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()]
    return list(map(str, [signals, threads, loggers, hooks, warnings.filters, gc.callbacks, sys.meta_path, sys.path,
                          atexit._ncallbacks(), sorted(os.environ.items()), os.getcwd()]))

before = state()
import hvd_periodic
print(json.dumps([before, state()]))
"""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE * 60, check=True)
    before, after = json.loads(done.stdout)
    assert before == after
