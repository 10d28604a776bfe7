"""Fails in its second scenario; see ``test_launch.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parallel.program import Scenarios

scenario = Scenarios()


@scenario
def first() -> None:
    """Nothing happens."""


@scenario
def second() -> None:
    """This does not go well."""
    raise ArithmeticError("something in the second scenario")


if __name__ == "__main__":
    scenario.run(Path(sys.argv[1]), 0)
