"""What a user starts: the example under real launchers, and the scripts that start jobs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, environment, start
from tests.parallel.tiers import thorough

for module in ("horovod.torch", "sklearn", "matplotlib", "rich", "tqdm"):
    pytest.importorskip(module)

EXAMPLE = "examples/torch_digits.py"
EPOCHS = ["--epochs", "10"]
"""Enough for the accuracy that all reach."""

PERIODIC = ("easgd", "average", "agn", "diloco", "slowmo", "bmuf")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers train with every algorithm, in one job."""
    folder = tmp_path_factory.mktemp("results")
    words = ["--algorithm", "all", *EPOCHS, "--output", str(folder), "--no-progress"]
    start("mpirun", 2, [EXAMPLE, *words], 120, "torch")
    return folder


def test_centers_reach_the_accuracy_of_ordinary_training(results: Path) -> None:
    runs = {file.stem: json.loads(file.read_text()) for file in results.glob("*.json")}
    assert runs.keys() == {"allreduce", *PERIODIC}
    baseline = runs["allreduce"]["center_accuracy"]
    for algorithm in PERIODIC:
        run = runs[algorithm]
        assert run["center_accuracy"] >= 0.95, algorithm
        assert run["center_accuracy"] >= baseline - 0.02, algorithm
        assert run["exchanges"] == run["steps"] // 10 == len(run["exchange_steps"])
        assert run["course"][-1] == [run["exchanges"], run["center_accuracy"]]
        assert run["bytes_sent"] * 9 < runs["allreduce"]["bytes_sent"]
    for run in runs.values():
        assert len(run["losses"]) == len(run["distances"]) == len(run["worker_accuracy"]) == 2
        assert len(run["course"]) == 10
        assert run["losses"][0] != run["losses"][1], "shards differ"
        picture = (results / f"{run['algorithm']}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")


def test_experts_on_some_workers() -> None:
    """Each policy has a row of accuracies of the center by orientation, and all send the same bytes."""
    command = ["examples/torch_experts.py", "--epochs", "8", "--learning-rate", "0.05"]
    rows = [line.split("│") for line in start("mpirun", 2, command, 120, "torch").splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["average", "present"]
    results = [[float(cell) for cell in row[2:-1]] for row in rows]
    for *accuracies, mean, _ in results:
        assert min(accuracies) > 0.5
        assert accuracies[0] > 0.8, "all workers train the first expert"
        assert mean == pytest.approx(sum(accuracies) / 4, abs=1e-3)
    assert results[0][:-1] != results[1][:-1]
    assert results[0][-1] == results[1][-1] > 0


def check_of_example(output: str, folder: Path, results: Path) -> None:
    """Assert that the example has printed one table, and trained as over Horovod, to the bit."""
    assert output.count("accuracy of the center") == 1
    assert output.splitlines()[-1] == f"Record and plot: {folder}/easgd.json, .png"
    run, other = (json.loads((folder / "easgd.json").read_text()) for folder in (folder, results))
    for key in ("losses", "distances", "exchange_steps", "center_accuracy", "worker_accuracy", "bytes_sent"):
        assert run[key] == other[key], key


@pytest.mark.parametrize("launcher", ["torchrun", thorough("mpirun, MPI")])
def test_without_horovod_training_is_the_same_to_the_bit(launcher: str, results: Path, tmp_path: Path) -> None:
    """It shows no progress where there is no terminal."""
    framework = "torch" if launcher == "torchrun" else "torch alone"
    output = start(launcher, 2, [EXAMPLE, *EPOCHS, "--output", str(tmp_path)], 120, framework)
    check_of_example(output, tmp_path, results)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "library"), [("local_torchrun.sh", "torch"), ("local_mpirun.sh", "mpi")])
