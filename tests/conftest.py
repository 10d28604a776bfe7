"""Time limits: they end what hangs, on machines of any speed, also while those do something else."""

from __future__ import annotations

import pytest

PATIENCE = 8
"""Limits in the tests are for two idle cores; this many times as long may a test really take, where cores are busy."""


collect_ignore = ["pages"]
"""What the blocks of pages talk about starts Horovod when it is imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stretch the limits of all tests."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None:
            item.add_marker(pytest.mark.timeout(PATIENCE * marker.args[0]), append=False)
