"""Rounds in shared memory go on without a root that is stopped, wherever that happens; nothing of it is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, column, in_the_middle_of_a_push, stop_until
from tests.parallel.tiers import thorough

job = pytest.importorskip("tests.parallel.torch_job")
hvd = job.hvd

import torch  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.journal.files import read_run_log  # noqa: E402

scenario = Scenarios()

pytestmark = pytest.mark.timeout(180)

JOBS = [("mpirun", 3), thorough(("mpirun", 2)), thorough(("mpirun", 10)), thorough(("torchrun", 3))]

PERIOD, RATE, AHEAD = 2, 0.1, 4
"""Local steps of a period, their size, and the rounds of the others while the root is stopped."""

ALGORITHMS: dict[str, Callable[[], dict[str, Any]]] = {
    "elastic averaging": lambda: {"algorithm": hvdp.EASGD(0.05)},
    "int8": lambda: {"algorithm": hvdp.EASGD(0.05), "compression": hvdp.Compression.int8},
    "agn": lambda: {
        "algorithm": hvdp.AGN(),
        "outer_optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5),
    },
}

PLACES = ["between", "pushing", "waiting", "closing", "telling", "told"]
"""Between rounds; before its arrival counts; after that; with a center that it has computed, or that has moved, but
nobody is told; with a result that it has not taken."""

CASES = [*((place, "elastic averaging") for place in PLACES), ("closing", "agn"), ("told", "agn"), ("told", "int8")]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    return run_scenarios(launcher, size, "test_quorum_root", tmp_path_factory.mktemp("job"), 150, framework="torch")


def made(folder: Path | None, algorithm: str) -> tuple[torch.nn.Parameter, Any]:
    """Return a parameter, and its optimizer, in rounds of which the root may miss any but the first and the last."""
    x = torch.nn.Parameter(torch.linspace(-1, 1, 1000, dtype=torch.float64) + hvd.rank())
    options = {"algorithm": hvdp.EASGD(), "period": PERIOD, "quorum": hvd.size() - 1, "grace_seconds": 0.05}
    options |= ALGORITHMS[algorithm]() | {"run_log": folder}
    optimizer = hvdp.PeriodicOptimizer(torch.optim.SGD([x], lr=RATE), [("x", x)], **options)
    optimizer.synchronizer.begin()
    return x, optimizer


def train(x: torch.nn.Parameter, optimizer: Any, periods: int, slope: float) -> None:
    for _ in range(periods * PERIOD):
        x.grad = slope * x.detach() - 1.0 - hvd.rank()
        optimizer.step()


def stopped(place: str, transport: Any, stop: Callable[[], None]) -> Any:
    """Let the root stop once, there."""
    if place == "pushing":
        return in_the_middle_of_a_push(transport, stop)
    owner, name = {
        "waiting": (transport, "_close_what_is_due"),
        "closing": (transport._closing, "close"),
        "telling": (transport, "_tell"),
        "told": (transport, "_taken"),
    }[place]
    function, calls = getattr(owner, name), []

    def stop_inside(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if place in ("waiting", "told") and len(calls) == 1:
            stop()
        result = function(*arguments, **options)
        if place in ("closing", "telling") and len(calls) == 1:
            stop()
        return result

    return patch.object(owner, name, stop_inside)


def waiting_for(inside: Path, transport: Any) -> Any:
    """Let another rank leave the close of a round to the root until that is inside."""
    move = transport._move_and_tell

    def wait_and_move(agreed: Any) -> None:
        while not inside.exists():
            torch.zeros(1000).sum()
        move(agreed)

    return patch.object(transport, "_move_and_tell", wait_and_move)


def center_of(x: torch.nn.Parameter, optimizer: Any) -> list[float]:
    with optimizer.center():
        return x.tolist()


@scenario
def root_stopped() -> Any:
    """The root stops in its second round, or before, until the others have closed more; then all is replayed."""
    results = {}
    for place, algorithm in CASES:
        slope = 0.5 if algorithm == "agn" else 0.0  # What elastic averaging conserves is known of constant gradients.
        folder = Path(sys.argv[1]) / f"{place}, {algorithm}".replace(" ", "_")
        folder.mkdir(exist_ok=True)
        x, optimizer = made(folder / "log", algorithm)
        before, transport = x.tolist(), optimizer.synchronizer.exchanger.worker.transport
        start = center_of(x, optimizer)
        train(x, optimizer, 1, slope)
        inside, awake = folder / "inside", folder / "awake"
        ahead = [folder / f"ahead.{rank}" for rank in range(1, hvd.size())]

        def stop(inside: Path = inside, awake: Path = awake, ahead: list[Path] = ahead) -> None:
            inside.touch()
            stop_until(awake, *ahead)

        if hvd.rank() == 0:
            if place == "between":
                stop()
                train(x, optimizer, 1, slope)
            else:
                with stopped(place, transport, stop):
                    train(x, optimizer, 1, slope)
        else:
            if place in ("closing", "telling"):
                with waiting_for(inside, transport):
                    train(x, optimizer, 1, slope)
            train(x, optimizer, AHEAD, slope)
            ahead[hvd.rank() - 1].touch()
        train(x, optimizer, 1, slope)
        steps = optimizer.synchronizer.local_steps
        optimizer.finalize()
        hvd.allgather_object(None)
        logs = read_run_log(folder / "log").values()
        found = {line["number"]: line["members"] for log in logs for line in log if line["event"] == "exchanged"}
        sets = [found[number] for number in range(1, len(found) + 1)]
        timed = [x.tolist(), center_of(x, optimizer)]

        x, optimizer = made(None, algorithm)
        optimizer.synchronizer.exchanger.replay(sets)
        hvd.allgather_object(None)
        train(x, optimizer, steps // PERIOD, slope)
        optimizer.finalize()
        replayed = [x.tolist(), center_of(x, optimizer)]
        results[f"{place}, {algorithm}"] = {
            "sets": sets,
            "equal": timed == replayed,
            "steps": steps,
            "sums": [sum(each) for each in (before, start, *timed)],
        }
    return results


@pytest.mark.parametrize(("place", "algorithm"), CASES)
def test_rounds_go_on_without_a_stopped_root(ranks: list[dict[str, Any]], place: str, algorithm: str) -> None:
    """Sets decide the trajectory to the bit, so nothing is lost or counts twice; and elastic averaging conserves."""
    reports = column(ranks, "root_stopped", f"{place}, {algorithm}")
    sets = reports[0]["sets"]
    assert sets[0] == list(range(len(ranks)))
    assert sum(0 not in members for members in sets) >= AHEAD - 1, sets
    for report in reports:
        assert report["equal"]
        assert report["sets"] == sets
    if algorithm != "agn":
        moved = sum(1000 * RATE * (1 + rank) * report["steps"] for rank, report in enumerate(reports))
        begun = sum(report["sums"][0] for report in reports) + reports[0]["sums"][1]
        ended = sum(report["sums"][2] for report in reports) + reports[0]["sums"][3]
        assert ended == pytest.approx(begun + moved, rel=1e-9)


if __name__ == "__main__":
    job.run_all(scenario)
