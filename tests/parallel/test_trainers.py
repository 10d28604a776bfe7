"""What trainers have alike: their examples, and the end of all ranks when one fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.parallel.beside import MADE_BY, trainers, with_trainers  # noqa: F401
from tests.parallel.launch import ROOT, environment, python, run, start
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("with_trainers")]

EXAMPLES = [
    ("lightning", "horovodrun --gloo"),
    ("ignite", "mpirun"),
    ("huggingface", "torchrun"),
    thorough("accelerate", "torchrun"),
    thorough("lightning", "torchrun"),
    thorough("ignite", "torchrun"),
]


@pytest.mark.parametrize(("name", "launcher"), EXAMPLES)
def test_an_example_learns(name: str, launcher: str, tmp_path: Path) -> None:
    output = start(launcher, 2, [f"examples/{name}_digits.py", str(tmp_path)], 120, "trainers")
    found = re.findall(r"accuracy of the center: (\d\.\d+)", output)
    assert len(found) == 1
    assert float(found[0]) > 0.95


@pytest.mark.parametrize("name", ["huggingface", thorough("lightning")])
def test_an_example_explains_itself(name: str, tmp_path: Path) -> None:
    """--help is not the name of a folder, and nothing is trained."""
    words = [*python("trainers"), str(ROOT / f"examples/{name}_digits.py"), "--help"]
    shown = subprocess.run(
        words, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120 * PATIENCE
    )
    assert shown.returncode == 0, shown.stderr
    assert "folder for checkpoints" in shown.stdout
    assert not list(tmp_path.iterdir())


def test_loops_that_numba_compiles_write_the_same_bytes(tmp_path: Path) -> None:
    """Machine code is kept on disk: a second process compiles nothing."""
    words = [*python("trainers"), "-m", "tests.parallel.numba_program"]
    surroundings = {**environment(), "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        ran = subprocess.run(words, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=120 * PATIENCE)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout) == {
            "compiled": {"ternary": 1, "powers": 1},
            "compared": 2 * 4 * 3 * 9,
            "numba": True,
        }
        files = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
        assert len(files) == 2
    assert files == {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}


ALONE = [thorough("accelerate", "python"), ("accelerate", "accelerate launch"), thorough("huggingface", "python")]


@pytest.mark.parametrize(("name", "launcher"), ALONE)
def test_an_example_learns_alone(name: str, launcher: str, tmp_path: Path) -> None:
    """Without a launcher, and by one that starts one process."""
    output = start(launcher, 1, [f"examples/{name}_digits.py", str(tmp_path)], 120, "trainers")
    assert re.findall(r"accuracy of the center: 0\.9[5-9]", output)
    assert output.count("this one trains alone, as the only rank") == 1


RECIPES = [
    ("Lightning", "horovodrun --gloo"),
    ("transformers' Trainer", "horovodrun --gloo"),
    thorough("accelerate", "horovodrun --gloo"),
    ("accelerate", "mpirun"),
    *(
        thorough(name, launcher)
        for name, launchers in {
            "Lightning": ("python", "torchrun", "horovodrun --mpi"),
            "transformers' Trainer": ("torchrun", "mpirun"),
            "accelerate": ("python", "torchrun"),
            "Ignite": ("horovodrun --gloo", "mpirun", "torchrun"),
        }.items()
        for launcher in launchers
    ),
]


@pytest.mark.parametrize(("name", "launcher"), RECIPES)
def test_a_recipe_of_the_page_as_it_stands(name: str, launcher: str, tmp_path: Path) -> None:
    """All ranks know each other, and end with the same center."""
    ranks = 1 if launcher == "python" else 2
    start(launcher, ranks, ["-m", "tests.parallel.trainer_recipe_program", str(tmp_path), name], 120, "trainers")
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert [report["size"] for report in reports] == [ranks] * ranks
    assert reports == [reports[0]] * ranks
    assert reports[0]["steps"] > 0


FAILING = [
    ("lightning", "mpirun"),
    thorough("huggingface", "torchrun"),
    thorough("lightning", "torchrun"),
    thorough("huggingface", "mpirun"),
    thorough("ignite", "mpirun"),
    thorough("ignite", "torchrun"),
]


@pytest.mark.parametrize(("name", "launcher"), FAILING)
def test_a_rank_that_fails_ends_all(name: str, launcher: str, tmp_path: Path) -> None:
    """The others wait in an exchange, and end, too."""
    command = ["-m", "tests.parallel.trainer_failing_program", str(tmp_path), name]
    code, output = run(launcher, 2, command, 60, "trainers")
    assert code != 0
    assert "ArithmeticError: on purpose, on rank 1" in output


def test_none_is_imported_unless_used() -> None:
    program = (
        "import sys, hvd_periodic.torch; print({'lightning', 'transformers', 'accelerate', 'ignite'} & {*sys.modules})"
    )
    assert start("python", 1, ["-c", program], 60).splitlines()[-1] == "set()"


def test_the_environment_is_made_by_the_script_that_is_named() -> None:
    done = subprocess.run(["bash", "-n", ROOT / MADE_BY.split()[1]], env=os.environ, check=False)
    assert done.returncode == 0