def test_launch_scripts_start_the_example(
    name: str, library: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_PERIODIC_COMM", library)
    done = run_script(name, "2", str(ROOT / EXAMPLE), *EPOCHS, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    check_of_example(done.stdout, tmp_path, results)


@pytest.mark.parametrize(
    ("loop", "algorithm", "launcher"),
    [
        thorough("fit", "easgd", "mpirun"),
        thorough("tape", "diloco", "mpirun, MPI"),
        thorough("fit", "allreduce", "mpirun"),
        thorough("tape", "allreduce", "mpirun, MPI"),
        thorough("tape", "average", "mpirun"),
        thorough("fit", "slowmo", "mpirun, MPI"),
        thorough("fit", "bmuf", "mpirun"),
    ],
)
def test_accuracies_in_tensorflow_agree_with_those_in_torch(
    loop: str, algorithm: str, launcher: str, results: Path, tmp_path: Path
) -> None:
    pytest.importorskip("horovod.tensorflow")
    command = ["examples/tensorflow_digits.py", "--algorithm", algorithm, "--loop", loop, *EPOCHS]
    start(launcher, 2, [*command, "--output", str(tmp_path), "--no-progress"], 120, "tensorflow")
    run, other = (json.loads((folder / f"{algorithm}.json").read_text()) for folder in (tmp_path, results))
    assert run["center_accuracy"] == pytest.approx(other["center_accuracy"], abs=0.02)
    for key in ("steps", "exchanges", "exchange_steps", "workers", "period"):
        assert run[key] == other[key], key
    assert len(run["losses"][0]) == run["steps"]
    assert run["losses"][0] != run["losses"][1], "shards differ"
    assert (tmp_path / f"{algorithm}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("loop", "algorithm", "center"),
    [
        thorough("fit", "easgd", "root"),
        ("fit", "agn", "root"),
        thorough("tape", "average", "root"),
        ("tape", "easgd", "sharded"),
    ],
)
def test_compiled_steps_with_the_center_elsewhere(loop: str, algorithm: str, center: str, tmp_path: Path) -> None:
    """Ranks that do not use the result of a collective take part in it all the same."""
    pytest.importorskip("horovod.tensorflow")
    command = ["examples/tensorflow_digits.py", "--algorithm", algorithm, "--loop", loop, "--center", center]
    start("mpirun", 2, [*command, "--epochs", "4", "--output", str(tmp_path), "--no-progress"], 120, "tensorflow")
    run = json.loads((tmp_path / f"{algorithm}.json").read_text())
    assert run["exchanges"] == 9
    assert run["center_accuracy"] >= 0.85


@pytest.mark.parametrize(
    ("algorithm", "overlap", "compression", "parts"),
    [
        ("average", "2", "int8", 3.7),
        thorough("easgd", "period", "int8", 3.7),
        thorough("easgd", "0", "topk", 7.0),
        thorough("diloco", "1", "topk", 7.0),
        thorough("agn", "0", "fp16", 1.9),
    ],
)
def test_exchanges_that_travel_compressed(
    algorithm: str, overlap: str, compression: str, parts: float, results: Path, tmp_path: Path
) -> None:
    """The center is as good, for a part of the bytes."""
    command = [EXAMPLE, "--algorithm", algorithm, "--overlap", overlap, "--compression", compression, *EPOCHS]
    start("mpirun", 2, [*command, "--output", str(tmp_path), "--no-progress"], 60, "torch")
    run, other = (json.loads((folder / f"{algorithm}.json").read_text()) for folder in (tmp_path, results))
    assert run["center_accuracy"] == pytest.approx(other["center_accuracy"], abs=0.03)
    assert other["bytes_sent"] / run["bytes_sent"] >= parts
    assert run["exchanges"] == other["exchanges"]


@pytest.mark.parametrize(("algorithm", "overlap"), [("diloco", "1"), thorough("agn", "0")])
def test_exchanges_of_fragments(algorithm: str, overlap: str, results: Path, tmp_path: Path) -> None:
    """The center is as good, by the same bytes in four times as many exchanges."""
    command = [EXAMPLE, "--algorithm", algorithm, "--fragments", "4", "--overlap", overlap, *EPOCHS]
    start("mpirun", 2, [*command, "--output", str(tmp_path), "--no-progress"], 60, "torch")
    run, other = (json.loads((folder / f"{algorithm}.json").read_text()) for folder in (tmp_path, results))
    assert run["center_accuracy"] == pytest.approx(other["center_accuracy"], abs=0.03)
    each, of_all = (found["bytes_sent"] / found["exchanges"] for found in (run, other))
    assert each == pytest.approx(of_all / 4, rel=0.05)
    assert run["exchanges"] == 4 * other["exchanges"] + 1, "at the end, those that have gone on"


def gaps(run: Any) -> list[int]:
    """Return the local steps of every round."""
    return [after - before for before, after in itertools.pairwise([0, *run["exchange_steps"]])]


@pytest.mark.parametrize(
    ("schedule", "state", "expected"),
    [
        thorough("post-local", "local", [1] * 13 + [10] * 11),
        thorough("piecewise", "reset", [5] * 14 + [20] * 3),
        thorough("doubling", "average", [2] * 10 + [4] * 10 + [8] * 9),
    ],
)
def test_schedules_of_the_clock(schedule: str, state: str, expected: list[int], tmp_path: Path) -> None:
    command = [EXAMPLE, "--algorithm", "diloco", "--schedule", schedule, "--optimizer-state", state, "--epochs", "6"]
    start("mpirun", 2, [*command, "--output", str(tmp_path), "--no-progress"], 60, "torch")
    run = json.loads((tmp_path / "diloco.json").read_text())
    assert gaps(run) == expected
    assert (run["schedule"], run["optimizer_state"]) == (schedule, state)
    assert run["center_accuracy"] >= 0.85


@pytest.mark.parametrize(
    ("example", "schedule", "state"),
    [
        ("torch", "adacomm", "average"),
        thorough("tensorflow", "qsr", "reset"),
        thorough("torch", "qsr", "local"),
        thorough("tensorflow", "adacomm", "average"),
        thorough("torch", "seconds", "local"),
        thorough("tensorflow", "seconds", "reset"),
    ],
)
def test_schedules_that_look_at_the_training(example: str, schedule: str, state: str, tmp_path: Path) -> None:
    """The periods of QSR grow as the learning rate falls, those of AdaComm shrink with the loss."""
    pytest.importorskip(f"horovod.{example}")
    command = [f"examples/{example}_digits.py", "--algorithm", "slowmo", "--schedule", schedule, "--decay"]
    command += ["--optimizer-state", state, "--epochs", "8", "--output", str(tmp_path), "--no-progress"]
    start("mpirun", 2, command, 120, example)
    run = json.loads((tmp_path / "slowmo.json").read_text())
    first = {"adacomm": 20, "qsr": 5, "seconds": 1}[schedule]
    assert gaps(run)[0] == first
    if schedule != "seconds":
        assert gaps(run) == sorted(gaps(run), reverse=schedule == "adacomm")
        assert gaps(run)[-1] != first
    assert run["center_accuracy"] >= 0.85


@pytest.mark.parametrize(("algorithm", "transport"), [("easgd", "window"), thorough("agn", "service")])
def test_asynchronous_workers_learn(
    algorithm: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", transport)
    command = [EXAMPLE, "--algorithm", algorithm, "--asynchronous", "--period", "10", "--moving-rate", "0.3"]
    command += ["--epochs", "20"]
    start("mpirun", 2, [*command, "--output", str(tmp_path), "--no-progress"], 120, "torch")
    run = json.loads((tmp_path / f"{algorithm}.json").read_text())
    assert run["center_accuracy"] >= 0.95
    assert run["exchanges"] == run["steps"] // 10 == len(run["exchange_steps"])
    assert run["staleness"] > 0


@pytest.mark.parametrize(("algorithm", "center"), [thorough("easgd", "sharded"), thorough("agn", "root")])
def test_where_the_center_lives_changes_nothing(algorithm: str, center: str, results: Path, tmp_path: Path) -> None:
    command = [EXAMPLE, "--algorithm", algorithm, "--center", center, *EPOCHS]
    start("mpirun", 2, [*command, "--output", str(tmp_path), "--no-progress"], 120, "torch")
    run, other = (json.loads((folder / f"{algorithm}.json").read_text()) for folder in (tmp_path, results))
    for key in ("losses", "distances", "worker_accuracy", "center_accuracy"):
        assert run[key] == other[key], key


def test_a_run_goes_on_from_its_checkpoints(results: Path, tmp_path: Path) -> None:
    """As the first epochs of a run without interruption."""
    command = [EXAMPLE, "--algorithm", "agn", "--no-progress", "--output", str(tmp_path)]
    saved = ["--checkpoints", str(tmp_path / "saved")]
    start("mpirun", 2, [*command, "--epochs", "2", *saved], 60, "torch")
    start("mpirun", 2, [*command, "--epochs", "4", *saved], 60, "torch")
    resumed, run = (json.loads((folder / "agn.json").read_text()) for folder in (tmp_path, results))
    for key in ("losses", "distances"):
        assert resumed[key] == [of_worker[: resumed["steps"]] for of_worker in run[key]], key
    for key in ("exchange_steps", "course"):
        assert resumed[key] == run[key][: len(resumed[key])], key
    assert len(resumed["course"]) == 4


def test_comparison(results: Path) -> None:
    output = start("python", 1, [EXAMPLE, "--compare", str(results)], 60, "torch")
    for word in ("allreduce", *PERIODIC, "accuracy of the center", "after 22 exchanges", "seconds in exchanges"):
        assert word in output
    assert (results / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="train first"):
        start("python", 1, [EXAMPLE, "--compare", str(tmp_path)], 60, "torch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Each rank leaves a file named by rank and size; rank 1 fails if it is told to, before it imports anything."""
    file = tmp_path / "script.py"
    file.write_text(
        "import os, pathlib, sys\n"
        "if sys.argv[2] != '0':\n"
        "    number = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('HOROVOD_RANK'))\n"
        "    sys.exit(int(sys.argv[2]) if number == '1' else 0)\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "(pathlib.Path(sys.argv[1]) / f'{hvd.rank()} of {hvd.size()}').touch()\n"
        "hvd.allreduce(__import__('torch').ones(1))\n"
        "sys.stdout.write('terminal\\n' if sys.stderr.isatty() else 'pipe\\n')\n"
    )
    return file


@contextmanager
def error_stream(where: str) -> Iterator[int]:
    """Yield what a process may have as its error stream: one end of a terminal, or a pipe."""
    if where == "pipe":
        yield subprocess.PIPE
        return
    terminal, end = os.openpty()
    try:
        yield end
    finally:
        os.close(terminal)
        os.close(end)


def run_script(name: str, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(ROOT / "run_scripts" / name), *arguments]
    venv = Path(sys.prefix)
    env = environment() | ({"HVD_PERIODIC_VENV": str(venv)} if (venv / "bin" / "python3").exists() else {})
    return subprocess.run(
        words, env=env, cwd=os.sep, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=PATIENCE * 90, check=False
    )


@pytest.mark.parametrize(
    ("name", "ranks", "where"),
    [
        ("local_mpirun.sh", 2, "pipe"),
        thorough("local_mpirun.sh", 3, "pipe"),
        ("local_horovodrun.sh", 2, "terminal"),
        thorough("local_horovodrun.sh", 2, "pipe"),
    ],
)
def test_launch_scripts(name: str, ranks: int, where: str, script: Path, tmp_path: Path) -> None:
    """Nothing precedes the lines of ranks, which see the terminal, if there is one."""
    with error_stream(where) as stderr:
        finished = run_script(name, str(ranks), str(script), str(tmp_path), "0", stderr=stderr)
    assert finished.returncode == 0, finished.stdout + str(finished.stderr)
    assert finished.stdout == f"{where}\n" * ranks
    assert sorted(file.name for file in tmp_path.glob("* of *")) == [f"{rank} of {ranks}" for rank in range(ranks)]


@pytest.mark.parametrize("name", ["local_mpirun.sh", thorough("local_horovodrun.sh")])
def test_the_exit_code_is_that_of_the_ranks(name: str, script: Path, tmp_path: Path) -> None:
    assert run_script(name, "2", str(script), str(tmp_path), "3").returncode == 3


@pytest.mark.parametrize(
    ("name", "where"),
    [("local_mpirun.sh", "terminal"), ("local_torchrun.sh", "terminal"), ("local_torchrun.sh", "pipe")],
)
def test_ranks_write_as_if_no_launcher_were_between(name: str, where: str, tmp_path: Path) -> None:
    """What the test above does not try: the other stream under mpirun, and both under torchrun."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.stdout.write('terminal\\n' if sys.stderr.isatty() else 'pipe\\n')\n")
    with error_stream(where) as stderr:
        assert run_script(name, "2", str(script), stderr=stderr).stdout == f"{where}\n" * 2


@pytest.mark.parametrize("name", ["local_mpirun.sh", "local_horovodrun.sh", "local_torchrun.sh"])
def test_launch_scripts_explain_themselves(name: str) -> None:
    for arguments in ((), ("two", "train.py"), ("2",), ("2", "no_such_file.py")):
        refused = run_script(name, *arguments)
        assert refused.returncode == 2
        assert f"run_scripts/{name}" in refused.stderr
