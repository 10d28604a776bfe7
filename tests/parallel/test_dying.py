"""Asynchronous workers that are killed, under an MPI that lets the others go on, and under one that does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE
from tests.parallel.dying_program import KILLED_AT, MOMENTUM, OUTER_RATE
from tests.parallel.launch import MPIRUN, ROOT, environment, kill_session, python
from tests.parallel.tiers import thorough

pytest.importorskip("mpi4py")

pytestmark = pytest.mark.timeout(120)

SIZE = 3
RECOVERS = ["--enable-recovery"]
"""Of Open MPI 4.1 and 5."""
KILLED = 128 + 9
TRANSPORT = "HVD_PERIODIC_TRANSPORT"


def job(
    folder: Path, algorithm: str, victim: int, where: str, more: int, options: list[str], **variables: str
) -> tuple[int, str, dict[int, Any]]:
    """Return exit code, output, and what every rank has reported."""
    shared = python("torch" if algorithm == "torch" else None)
    words = [*MPIRUN, *options, "-np", str(SIZE), *shared, "-m", "tests.parallel.dying_program"]
    done = subprocess.run(
        [*words, str(folder), algorithm, str(victim), where, str(more)],
        env=environment() | variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    return done.returncode, done.stdout, reports


def check_compared(living: list[int], outputs: str) -> None:
    """The first of those who live names a frozen parameter that differs between them."""
    text = f"differs between ranks: rank {living[1]} from rank {living[0]}. "
    assert outputs.count("differs between ranks: ") == 1, outputs
    assert f"Weight 'frozen', which no exchange touches, {text}" in outputs, outputs


@pytest.mark.parametrize(
    ("algorithm", "victim", "where"),
    [
        ("easgd", 0, "inside"),
        thorough("easgd", 1, "between"),
        thorough("easgd", 2, "inside"),
        ("torch", 1, "inside"),
        thorough("torch", 0, "between"),
        ("agn", 2, "inside"),
    ],
)
def test_the_others_go_on(algorithm: str, victim: int, where: str, tmp_path: Path) -> None:
    """With a worker that dies between exchanges, or in the middle of a transaction; or the root.

    Elastic averaging: the center is what all have pushed, and nothing of what the dead one was about to push. AGN: so
    is the point where center and momentum would come to rest, c − λμ/(1−μ) v.
    """
    if algorithm == "torch":
        pytest.importorskip("horovod.torch")
    code, output, reports = job(tmp_path, algorithm, victim, where, 20, RECOVERS)
    assert code == 0, output
    living = [rank for rank in range(SIZE) if rank != victim]
    assert output.count(f"Rank {victim} died: the center keeps earlier pushes, and the other ranks continue") == 2
    centers = [reports[rank]["center"] for rank in living]
    assert centers[0] == centers[1]
    assert all(0 < end < 1e6 for end in centers[0])
    assert [reports[rank]["lost"] for rank in living] == [[victim]] * 2
    if algorithm == "torch":
        check_compared(living, output)
    if algorithm == "agn":
        steps = sum(reports[rank]["steps"] * (1 + rank) for rank in living) + (KILLED_AT - 1) * (1 + victim)
        for report in (reports[rank] for rank in living):
            for c, v in zip(report["center"], report["velocity"], strict=True):
                rest = c - OUTER_RATE * MOMENTUM / (1 - MOMENTUM) * v
                assert rest == pytest.approx(OUTER_RATE / (1 - MOMENTUM) * steps, rel=1e-9)
        return
    for end in range(2):
        pulled = sum(report["steps"] * (1 + rank) - report["x"][end] for rank, report in reports.items())
        assert centers[0][end] == pytest.approx(pulled, rel=1e-9)


def test_without_recovery_the_job_ends(tmp_path: Path) -> None:
    code, output, reports = job(tmp_path, "easgd", 1, "inside", 10**9, [])
    assert code == KILLED, output
    assert list(reports) == [1]
    assert "is at its end" not in output


def processes(folder: Path, victim: int, where: str, transport: str) -> tuple[list[int], list[str], dict[int, Any]]:
    """Run ranks of torch.distributed that no launcher ends; return their exit codes, outputs and reports."""
    pytest.importorskip("torch")
    words = [*python("torch"), "-m", "tests.parallel.dying_program", str(folder), "torch", str(victim), where, "20"]
    variables = environment() | {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", TRANSPORT: transport}
    started = [
        subprocess.Popen(
            words,
            env=variables | {"RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE * 60)[0] for process in started]
    finally:
        for process in started:
            kill_session(process.pid)
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [process.returncode for process in started], outputs, reports


@pytest.mark.parametrize(
    ("victim", "where", "transport"),
    [(0, "inside", "window"), (2, "between", "service"), thorough(1, "between", "service")],
)
def test_the_others_go_on_without_mpi(victim: int, where: str, transport: str, tmp_path: Path) -> None:
    """Through memory as under MPI; over TCP if the dead one held nothing."""
    codes, outputs, reports = processes(tmp_path, victim, where, transport)
    living = [rank for rank in range(SIZE) if rank != victim]
    assert [codes[rank] for rank in living] == [0, 0], outputs
    for rank in living:
        assert f"Rank {victim} died: the center keeps earlier pushes, and the other ranks continue" in outputs[rank]
        assert reports[rank]["lost"] == [victim]
        assert reports[rank]["center"] == reports[living[0]]["center"]
    check_compared(living, "".join(outputs))
    for end in range(2):
        pulled = sum(report["steps"] * (1 + rank) - report["x"][end] for rank, report in reports.items())
        assert reports[living[0]]["center"][end] == pytest.approx(pulled, rel=1e-9)


def check_adopting(victim: int, reports: dict[int, Any]) -> None:
    living = [rank for rank in range(SIZE) if rank != victim]
    for rank in living:
        assert reports[rank]["told"].startswith("RuntimeError: adopt() is not available after ranks have died")
        assert reports[rank]["center"] == reports[living[0]]["center"], "the final center stays"
    for end in range(2):
        pulled = sum(report["steps"] * (1 + rank) - report["x"][end] for rank, report in reports.items())
        assert reports[living[0]]["center"][end] == pytest.approx(pulled, rel=1e-9)


@pytest.mark.parametrize(("algorithm", "victim"), [("easgd", 0), thorough("easgd", 2), thorough("torch", 1)])
def test_a_death_between_finalize_and_adopt_is_an_error_on_the_others(
    algorithm: str, victim: int, tmp_path: Path
) -> None:
    code, output, reports = job(tmp_path, algorithm, victim, "adopting", 0, RECOVERS)
    assert output.count("is at its end") == SIZE - 1, output
    assert code == 0, output
    check_adopting(victim, reports)


@pytest.mark.parametrize(
    ("victim", "transport"), [thorough(0, "window"), (2, "service"), thorough(1, "service"), thorough(0, "service")]
)
def test_a_death_between_finalize_and_adopt_is_an_error_on_the_others_without_mpi(
    victim: int, transport: str, tmp_path: Path
) -> None:
    codes, outputs, reports = processes(tmp_path, victim, "adopting", transport)
    assert [codes[rank] for rank in range(SIZE) if rank != victim] == [0, 0], outputs
    check_adopting(victim, reports)


def test_the_others_end_without_the_center(tmp_path: Path) -> None:
    """Its holder was killed: their next exchange names it."""
    codes, outputs, reports = processes(tmp_path, 0, "between", "service")
    assert list(reports) == [0]
    for rank in (1, 2):
        assert codes[rank] not in (0, None), outputs[rank]
        assert "PeerLostError: Rank 0 has ended, or its connection has: " in outputs[rank]


@pytest.mark.parametrize(
    ("algorithm", "victim", "transport"),
    [("torch", 0, "window"), thorough("easgd", 1, "window"), ("easgd", 0, "service"), thorough("torch", 2, "service")],
)
def test_what_all_have_pushed_is_in_the_file(algorithm: str, victim: int, transport: str, tmp_path: Path) -> None:
    """Also where the rank that held it is the one that was killed, and MPI ends all others."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    if algorithm == "torch":
        pytest.importorskip("horovod.torch")
    code, output, reports = job(tmp_path, algorithm, victim, "waited", 10**9, [], HVD_PERIODIC_TRANSPORT=transport)
    assert code == KILLED, output
    center = load_file(tmp_path / "center.safetensors")["x"]
    pulled = [sum(r["steps"] * (1 + rank) - r["x"][end] for rank, r in reports.items()) for end in range(2)]
    assert len(reports) == SIZE
    assert min(pulled) > 0
    assert [center[0], center[-1]] == pytest.approx(pulled, rel=1e-9)
    assert center.shape == (1000,)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * SIZE + [".safetensors"]
