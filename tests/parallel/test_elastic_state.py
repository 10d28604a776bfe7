"""Elastic Horovod: what is left of a job after ranks were killed or have joined, against the equations."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import KERAS, SCENARIOS, STEPS, Scenario, check_further, expected, policies_of
from tests.parallel.launch import ROOT, run_elastic
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.timeout(180)

HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1")
"""Names of this machine: Horovod gives up a host of which a rank was lost."""

IN_EVERY_RUN = ("the root, in a collective", "shares are dismissed", "a host joins a host of two")

OF_KERAS_IN_EVERY_RUN = ("the root, before a collective",)


@pytest.mark.parametrize("name", [name if name in IN_EVERY_RUN else thorough(name) for name in SCENARIOS])
def test_training_goes_on(name: str, tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    check(name, SCENARIOS[name], "torch", tmp_path)


@pytest.mark.parametrize("name", [name if name in OF_KERAS_IN_EVERY_RUN else thorough(name) for name in KERAS])
def test_training_goes_on_in_keras(name: str, tmp_path: Path) -> None:
    pytest.importorskip("horovod.tensorflow")
    check(name, KERAS[name], "tensorflow", tmp_path)


PROGRAMS = {"torch": "elastic_state_program", "tensorflow": "elastic_keras_program"}


def check(name: str, scenario: Scenario, framework: str, tmp_path: Path) -> None:
    """Run a scenario, and compare with the equations."""
    waits = [event for event in scenario.events if event.what == "wait"]
    hosts = HOSTS[: scenario.ranks // scenario.slots]
    lines = ["#!/bin/sh", *(f"echo {host}:{scenario.slots}" for host in hosts)]
    for event in scenario.events:
        if event.what == "dismiss":
            kept = len(lines) - event.number
            lines[kept:] = [f"if ! [ -e {tmp_path / event.name} ]; then {line}; fi" for line in lines[kept:]]
    for host, event in zip(HOSTS[len(hosts) :], waits, strict=False):
        lines.append(f"if [ -e {tmp_path / event.name} ]; then echo {host}:1; fi")
    command = ["-m", f"tests.parallel.{PROGRAMS[framework]}", name, str(tmp_path)]
    script, most = _discovery(tmp_path, lines), max(2, *(ranks for ranks, _ in scenario.begun))
    code, output = run_elastic(scenario.ranks, script, command, 120, framework, most=most, joins=bool(waits))
    assert code == 0, output
    stretches = _stretches(tmp_path / "begun")
    assert [(len(processes), step) for step, processes in stretches] == list(scenario.begun), output
    levels = {"inner": scenario.inner, "slots": scenario.slots if scenario.grouped else None}
    center, workers = expected(scenario.algorithm, stretches, gives_velocity=bool(scenario.loop), **levels)
    assert len(workers) == scenario.begun[-1][0]
    for rank, (process, worker) in enumerate(workers.items()):
        end = json.loads((tmp_path / f"end.{rank}.json").read_text())
        assert (end["pid"], end["steps"], end["batch"]) == (process, STEPS, STEPS)
        assert end.get("epoch", 1) == 1
        assert end["note"] == len(workers), "what reset callbacks do stays, and reaches those that join"
        np.testing.assert_allclose(end["center"], center, rtol=0, atol=1e-12)
        np.testing.assert_allclose(end["x"], worker.x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(end.get("mean", worker.mean), worker.mean, rtol=0, atol=1e-12)
        check_further(end, scenario.algorithm, stretches, rank)
        assert framework != "torch" or end.keys() >= policies_of(scenario).keys()


@pytest.mark.thorough
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", ["torch_elastic", "keras_elastic"])
def test_a_script_that_users_have_loses_a_worker(name: str, changed: bool, tmp_path: Path) -> None:
    """As it is, and after the change that the page shows."""
    pytest.importorskip("horovod.torch" if name.startswith("torch") else "horovod.tensorflow")
    pytest.importorskip("sklearn")
    examples = ROOT / "examples" / "existing"
    script = Path(shutil.copy(examples / f"{name}.py", tmp_path))
    if changed:
        change = examples / f"{name}.diff"
        subprocess.run(
            ["git", "apply", str(change)], cwd=tmp_path, check=True, capture_output=True, timeout=60 * PATIENCE
        )
        assert len(re.findall(r"^\+[^+]", change.read_text(), re.MULTILINE)) <= 5
    hosts = _discovery(tmp_path, ["#!/bin/sh", *(f"echo {host}:1" for host in HOSTS[:2])])
    command = ["-m", "tests.parallel.elastic_loss", str(tmp_path), "6", str(script)]
    code, output = run_elastic(2, hosts, command, 120, "torch" if name.startswith("torch") else "tensorflow")
    assert code == 0, output
    found = re.findall(r"Epoch (\d+): (\d) ranks, test accuracy ([\d.]+)", output)
    assert [ranks for _, ranks, _ in found] == sorted((ranks for _, ranks, _ in found), reverse=True), output
    assert {ranks for _, ranks, _ in found} == {"1", "2"}, output
    assert found[-1][0] == "9", output
    assert float(found[-1][2]) >= 0.95, output


def _discovery(folder: Path, lines: Sequence[str]) -> Path:
    """Return a script that tells Horovod of hosts."""
    script = folder / "hosts.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def _stretches(file: Path) -> list[tuple[int, list[int]]]:
    """Return the step at which each stretch of training began, and the processes in the order of their ranks."""
    lines, stretches = [json.loads(line) for line in file.read_text().splitlines()], []
    while lines:
        size = lines[0]["size"]
        stretch, lines = sorted(lines[:size], key=lambda line: line["rank"]), lines[size:]
        assert [line["rank"] for line in stretch] == list(range(size))
        assert len({line["step"] for line in stretch}) == 1
        stretches.append((stretch[0]["step"], [line["pid"] for line in stretch]))
    return stretches
