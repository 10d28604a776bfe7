"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")


from tests.benchmarks import encoding, language, sockets
from tests.benchmarks.methods import COMPRESSED, EXCHANGES, METHODS
from tests.benchmarks.training import ALONE
from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, start
from tests.parallel.tiers import thorough


@pytest.mark.parametrize(("framework", "exchanges"), [("torch", 13), thorough("tensorflow", 5)])
def test_exchange(framework: str, exchanges: int, tmp_path: Path) -> None:
    pytest.importorskip(f"horovod.{framework}")
    options = ["--framework", framework, "--model", "tiny", "--repetitions", "2", "--json", str(tmp_path / "results")]
    options += ["--plot", str(tmp_path / "plot.png")] if framework == "torch" else []
    output = start("mpirun", 2, ["-m", "tests.benchmarks.exchange", *options], 90, framework)
    job = json.loads((tmp_path / "results").read_text())
    assert (job["ranks"], job["parameters"], job["framework"]) == (2, 6021, framework)
    results = job["results"]
    assert len(results) == exchanges
    for result in results:
        assert result["exchange"] in output
        assert 0 < result["lowest"] <= result["ratio"] <= result["highest"]
    assert results[0]["ratio"] == 1
    assert (tmp_path / "plot.png").exists() == (framework == "torch")
    files = [str(tmp_path / "results"), "--plot", str(tmp_path / "predictions.png")]
    output = start("python", 1, ["-m", "tests.benchmarks.predictions", *files, "--period", "4"], 60, framework)
    table = output[output.index("milliseconds per step") :]
    rows = [line.strip("│").split("│") for line in table.splitlines() if "Optimizer" in line]
    assert len(rows) >= 2 * 3
    for row in rows:
        assert all(float(milliseconds) >= 100 for milliseconds in row[1:]), "no faster than the local step"
    assert (tmp_path / "predictions.png").stat().st_size > 1000


def test_training(tmp_path: Path) -> None:
    """Ours and others, side by side; the network is that of this machine."""
    size = ["--megabytes", "0.01", "--milliseconds", "0.1", "--period", "2", "--periods", "1", "--repetitions", "2"]
    files = ["--json", str(tmp_path / "results"), "--plot", str(tmp_path / "plot.png")]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.training", *size, *files], 240, "torch")
    results = json.loads((tmp_path / "results").read_text())
    assert [result["method"] for result in results] == [ALONE, *METHODS, *sockets.METHODS]
    for result in results:
        assert result["method"] in output
        assert 0 < result["lowest"] <= result["ratio"] <= result["highest"]
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_worker_speeds(tmp_path: Path) -> None:
    """The task that no figure shows. How many steps a method without waiting takes depends on the machine."""
    size = ["--steps", "20", "--looks", "20", "--seeds", "1", "--milliseconds", "4", "--methods", "DyLU"]
    options = ["--task", "regularized", *size, "--json", str(tmp_path / "results")]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.worker_speeds", *options], 90, "torch")
    results = json.loads((tmp_path / "results").read_text())
    assert list(results) == ["synchronous", "asynchronous, DyLU", "asynchronous, DyLU, grace"]
    for name, (seed,) in results.items():
        assert name in output
        assert seed["losses"]
        assert all(map(math.isfinite, seed["losses"]))
    (waits,) = results["synchronous"]
    assert 0 < waits["losses"][-1] < waits["losses"][0]


def test_processor_time(tmp_path: Path) -> None:
    """Of exchanges alone, with every library and every wire."""
    size = ["--megabytes", "0.01", "--milliseconds", "0.1", "--period", "2", "--periods", "1", "--repetitions", "1"]
    files = ["--resting", "--json", str(tmp_path / "results")]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.training", *size, *files], 180, "torch")
    results = json.loads((tmp_path / "results").read_text())
    assert [result["method"] for result in results] == [ALONE, *EXCHANGES, *sockets.METHODS]
    assert all(result["method"] in output for result in results)
    assert {"copies", "kernel_milliseconds"} <= results[0].keys()


