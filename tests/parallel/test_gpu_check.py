"""The GPU check, where there is no GPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.parallel.torch_job")

from tests.parallel import gpu_check, gpu_program  # noqa: E402
from tests.parallel.gpu_findings import Finding, Findings, read, table  # noqa: E402
from tests.parallel.gpu_habits import HABITS  # noqa: E402
from tests.parallel.launch import start  # noqa: E402

CHECK_ON_CPU = ["--device", "cpu", "--algorithms", "average"]


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_gpu_check(launcher: str) -> None:
    """Where there is no GPU, the check compares the CPU with itself."""
    command = ["-m", "tests.parallel.gpu_program", *CHECK_ON_CPU, "AGN"]
    output = start(launcher, 2, command, 150, "torch" if launcher == "mpirun" else None)
    rows = dict(re.findall(r"^(.+): (\S+), allowed \S+$", output, re.MULTILINE))
    paths = [", ".join(filter(None, (name, way))) for name in ("average", "AGN") for way in gpu_program.WAYS]
    assert list(rows)[: len(paths)] == paths
    assert all(float(rows[name]) == 0 for name in rows if name != "asynchronous, conservation")
    assert float(rows["asynchronous, conservation"]) < 1e-5
    habits = [name for name in HABITS if any(row.startswith(name) for row in rows)]
    needed = {"fully sharded": launcher == "torchrun"}
    assert habits == [name for name in HABITS if needed.get(name, True)]


@pytest.mark.thorough
def test_an_elastic_job_of_the_gpu_check() -> None:
    output = start("python", 1, ["-m", "tests.parallel.gpu_elastic", "--device", "cpu"], 240)
    assert output.splitlines() == [
        "DiLoCo, overlap: 0, allowed 1e-03",
        "elastic, int8: 0, allowed 5e-02",
        "averaging, sharded: 0, allowed 1e-03",
    ]


def test_gpu_check_fails_where_a_path_differs() -> None:
    program = "import sys; from tests.parallel import gpu_program as check; check.LOSSY = -1; check.HABITS.clear(); "
    program += "check.WAYS = {'': {}, 'int8': check.WAYS['int8']}; sys.exit(check.main())"
    with pytest.raises(AssertionError, match=r"Exit 1: (?s:.*)failed: average, int8"):
        start("python", 1, ["-c", program, *CHECK_ON_CPU], 120, "torch")


def test_gpu_check_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(AssertionError, match=r"Exit 2: (?s:.*)error: torch sees no GPU here"):
        start("python", 1, ["-m", "tests.parallel.gpu_program"], 120, "torch")


@pytest.mark.parametrize(
    ("nccl", "gpus", "over_horovod"), [(False, 1, [2]), (True, 1, [1]), (True, 2, [2]), (True, None, [2])]
)
def test_ranks_over_horovod(
    nccl: bool, gpus: int | None, over_horovod: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses ranks that share a GPU."""
    monkeypatch.setattr(gpu_check, "_succeeds", lambda program: nccl)
    jobs = gpu_check.jobs_of(["torch", "horovod", "mpi"], [1, 2], gpus)
    assert jobs == [("torch", 1), ("torch", 2), *(("horovod", ranks) for ranks in over_horovod), ("mpi", 2)]
    alone = gpu_check.jobs_of(["horovod"], [1, 2], gpus)
    assert alone == [("horovod", ranks) for ranks in sorted({1, *over_horovod})]


def test_findings_are_kept_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings(tmp_path / "found", shown=True)
    rows = [
        Finding("results", "averaging", 1e-7, "", 1e-5),
        Finding("results", "AGN", float("nan"), "", 1e-5),
        Finding("wires", "int8, encode", 0.25, "ms", note="1 byte an element"),
        Finding("wires", "compiled", None, note="no compiler"),
        Finding("measurements that failed", "overlap", None, allowed=0, note="RuntimeError()"),
    ]
    for row in rows:
        findings.add(row)
    assert str(read(tmp_path / "found")) == str(rows)  # NaN differs from itself.
    assert findings.failures == ["AGN: nan, allowed 1e-05", "overlap: not measured, allowed 0e+00 (RuntimeError())"]
    assert capsys.readouterr().out.splitlines()[2] == "int8, encode: 0.25 ms (1 byte an element)"
    assert table("torch, 1 rank", rows).splitlines() == [
        *("torch, 1 rank", "=============", "", "results: 1 of 2 passed; largest value 1.0e-07"),
        *("  AGN: nan, allowed 1e-05  FAILED", "", "wires", "  int8, encode: 0.25 ms (1 byte an element)"),
        *(
            "  compiled: not measured (no compiler)",
            "",
            "measurements that failed: 0 of 1 passed; largest value 0.0e+00",
        ),
        "  overlap: not measured, allowed 0e+00 (RuntimeError())  FAILED",
    ]


LAUNCHER = """
import json, sys, time
ranks, found = sys.argv[1], sys.argv[-1]
row = {"section": "results", "name": f"on {ranks}", "value": 0.0, "unit": "", "allowed": 0, "note": ""}
open(found, "a").write(json.dumps(row) + chr(10))
time.sleep(600 if ranks == "1" else 0)
"""


def test_a_job_that_hangs_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.LAUNCHERS, "torch", [sys.executable, "-c", LAUNCHER])
    run, limits = gpu_check.run, list[float]()

    def run_however_slowly(backend: str, ranks: int, passed: list[str], folder: Path, seconds: float) -> Any:
        limits.append(seconds)
        return run(backend, ranks, passed, folder, seconds if ranks == 1 else 60.0)

    monkeypatch.setattr(gpu_check, "run", run_however_slowly)
    monkeypatch.setattr(gpu_check, "SECONDS", 8.0)
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "--device", "cpu", "--comm", "torch", "--output", str(tmp_path / "made")]
    )
    assert gpu_check.main() == 1
    assert 5.0 < limits[0] <= 6.0
    assert limits[1] <= 2.0
    jobs = json.loads((tmp_path / "made" / "gpu_check.json").read_text())["jobs"]
    assert [(job["ranks"], job["exit"]) for job in jobs] == [(1, "killed after 6 s"), (2, 0)]
    assert [job["findings"][0]["name"] for job in jobs] == ["on 1", "on 2"]
    assert "failed: torch, ranks: 1, exit: killed after 6 s" in capsys.readouterr().out


def test_one_rank_is_tried_once_and_two_over_everything_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "backends", lambda: list(gpu_check.LAUNCHERS))
    jobs: list[tuple[str, int]] = []
    monkeypatch.setattr(
        gpu_check, "run", lambda backend, ranks, *_: jobs.append((backend, ranks)) or {"exit": 0, "backend": backend}
    )
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--output", str(tmp_path)])
    assert gpu_check.main() == 0
    assert jobs == [("torch", 1), ("torch", 2), ("horovod", 2), ("mpi", 2), ("elastic", 3)]
