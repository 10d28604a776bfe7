"""The numpy core on real ranks of mpi4py."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hvd_periodic import read_run_log
from tests import oracle
from tests.conftest import PATIENCE
from tests.parallel.launch import environment, run_scenarios
from tests.parallel.tiers import thorough

pytest.importorskip("mpi4py")

pytestmark = pytest.mark.timeout(90)

OVER_EACH = ["mpirun, Horovod", "mpirun, torch.distributed", "mpirun, MPI"]
"""Launchers of jobs over each library; TensorFlow has them in jobs of their own."""


@pytest.mark.parametrize("n", [1, thorough(2), 3])
def test_agreement_with_the_oracle(n: int, tmp_path: Path) -> None:
    framework = "torch alone" if find_spec("torch") is not None else None
    ranks = run_scenarios("mpirun", n, "mpi_program", tmp_path, 60, framework=framework)
    momentum = oracle.MOMENTUM
    for name, (replicas, center) in {
        "easgd": oracle.easgd(n, oracle.periodic(2), lambda _: 0.25, momentum),
        "average": oracle.averaging(n, oracle.periodic(2), momentum),
        "agn": oracle.agn(n, oracle.periodic(4), "sum", momentum),
    }.items():
        for rank, report in enumerate(ranks):
            x, c = report[name]
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12)
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12)
            assert c == ranks[0][name][1], "to the bit"


@pytest.mark.parametrize("transport", ["service", thorough("window")])
def test_asynchronous_exchange_beside_horovod(transport: str, tmp_path: Path) -> None:
    """No process is inside of MPI when the first to leave Horovod ends it: the job's exit code tells.

    Exchanges conserve the sum of the replicas and the center, which gradients move by 8 steps of 1 and 8 of 3.
    """
    pytest.importorskip("horovod.torch")
    ranks = run_scenarios("mpirun", 2, "mpi_program", tmp_path, 60, transport, framework="torch")
    (one, center), (other, same) = ranks
    assert center == same
    assert [sum(found) for found in zip(one, other, center, strict=True)] == pytest.approx([32.0] * 3)


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_two_trainings_of_one_job(front_end: str, two_trainings: tuple[Path, list[Any]]) -> None:
    """The same as of each alone: what averages is at start + 4 (mean of slopes) 2; asynchronous exchange keeps sums."""
    _, ranks = two_trainings
    start = 2.0 if front_end == "numpy" else 0.0  # Over MPI, the job counts its ranks; Horovod counts its own.
    for number in (0, 2):
        replica, center = ranks[number][front_end]
        assert replica == center == [start + 8 * (1 + 5) / 2] * 3
    (one, center), (other, same) = (ranks[number][front_end] for number in (1, 3))
    assert center == same
    total = 3 * (start + 1) + 8 * (3 + 7)  # of both replicas and the center
    assert [sum(found) for found in zip(one, other, center, strict=True)] == pytest.approx([total] * 3)


def test_trainings_of_one_job_are_told_apart(two_trainings: tuple[Path, list[Any]]) -> None:
    """By their errors, the files of their ranks, and the marks that they leave for the ranks that miss them."""
    log, ranks = two_trainings
    assert [report["rank"] for report in ranks] == [0, 0, 1, 1]
    errors = [report["wrong on one rank"] for report in ranks]
    assert errors[0].startswith("ValueError: `interval_steps`")
    assert errors[2].startswith("RuntimeError: Rank 0 failed (1 of 2 ranks did): ValueError: `interval_steps`")
    assert errors[1] == errors[3]
    assert errors[1].endswith("Every(period=1) on rank 1; Every(period=3) on rank 3")
    for report in ranks:
        names, numbers = zip(*(mark.rsplit(".", 1) for mark in report["marks"]), strict=True)
        assert sorted(numbers) == ["0", "1", "2", "3"]
        assert len(set(names)) == 2
    for number, lines in read_run_log(log).items():
        assert [line["ranks"] for line in lines if line["event"] == "began"] == [[number % 2, number % 2 + 2]]
    for first, asynchronous in ((0, False), (1, True)):
        of_horovod = read_run_log(log / f"training-of-rank-{first}")
        assert list(of_horovod) == [0, 1]
        for lines in of_horovod.values():
            began = [(line["ranks"], line["asynchronous"]) for line in lines if line["event"] == "began"]
            assert began == [([0, 1], asynchronous)]


@pytest.fixture(scope="module")
def two_trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The run log and the reports of a job whose even and odd ranks train at once."""
    pytest.importorskip("horovod.torch")
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_PERIODIC_RUN_LOG", str(folder / "log"))
        return folder / "log", run_scenarios("mpirun", 4, "mpi_program", folder, 80, "two trainings", framework="torch")


