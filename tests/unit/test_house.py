"""The size of things, and that modules can be read from the bottom up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hvd_periodic

PACKAGE = Path(hvd_periodic.__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}

LINES = {"file": 450, "class": 300, "function": 60}
"""What a reader is asked to keep in mind at a time; docstrings and decorators count."""

STRICTER = {"sync/synchronizer.py": 260}
"""Files that put parts together, and are to stay short."""


def things(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield kind, name and number of lines of a file and of all classes and functions in it."""
    text = path.read_text()
    yield "file", path.name, len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(part.lineno for part in (node, *node.decorator_list))
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield kind, node.name, int(node.end_lineno or first) - first + 1


def too_long(path: Path, lines: int = LINES["file"]) -> list[str]:
    limits = LINES | {"file": lines}
    return [f"{kind} {name} has {n} lines" for kind, name, n in things(path) if n > limits[kind]]


def module_name(relative: str) -> str:
    parts = ("hvd_periodic", *Path(relative).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(relative): path for relative, path in SOURCES.items()}


def imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys()
            found |= {str(node.module)} if names - MODULES.keys() else set()
    return found & MODULES.keys()


@pytest.mark.parametrize("relative", SOURCES)
def test_nothing_is_long(relative: str) -> None:
    problems = too_long(SOURCES[relative], STRICTER.get(relative, LINES["file"]))
    assert not problems, f"{relative}: {'; '.join(problems)}"


def test_imports_have_no_circle() -> None:
    try:
        TopologicalSorter({name: imported(path) for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' ← '.join(error.args[1])}")


def test_what_is_measured(tmp_path: Path) -> None:
    """A decorator counts, a nested function as well as what it is in."""
    source = tmp_path / "example.py"
    source.write_text("@decorated\nclass A:\n    def f():\n        def g():\n            pass\n")
    assert sorted(things(source)) == [
        ("class", "A", 5),
        ("file", "example.py", 5),
        ("function", "f", 3),
        ("function", "g", 2),
    ]
    source.write_text("def f():\n" + 60 * "    pass\n")
    assert too_long(source) == ["function f has 61 lines"]
