"""Imports go one way; the sources are parsed, so that a new file is checked without being named here."""

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

LEVELS = [
    {"arguments", "buffers", "choices", "named", "ranks", "version"},
    {"vectors"},
    {"outer"},
    {"algorithms", "schedules", "comm"},
    {"checkpoints", "journal", "local_state", "replica", "wires"},
    {"centers", "cost_model", "options"},
    {"asynchronous"},
    {"sync"},
]
"""Rooms of the core, lowest first; each imports itself and lower ones. What is not listed is a front end, above all."""

COMMAND_LINE = ["cli", "__main__"]
"""Above front ends, lowest first; nothing else imports these."""

FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
"""Frameworks, and the only room that may import each, besides commands when they run."""

OF_TORCH = "comm/torch_distributed.py"
"""Outside of that room, the only file that may import torch; nothing but the room imports it."""

HEAVY = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py", "rich", "matplotlib"}

OF_MPI = {"comm/mpi.py", "comm/window.py", "comm/messages.py", "cli/probe.py"}
"""The only files that may import mpi4py."""

NAMES_HOROVOD = re.compile(r"horovod(\.\w+)*")


def room(path: Path) -> str:
    """Return the part of the package that a source file belongs to; ``""`` for the package itself."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def level(name: str) -> int:
    """Return how high a room is; everything that is not of the core is a front end."""
    if name == "":
        return len(LEVELS) + 1
    if name in COMMAND_LINE:
        return len(LEVELS) + 2 + COMMAND_LINE.index(name)
    return next((i for i, names in enumerate(LEVELS) if name in names), len(LEVELS))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, anywhere in it, ``import_module`` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                # ``from hvd_periodic import synchronizer`` names a module in its second half.
                yield f"{node.module}.{alias.name}" if node.module == "hvd_periodic" else str(node.module)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def external(path: Path) -> set[str]:
    """Return the top-level packages that a file imports from outside the package and the standard library."""
    tops = {name.partition(".")[0] for name in imports(path)}
    return {top for top in tops if top not in sys.stdlib_module_names and top != "hvd_periodic"}


def internal(path: Path) -> set[str]:
    """Return the rooms that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("hvd_periodic.")}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.fixture(params=SOURCES, ids=relative)
def source(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_the_sources_are_found() -> None:
    rooms = {room(path) for path in SOURCES}
    assert set().union(*LEVELS) <= rooms, "a room has been renamed: say here at which level it is"
    assert len(SOURCES) > 20


def test_imports_go_one_way(source: Path) -> None:
    here = room(source)
    if here == "":
        assert internal(source).isdisjoint(FRAMEWORKS), "importing the package would load a framework"
        assert internal(source).isdisjoint(COMMAND_LINE)
        return
    for other in internal(source) - {here}:
        assert level(other) <= level(here), f"{source}: {here} imports {other}, which is above it"
        if level(here) > 0:
            assert level(other) < level(here), f"{source}: {here} imports its neighbour {other}"


def test_frameworks_stay_in_their_rooms(source: Path) -> None:
    for top in (external(source) & FRAMEWORKS.keys()) - ({"torch"} if relative(source) == OF_TORCH else set()):
        assert room(source) in (FRAMEWORKS[top], *COMMAND_LINE), f"{source} imports {top}"


def test_only_the_room_of_torch_imports_its_communicator(source: Path) -> None:
    if room(source) != "torch" and relative(source) != OF_TORCH:
        assert "hvd_periodic.comm.torch_distributed" not in imports(source)


def test_the_core_needs_numpy_only(source: Path) -> None:
    if level(room(source)) < len(LEVELS) and relative(source) not in OF_MPI:
        allowed = {"numpy"} if room(source) != "algorithms" else set()
        alone = {"comm/horovod.py": {"horovod"}, OF_TORCH: {"torch"}, "cost_model/fits.py": {"scipy"}}
        allowed |= alone.get(relative(source), set())
        assert external(source) <= allowed, source
    assert relative(source) in OF_MPI or "mpi4py" not in external(source)


def test_only_its_communicator_and_front_ends_name_horovod(source: Path) -> None:
    if level(room(source)) == len(LEVELS) or room(source) in COMMAND_LINE or relative(source) == "comm/horovod.py":
        return
    assert "horovod" not in external(source)
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not NAMES_HOROVOD.fullmatch(node.value), f"{source}:{node.lineno} names {node.value}"


def test_the_command_line_needs_numpy_only(source: Path) -> None:
    """What its commands use besides, they import when they are run, and say how to install it."""
    if room(source) not in COMMAND_LINE:
        return
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            tops = {name.partition(".")[0] for name in names}
            assert tops <= {"numpy", "hvd_periodic", *sys.stdlib_module_names}, source


def test_no_assert_in_library_code(source: Path) -> None:
    """``python -O`` drops them, and users read messages."""
    lines = [node.lineno for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Assert)]
    assert not lines, f"{source}: assert in lines {lines}"


def test_every_module_says_what_it_is(source: Path) -> None:
    assert ast.get_docstring(ast.parse(source.read_text())), source


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
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "hvd_periodic" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_what_the_package_offers_is_there() -> None:
    for name in hvd_periodic.__all__:
        assert getattr(hvd_periodic, name) is not None