def test_language(tmp_path: Path) -> None:
    """A small network, few steps; all methods see the same number of samples, and learn."""
    size = [
        "--steps",
        "8",
        "--rate",
        "0.02",
        "--looks",
        "2",
        "--period",
        "4",
        "--width",
        "16",
        "--layers",
        "1",
        "--batches",
        "1",
    ]
    files = ["--json", str(tmp_path / "results"), "--plot", str(tmp_path / "plot.png")]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.language", *size, *files], 240, "torch")
    results = json.loads((tmp_path / "results").read_text())
    assert list(results) == list(language.METHODS)
    for name, (first, last) in results.items():
        assert name in output
        assert (first["steps"], last["steps"]) == (4, 8)
        assert 0 < last["bits"] < first["bits"] < 8
        assert 0 < first["seconds"] < last["seconds"]
        assert (last["megabytes"] > first["megabytes"] > 0) == (name not in (language.SINGLE, ALONE))
    assert results["averaging, int8"][-1]["megabytes"] < 0.5 * results["averaging"][-1]["megabytes"]
    sent = [results[name][-1]["megabytes"] for name in ("averaging", *COMPRESSED)]
    assert sent == sorted(sent, reverse=True)
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.thorough
def test_training_beside_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate and torchft, from an environment of their own, which is made as the script makes it."""
    words = f'source "{ROOT}/run_scripts/common.sh"; provide_peers >&2; printf %s "$PYTHONPATH"'
    made = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=300 * PATIENCE)
    if made.returncode != 0:
        pytest.skip(f"they cannot be installed: {made.stderr[-1000:]}")
    monkeypatch.setenv("PYTHONPATH", made.stdout)
    size = ["--megabytes", "0.1", "--milliseconds", "1", "--repetitions", "1", "--period", "10", "--periods", "1"]
    names = ["accelerate LocalSGD", "torchft LocalSGD", "torchft DiLoCo", "torchft Streaming DiLoCo"]
    files = ["--json", str(tmp_path / "results")]
    start("mpirun", 2, ["-m", "tests.benchmarks.training", *size, *files, "--methods", *names], 120)
    results = json.loads((tmp_path / "results").read_text())
    assert [result["method"].split(",")[0] for result in results] == [ALONE, *names]
    assert all(result["ratio"] > 0 for result in results)


@pytest.mark.parametrize("framework", ["torch", thorough("tensorflow")])
def test_local_step(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(f"horovod.{framework}")
    options = ["--framework", framework, "--model", "tiny", "--repetitions", "1", "--json", str(tmp_path / "results")]
    output = start("python", 1, ["-m", "tests.benchmarks.local_step", *options], 90, framework)
    results = json.loads((tmp_path / "results").read_text())
    assert [result["step"] for result in results] == [
        *("SGD", "ModelAverageOptimizer", "ElasticAverageOptimizer", "ElasticAverageOptimizer, rho > 0"),
        "AGNOptimizer",
    ]
    assert all(result["step"] in output and result["ratio"] > 0 for result in results)


def test_placement() -> None:
    output = start("mpirun", 2, ["-m", "tests.benchmarks.placement", "--small", "--repetitions", "1"], 90, "torch")
    rows = [line.rsplit(maxsplit=6) for line in output.splitlines() if "elastic" in line or "a" in line[:1].lower()]
    held = {row[0]: row[1] for row in rows if len(row) == 7}
    for kind in ("elastic", "average", "AGN, Adam"):
        assert held[f"{kind}, replicated"] == "0.02/0.02"
        assert held[f"{kind}, root"] == "0.00/0.02"
        assert held[f"{kind}, sharded"] == "0.01/0.01"


def test_rows() -> None:
    """A table of 200 rows of 4 floats: 3200 bytes, of which a period touches two rows on each rank."""
    options = ["--rows", "200", "--width", "4", "--repetitions", "1"]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.rows", *options], 90, "torch")
    for algorithm in ("averaging", "DiLoCo"):
        assert f"{algorithm}, whole table" in output
        assert f"{algorithm}, touched rows" in output


def test_encoding(tmp_path: Path) -> None:
    options = ["--elements", "5000", "--repetitions", "1", "--json", str(tmp_path / "results")]
    output = start("python", 1, ["-m", "tests.benchmarks.encoding", *options], 90, "torch")
    results = json.loads((tmp_path / "results").read_text())
    assert {result["library"] for result in results} == {"PyTorch", "numpy"}
    assert {result["wire"] for result in results} == set(encoding.WIRES)
    assert all(f"{result['wire']}, {result['library']}" in output for result in results)


@pytest.mark.parametrize("transport", ["window", thorough("service"), "none"])
def test_slow_worker(transport: str) -> None:
    options = ["--transport", transport, "--seconds", "0.1", "--turns", "1", "--width", "16"]
    output = start("mpirun", 2, ["-m", "tests.benchmarks.slow_worker", *options], 90, "torch")
    ratio = next(line for line in output.splitlines() if line.startswith("ratio"))
    assert float(ratio.split()[-1]) > 0


@pytest.mark.parametrize(
    ("launcher", "framework", "modes"),
    [
        ("mpirun", "torch", ["elastic averaging, overlap, fragments", "AGN, window"]),
        thorough("mpirun", "torch", ["elastic averaging, service"]),
        thorough("torchrun", "torch", ["elastic averaging", "averaging, overlap", "AGN, sharded", "averaging, int8"]),
        thorough("mpirun", "tensorflow", ["averaging", "elastic averaging, window"]),
    ],
)
def test_soak(launcher: str, framework: str, modes: list[str]) -> None:
    """A few hundred exchanges; ``run_scripts/soak.sh`` takes more, in more modes."""
    pytest.importorskip("mpi4py")
    words = [word for mode in modes for word in ("--mode", mode)]
    program = ["-m", "tests.benchmarks.soak", "--framework", framework, "--exchanges", "200", *words]
    output = start(launcher, 2, program, 90, framework)
    assert "Nothing has grown." in output
    assert all(mode in output for mode in modes)
