"""What the scenario programs share: a registry, and the report of a rank."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

from hvd_periodic.asynchronous.rounds_in_memory import RoundsInMemory

V = TypeVar("V")

CHOSEN = "chosen.txt"
"""File with the names of the scenarios that a job runs, if not all."""

NOT_RUN = "not run"
"""Key of a report: the scenarios that the job did not run, and why. Their tests are skipped."""

ELSEWHERE = "other jobs have it"
"""What the reason says for which the tests of a scenario are skipped in one job; see ``tests/every_scenario.py``."""

THOROUGH = "HVD_PERIODIC_TESTS_THOROUGH"
"""Variable that ``tests/conftest.py`` sets to 1 in runs with thorough tests; the ranks of jobs inherit it."""

ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)


class NotApplicableError(Exception):
    """Raised by a scenario on all ranks of a job that it does not apply to, with the reason."""


class Scenarios:
    """Functions that all ranks call in the same order; what each returns is reported under its name.

    Args:
        graphs_as_built: TensorFlow does not rewrite graphs (Grappler) before their first run, which takes up to half of
            the time of graphs that run a few times. Examples and users' scripts run with it.
    """

    def __init__(self, graphs_as_built: bool = True) -> None:
        self._graphs_as_built = graphs_as_built
        self._functions: dict[str, Callable[[], Any]] = {}
        self._without: dict[str, str] = {}

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register a function."""
        self._functions[function.__name__] = function
        return function

    def without(self, name: str, reason: str) -> None:
        """Let the tests of a scenario be skipped that this job does not have."""
        self._without[name] = reason

    def include(self, other: Scenarios) -> None:
        """Register what another file has registered."""
        self._functions |= other._functions
        self._without |= other._without

    def run(self, folder: Path, rank: int, **results: Any) -> None:
        """Run all, or those that the folder's file names; write what this rank saw."""
        if self._graphs_as_built:
            take_graphs_as_built()
        chosen = (folder / CHOSEN).read_text().split() if (folder / CHOSEN).exists() else list(self._functions)
        not_run = dict.fromkeys((name for name in self._functions if name not in chosen), "not chosen for this job")
        not_run |= self._without
        for name in chosen:
            (folder / f"{rank}.now").write_text(name)
            try:
                results[name] = self._functions[name]()
            except NotApplicableError as error:
                not_run[name] = str(error)
        results[NOT_RUN] = not_run
        (folder / f"{rank}.now").write_text("the end")
        (folder / f"{rank}.json").write_text(json.dumps(results))
        end_together()


def end_together() -> None:
    """Wait for all ranks: Horovod shuts down on all as soon as one ends, in whatever process set others still work."""
    for name in ("tests.parallel.torch_job", "tests.parallel.tensorflow_job"):
        job = getattr(sys.modules.get(name), "hvd", None)
        if job is not None and not isinstance(job, ModuleType) and job.is_initialized():
            job.barrier()
    torch, tensorflow = (sys.modules.get(f"horovod.{framework}") for framework in ("torch", "tensorflow"))
    if torch is not None and torch.is_initialized():
        torch.barrier()
    if tensorflow is not None and tensorflow.is_initialized():
        from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator

        TensorFlowCommunicator().allgather_object(None, "end")


def take_graphs_as_built() -> None:
    """Let TensorFlow, where it is imported, run graphs without rewriting them (Grappler) before their first run."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def rotated(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of values, one of each factor: as many as the longest factor has, the others in turn.

    For choices that do not depend on each other: every one is tested, in as few combinations as that takes.
    """
    return [tuple(each[i % len(each)] for each in factors) for i in range(max(map(len, factors)))]


def crossed(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of values in runs with thorough tests, otherwise those of ``rotated``."""
    return list(itertools.product(*factors)) if os.environ.get(THOROUGH) == "1" else rotated(*factors)


def repeated(*cases: V) -> tuple[V, ...]:
    """Return cases that repeat a kind with other numbers: all in runs with thorough tests, otherwise none."""
    return cases if os.environ.get(THOROUGH) == "1" else ()


def attempt(function: Callable[[], Any], *more: type[Exception]) -> str:
    """Return the error as text; empty if there was none."""
    try:
        function()
    except (*ERRORS, *more) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def column(ranks: list[dict[str, Any]], *keys: str) -> list[Any]:
    """Return what all ranks report under a path of keys; skip the test if the job did not run the scenario."""
    if isinstance(ranks[0], dict) and keys[0] in ranks[0].get(NOT_RUN, {}):
        skip(f"{keys[0]}: {ranks[0][NOT_RUN][keys[0]]}")
    values: list[Any] = list(ranks)
    for key in keys:
        values = [value[key] for value in values]
    return values


def skip(reason: str) -> NoReturn:
    """Skip a test about what other jobs have."""
    import pytest

    pytest.skip(f"{reason} ({ELSEWHERE})")


@contextmanager
def log() -> Iterator[list[str]]:
    """Collect the lines of the package's log inside a ``with`` block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvd_periodic")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextmanager
def in_the_middle_of_a_push(transport: Any, act: Callable[[], object], sends: int = 3) -> Iterator[None]:
    """Call a function inside the next push to a round: after so many messages, or in shared memory before all know.

    Of the messages, the first is a request, the second what the worker says, and the others are payloads.
    """
    if isinstance(transport, RoundsInMemory):
        note, noted = transport._note_arrival, []

        def before_it_counts(*arguments: Any) -> None:
            note(*arguments)
            noted.append(None)
            if len(noted) == 1:
                act()

        with patch.object(transport, "_note_arrival", before_it_counts):
            yield
        return
    send, sent = transport._requests.send, []

    def after_a_payload(*arguments: Any) -> Any:
        sent.append(send(*arguments))
        if len(sent) == sends:
            act()
        return sent[-1]

    with patch.object(transport._requests, "send", after_a_payload):
        yield


def stop_until(awake: Path, *files: Path) -> None:
    """Stop this process, as SIGSTOP does, until some files exist; ``awake`` is written then."""
    # A signal that comes before this process has stopped wakes nobody: until it is awake, more come.
    exist = " && ".join(f"[ -e {file} ]" for file in files)
    wake = f"until [ -e {awake} ]; do kill -CONT {os.getpid()} || exit; sleep 0.05; done"
    wake = f"until {exist}; do sleep 0.05; done; {wake}"
    with subprocess.Popen(["sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)
        awake.touch()
