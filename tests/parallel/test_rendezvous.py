"""Elastic jobs over torch.distributed: workers are killed, stopped and started; against the equations.

All jobs meet at one rendezvous, at the same time.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import PERIOD, SIZE, check_further, expected, policies_of
from tests.parallel.rendezvous_job import Job, numbered, rendezvous
from tests.parallel.rendezvous_scenarios import KERAS, KERAS_COMPILED, SCENARIOS, THOROUGH, own_after

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

SECONDS = 100
"""Within which all jobs end."""


class ScriptedJob(Job):
    """A job to which what its scenario says happens."""

    _followed = False

    def is_over(self) -> bool:
        """Return whether all have ended; once the others have gone on, start another, or wake the stopped one."""
        if not self._followed and (self.folder / "wait.0").exists():
            self._followed = True
            if self.scenario.what == "stop":
                os.kill(self.victim, signal.SIGCONT)
            elif self.scenario.what == "kill":
                self.start()
        return all(process.poll() is not None for process in self.processes)


def run(names: Iterable[str], folders: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run scenarios at once."""
    with rendezvous() as address:
        found = {name: ScriptedJob(name, folders.mktemp("job"), address) for name in names}
        try:
            for job in found.values():
                for _ in range(job.scenario.workers):
                    job.start()
            deadline = time.monotonic() + PATIENCE * SECONDS
            while sum(not job.is_over() for job in found.values()) and time.monotonic() < deadline:
                time.sleep(0.1)
            yield found
        finally:
            for job in found.values():
                job.stop()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run the scenarios of every run."""
    yield from run(SCENARIOS, tmp_path_factory)


@pytest.fixture(scope="module")
def of_thorough_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run the scenarios of thorough runs."""
    yield from run(THOROUGH, tmp_path_factory)


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run the scenarios of Keras."""
    pytest.importorskip("tensorflow")
    yield from run(KERAS, tmp_path_factory)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run the scenarios of Keras in compiled steps of a loop."""
    pytest.importorskip("tensorflow")
    yield from run(KERAS_COMPILED, tmp_path_factory)


ENDS = {"kill": [-9], "hang": [1], "raise": [0], "stop": [], "torchrun": [], "down": [-9]}
"""Exit codes of processes besides those that train to the end."""


def check(job: Job) -> list[list[int]]:
    """Compare what workers have with the equations; return the processes of each stretch of training."""
    scenario, stretches = job.scenario, job.stretches()
    codes = [process.poll() for process in job.processes]
    options: dict[str, Any] = {name: getattr(scenario, name) for name in ("overlap", "fragments", "int8")}
    of_keras = bool(scenario.loop)
    options |= {"inner": scenario.inner, "slots": None if scenario.inner else 1}
    center, workers = expected(scenario.algorithm, numbered(stretches), of_keras, steps=scenario.steps, **options)
    assert len(workers) == scenario.workers - (not scenario.again), job.output()
    assert sorted(codes, key=str) == sorted([0] * len(workers) + ENDS[scenario.what], key=str), job.output()
    tolerance = 1e-6 if scenario.int8 else 1e-12
    known = slice(SIZE // 2 if scenario.thaws else SIZE)  # The equations train all from the start.
    for rank, ((process, forgotten), worker) in enumerate(zip(stretches[-1][1], workers.values(), strict=True)):
        end = job.end(rank)
        assert (end["pid"], end["steps"], end["batch"]) == (process, scenario.steps, scenario.steps), job.output()
        np.testing.assert_allclose(end["center"][known], center[known], rtol=0, atol=tolerance)
        np.testing.assert_allclose(end["x"][known], worker.x[known], rtol=0, atol=tolerance)
        check_further(end, scenario.algorithm, numbered(stretches), rank, scenario.steps, of_keras)
        assert scenario.loop in ("fit", "compiled") or end.keys() >= policies_of(scenario).keys()
        assert end["center"] == job.end(0)["center"]
        assert all(end["center"])
        np.testing.assert_allclose(end.get("mean", worker.mean), worker.mean, rtol=0, atol=tolerance)
        assert end["own"] == pytest.approx(own_of((process, forgotten), job, end["number"]), rel=0, abs=1e-14)
    return [[process for process, _ in workers] for _, workers in stretches]


def own_of(worker: tuple[int, int], job: Job, number: int) -> float:
    """Return the ``"local"`` parameter of a worker at the end, which begins with the number of its process.

    A worker that is left keeps its own, of all the steps that count, and one that joins has that of its model: one that
    was excluded, with the steps until it noticed; in Keras, also with the momentum of these.
    """
    begun = {each: step for step, workers in reversed(job.stretches()) for each in workers}
    start, steps, (process, forgotten) = float(number), job.scenario.steps - begun[worker], worker
    if forgotten:
        before = math.ceil(job.scenario.step / PERIOD) * PERIOD - begun[process, forgotten - 1]
        if job.scenario.loop:
            return own_after(before + steps, start)
        start = own_after(before, start)
    return own_after(steps, start)


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.what == "kill"])
def test_a_killed_worker_is_replaced(jobs: dict[str, ScriptedJob], name: str) -> None:
    """The others go on in the same processes, and a process that starts later takes the center."""
    is_replaced(jobs[name])