def test_libraries_that_disagree_or_do_not_work(tmp_path: Path) -> None:
    """Each is an error on every rank, with what mends it."""
    pytest.importorskip("horovod.torch")
    ranks = run_scenarios("mpirun", 2, "mpi_program", tmp_path, 60, "errors", framework="torch")
    for rank, found in enumerate(ranks):
        assert found["MPI instead"] == ""
        for case in ("groups of a broken Horovod", "broken Horovod"):
            assert found[case].startswith(
                "RuntimeError: horovod.torch cannot be imported (import of horovod.torch halted"
            )
            assert "bash run_scripts/setup.sh --use-current-env" in found[case]
        assert "exchanges over MPI, whose ranks cannot change" in found["elastic"]
        assert found["function"].startswith("ValueError: A function as `process_set` is for Horovod")
        assert found["node_ranks"].startswith("RuntimeError: node_ranks() needs Horovod")
        assert "MPICommunicator carries no tensors of a cuda device" in found["on a GPU"]
        numbers = f"this is rank {1 - rank} of 2 of torch.distributed, and rank {rank} of 2 of MPI"
        for case in ("numbers of PyTorch", "numbers of MPI", "numbers, for arrays"):
            assert found[case].startswith("ValueError: torch.distributed and MPI are both initialized")
            assert numbers in found[case]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HVD_PERIODIC_COMM": "mpi"}, "no launcher of MPI has started this process"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpi4py, built for another MPI, sees one: build it for the MPI of the"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI4PY_MPIABI": "of nobody"}, "mpi4py cannot be imported ("),
    ],
)
def test_mpi_without_its_launcher(variables: dict[str, str], text: str) -> None:
    """The launcher of an MPICH sets these variables; nobody waits for the other rank."""
    program = (
        "import numpy as np, hvd_periodic.numpy as hvdp\n"
        "hvdp.ModelAverageOptimizer(hvdp.SGD(1.0), {'x': np.zeros(1)}, 2)"
    )
    words = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(words, env=environment() | variables, capture_output=True, text=True, timeout=60 * PATIENCE)
    assert done.returncode == 1
    assert "RuntimeError: " in done.stderr
    assert text in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("front_end", "launchers"),
    [
        ("numpy", ["mpirun"]),
        ("torch", ["mpirun"]),
        ("tensorflow", OVER_EACH),
        thorough("tensorflow.contrib_opt", OVER_EACH),
    ],
)
def test_each_library_leads_to_the_same_bits(front_end: str, launchers: list[str], tmp_path: Path) -> None:
    """On two ranks, whose sums have one order; in one job with all libraries, or one job with each."""
    framework = "tensorflow" if "tensorflow" in front_end else "torch"
    pytest.importorskip(f"horovod.{framework}")
    ranks: list[dict[str, Any]] = [{}, {}]
    for number, launcher in enumerate(launchers):
        folder = tmp_path / str(number)
        folder.mkdir()
        reports = run_scenarios(launcher, 2, "mpi_program", folder, 90, "same bits", front_end, framework=framework)
        for found, report in zip(ranks, reports, strict=True):
            found.update(report)
    for found in ranks:
        assert found["horovod"] == found["torch"] == found["mpi"]
    for way, (_, center) in ranks[0]["horovod"].items():
        assert ranks[1]["horovod"][way][1] == center, way
    centers = {way: center for way, (_, center) in ranks[0]["horovod"].items()}
    assert centers.pop("root") == centers["easgd"], "where the center lives changes nothing"
    assert len(set(centers.values())) == len(centers)
