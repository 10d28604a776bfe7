"""Every example of an epoch counts exactly once in an elastic job in which a worker is killed and another joins."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE
from tests.parallel.beside import MADE_BY, trainers  # noqa: F401
from tests.parallel.launch import ROOT, environment, python
from tests.parallel.tiers import thorough

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)

SECONDS = 60
"""Within which the job ends."""

EXAMPLES, EPOCHS, WORKERS = 49, 4, 3

STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"

LOADERS = ["torch.utils.data.DataLoader:0", f"{STATEFUL}:2", thorough(f"{STATEFUL}:0")]
"""Classes of loaders, and the processes in which they load."""


def start(words: Sequence[str], output: Any, **settings: str) -> subprocess.Popen[str]:
    """Start a process."""
    return subprocess.Popen(
        words,
        env=environment() | settings,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output == subprocess.PIPE else subprocess.STDOUT,
        text=True,
    )


def where_torchdata_is(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return an environment in which torchdata is found."""
    packages = Path(request.getfixturevalue("trainers"))
    if not (packages / "torchdata").exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"torchdata is missing there: {MADE_BY}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))}


@pytest.fixture(scope="module", params=LOADERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job; return what the workers have written."""
    found = tmp_path_factory.mktemp("sampler")
    beside = where_torchdata_is(request) if request.param.startswith("torchdata") else {}
    words = [*python("torch alone"), "-m", "tests.parallel.sampler_program", request.param, str(found)]
    server = start([sys.executable, "-m", "hvd_periodic", "rendezvous", "--port", "0"], subprocess.PIPE)
    processes: list[subprocess.Popen[str]] = []
    assert server.stdout is not None
    try:
        rendezvous = "127.0.0.1:" + server.stdout.readline().strip().rpartition(":")[2]
        deadline = time.monotonic() + PATIENCE * SECONDS
        while time.monotonic() < deadline:
            wanted = WORKERS + (found / "another").exists()
            while len(processes) < wanted:
                with (found / f"output.{len(processes)}").open("w") as output:
                    process = start(
                        [*words, str(len(processes))],
                        output,
                        HVD_PERIODIC_RENDEZVOUS=rendezvous,
                        HVD_PERIODIC_LOST_SECONDS="600",
                        HVD_PERIODIC_JOIN_SECONDS=f"{SECONDS * PATIENCE}",
                        **beside,
                    )
                processes.append(process)
            if all(process.poll() is not None for process in processes):
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
        outputs = "\n".join(file.read_text() for file in sorted(found.glob("output.*")))
        assert len(codes) == WORKERS + 1, outputs
        assert codes.count(-9) == 1, outputs
        if codes.count(0) < WORKERS:  # A worker that got no time for long was given up, and came again too late.
            assert "is over: for another job" in outputs, outputs
    finally:
        for process in [server, *processes]:
            process.kill()
            process.wait()
        server.stdout.close()
    return found


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def counts(folder: Path, line: dict[str, Any]) -> bool:
    """Return whether a local step is before those from which later rounds went on."""
    later = [begun["step"] for begun in read(folder, "begun") if begun["round"] > line["round"]]
    return bool(line["step"] < min(later, default=math.inf))


def test_every_example_counts_exactly_once(folder: Path) -> None:
    kept = Counter(
        (line["epoch"], example)
        for line in read(folder, "seen")
        if counts(folder, line)
        for example in line["examples"]
    )
    assert kept == Counter((epoch, example) for epoch in range(EPOCHS) for example in range(EXAMPLES))


def test_what_the_killed_worker_had_exchanged_is_kept_and_the_rest_is_repeated(folder: Path) -> None:
    victim, seen = int((folder / "victim").read_text()), read(folder, "seen")
    of_victim = [line for line in seen if line["pid"] == victim]
    last = of_victim[-1]
    assert not counts(folder, last)
    repeated = {(last["epoch"], example) for example in last["examples"]}
    assert any(counts(folder, line) for line in of_victim)
    again = {(line["epoch"], example) for line in seen if line["pid"] != victim for example in line["examples"]}
    assert repeated <= again
    assert len({line["pid"] for line in seen}) == WORKERS + 1, "Another has joined"
