"""Time limits, which end what hangs, on machines of any speed; and which tests run one after another in one process."""

from __future__ import annotations

import pytest

PATIENCE = 8
"""Limits in the tests are for two idle cores; this many times as long may a test really take, where cores are busy."""

OF_JOBS = ("ranks", "job", "graphs")
"""Fixtures that start a job for each of their parameters, which all tests of a file share."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stretch the limits of all tests; let those that share a job run together, or else those of a file."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None:
            item.add_marker(pytest.mark.timeout(PATIENCE * marker.args[0]), append=False)
        callspec = getattr(item, "callspec", None)
        jobs = [] if callspec is None else [str(callspec.params[name]) for name in OF_JOBS if name in callspec.params]
        item.add_marker(pytest.mark.xdist_group(" ".join([str(item.path), *jobs])))
