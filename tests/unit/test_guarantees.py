"""Every promise of the guarantees names tests, and those exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/concepts/guarantees.md").read_text()
PROMISES = [
    line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line and "broken on" not in line
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[2:50])
def test_a_promise_has_tests(promise: str) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", promise)
    assert tests
    for path, name in tests:
        functions = [
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert any(function.startswith("test_") for function in functions)
        assert not name or name in functions, f"{path} has no {name}"


def test_there_are_promises() -> None:
    assert len(PROMISES) >= 15
