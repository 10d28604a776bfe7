"""A test that every job of a run skips, as none has its scenario, is an error, and not silence."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.parallel.program import ELSEWHERE


class EveryScenario:
    """Looks, after the tests of a file, for those that were skipped in all of its jobs.

    Tests of which the run leaves out cases, such as thorough ones, may be skipped in all others.
    """

    def __init__(self) -> None:
        self._skipped: dict[str, list[bool]] = {}
        self._left_out: set[str] = set()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note which tests do not run with all of their parameters."""
        self._left_out |= {function_of(item.nodeid) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note whether a case was skipped because other jobs have its scenario."""
        if report.when == "call" or report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._skipped.setdefault(function_of(report.nodeid), []).append(ELSEWHERE in reason)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Fail after the last test of a file if all cases of a test were skipped because other jobs have it."""
        last = nextitem is None or nextitem.path != item.path
        if not last or any("::" in argument for argument in item.config.args):
            return
        here = (each.nodeid for each in item.session.items if each.path == item.path)
        cases = Counter(map(function_of, here))
        silent = [
            name
            for name, count in cases.items()
            if name not in self._left_out and self._skipped.get(name) == [True] * count
        ]
        assert not silent, f"No job has the scenarios of {', '.join(silent)}"


def function_of(nodeid: str) -> str:
    """Return the name of a test without its parameters.

    Example:
        >>> function_of("tests/test_it.py::test_it[mpirun 2-window]")
        'tests/test_it.py::test_it'
    """
    return nodeid.partition("[")[0]
