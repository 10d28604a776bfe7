"""Time limits, which end tests that hang, on machines of any speed, also busy ones; and the tests of the core."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.every_scenario import EveryScenario
from tests.parallel.program import THOROUGH

PATIENCE = 8
"""Limits in the tests are for two idle cores; this many times as long may a test really take, where cores are busy."""

TESTS = Path(__file__).parent

CORE = frozenset(
    TESTS / f"{name}.py"
    for name in (
        *(f"conformance/test_{name}" for name in ("algorithms", "messages", "placements", "schedules")),
        *(f"unit/test_{name}" for name in ("arguments", "checkpoint_files", "clock", "compression", "consistency")),
        *(
            f"unit/test_{name}"
            for name in ("deferred", "dylu", "failures", "fragments", "island", "layout", "limits", "mirrors")
        ),
        *(f"unit/test_{name}" for name in ("adoption", "complex", "norm_bounds", "participation", "presence")),
        *(
            f"unit/test_{name}"
            for name in (
                "asynchronous_bounds",
                "delayed",
                "packed",
                "presence_life",
                "quorum",
                "quorum_elastic_messages",
                "quorum_options",
                "rows",
                "sockets",
            )
        ),
        *(f"unit/test_{name}" for name in ("optimizer_state", "oracle", "outer_algorithms", "overlap", "schedules")),
        *(f"unit/test_{name}" for name in ("semantics", "startup", "state", "subset", "threads", "together")),
        *(f"unit/test_{name}" for name in ("elastic_rows", "grace", "values", "waiting", "weights_by_work", "wires")),
    )
)
"""Files whose tests need numpy alone, and have threads as ranks: ``-m core``."""

FRAMEWORKS = frozenset({"torch", "tensorflow", "keras"})

collect_ignore = ["pages"]
"""What the blocks of pages talk about starts Horovod when it is imported."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share the tests of the core between two processes, if pytest-xdist is installed and no option says otherwise."""
    option = config.option
    alone = option.usepdb or option.collectonly or option.capture == "no" or hasattr(config, "workerinput")
    if takes_the_core(config) and not alone and getattr(option, "numprocesses", 0) is None and option.dist == "no":
        option.numprocesses, option.dist = 2, "loadfile"


def takes_the_core(config: pytest.Config) -> bool:
    """Return whether this run has the tests of the core and no others: ``-m core``, and no path."""
    return config.option.markexpr == "core" and config.args_source is config.ArgsSource.TESTPATHS


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples, and run fewer cases of scenarios, where tests are not thorough.

    With ``-m core``, import no other files, so no framework.
    """
    config.pluginmanager.register(Everywhere())
    config.pluginmanager.register(EveryScenario())
    settings.register_profile("thorough", max_examples=150)
    settings.register_profile("every run", max_examples=30)
    every_run = config.option.markexpr in ("core", "not thorough")
    settings.load_profile("every run" if every_run else "thorough")
    os.environ[THOROUGH] = str(int(not every_run))
    if takes_the_core(config):
        config.args = sorted(map(str, CORE))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stretch the limits of all tests, and mark those of the core."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is not None:
            item.add_marker(pytest.mark.timeout(PATIENCE * marker.args[0]), append=False)
        core = item.path in CORE and isinstance(item, pytest.Function)
        if core and item.get_closest_marker("thorough") is None:
            item.add_marker("core")
            item.fixturenames.insert(0, "without_frameworks")


def pytest_collection_finish() -> None:
    """Keep the modules that tests have imported, over a million objects, out of all garbage collections.

    Programs hide packages from themselves. One that does so where a test imports it would have all tests of these
    packages skipped, as if they were not installed.
    """
    hidden = [name for name in ("horovod", *FRAMEWORKS) if sys.modules.get(name, name) is None]
    assert not hidden, f"The import of a test has hidden modules from all others: {hidden}"
    gc.collect()
    gc.freeze()


class Everywhere:
    """Fixtures of all tests, also of the examples in docstrings, which are not in this folder."""

    @pytest.fixture(autouse=True)
    def horovod_is_not_left_initialized(self) -> Iterator[None]:
        """Fail if a test initializes Horovod in this process, where later tests train alone; real ranks have it."""
        yield
        modules = (sys.modules.get(f"horovod.{name}") for name in ("torch", "tensorflow"))
        assert not any(module.is_initialized() for module in modules if module is not None)

    @pytest.fixture(autouse=True)
    def transports_are_not_left_open(self) -> Iterator[None]:
        """Fail if a thread that serves a center, connections or an island outlives its test: it slows later ones."""
        yield
        for thread in threading.enumerate():
            if thread.name in ("hvd_periodic service", "hvd_periodic connections", "hvd_periodic.island"):
                thread.join(PATIENCE)
                assert not thread.is_alive(), f"{thread.name} still runs"


@pytest.fixture
def without_frameworks() -> Iterator[None]:
    """Fail if a test of the core imports a framework."""
    before = FRAMEWORKS & sys.modules.keys()
    yield
    assert FRAMEWORKS & sys.modules.keys() == before, "a test of the core (tests/conftest.py) imports a framework"