@pytest.mark.parametrize("name", KERAS)
def test_a_killed_worker_is_replaced_in_keras(of_keras: dict[str, ScriptedJob], name: str) -> None:
    """Likewise; in compiled and eager steps, with the local optimizer of another worker."""
    is_replaced(of_keras[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERAS_COMPILED)
def test_compiled_steps_stay_valid(compiled: dict[str, ScriptedJob], name: str) -> None:
    """With the center in shards, which get other variables; and in a worker that was excluded and joins again."""
    (joins_again if compiled[name].scenario.what == "stop" else is_replaced)(compiled[name])


def is_replaced(job: ScriptedJob) -> None:
    """Check that a worker was killed, the others have gone on, and another has joined them."""
    stretches, victim = check(job), job.victim
    at = max(number for number, processes in enumerate(stretches) if victim in processes)
    others = set(stretches[at]) - {victim}
    assert set(stretches[at + 1]) == others
    assert others < set(stretches[-1])
    assert len(set(stretches[-1]) - set().union(*stretches[: at + 2])) == 1


def joins_again(job: ScriptedJob) -> None:
    """Check that a worker was excluded, and that nothing of what it had counts when it has joined again."""
    stretches, victim = check(job), job.victim
    assert victim in stretches[-1]
    without = [processes for processes in stretches if victim not in processes]
    assert set(stretches[-1]) - {victim} in [set(processes) for processes in without]
    assert "The other ranks have gone on without this process, which joins as a new one" in job.output()


def go_on_without(job: Job) -> None:
    """Check that the others have gone on without a worker."""
    stretches, victim = check(job), job.victim
    assert victim not in stretches[-1]
    assert set(stretches[-1]) == set(stretches[-2]) - {victim}


def test_a_stopped_worker_is_excluded(jobs: dict[str, ScriptedJob]) -> None:
    """When it wakes up, it joins as a new one."""
    joins_again(jobs["stopped, and joins again"])


def test_a_worker_leaves_with_an_error(jobs: dict[str, ScriptedJob]) -> None:
    """Its process lives on; the others wait for no signs of life from it."""
    go_on_without(jobs["raises an error, and lives on"])


@pytest.mark.thorough
def test_a_worker_that_hangs_is_ended(of_thorough_runs: dict[str, ScriptedJob]) -> None:
    """After ``timeout_seconds``, although it gives signs of life."""
    go_on_without(of_thorough_runs["hangs, and is ended"])


@pytest.mark.thorough
def test_torchrun_starts_a_worker_again(of_thorough_runs: dict[str, ScriptedJob]) -> None:
    """With one torchrun per worker: the worker of the other one goes on in the same process."""
    job = of_thorough_runs["killed, and torchrun starts it again"]
    stretches, victim = check(job), job.victim
    [other] = set(stretches[0]) - {victim}
    assert other in stretches[-1]
    assert victim not in stretches[-1]
    assert len(stretches[-1]) == job.scenario.workers
