"""``hvdp simulate``: the numbers of the package itself, and what it says to nonsense."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import EASGD, Communicator
from hvd_periodic.cli import problems
from hvd_periodic.cli.main import main
from hvd_periodic.cli.problems import PROBLEMS, Shape
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import Array, run_ranks

MINE = """
import math
import numpy as np

def bowl(x, rng):
    return float(x @ x) / 2, x + 0.1 * rng.standard_normal(x.shape)

bowl.start = [3.0, -4.0]

def wrong(x, rng):
    return x

def other_shape(x, rng):
    return 0.0, np.zeros(1)

def overflowing(x, rng):
    return math.exp(1e5 * abs(x[0])), x + 1

number = 3
"""


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["simulate", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("hvdp simulate: error: ")
    assert error.count("\n") == 1
    return error


def test_it_is_the_package_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """The same loop, written by hand."""
    problem = PROBLEMS["quadratic"](Shape(workers=3, dimension=5, heterogeneity=0.5), np.random.default_rng(7))

    def program(communicator: Communicator) -> tuple[float, int, int]:
        x, generator = problem.start.copy(), np.random.default_rng([7, communicator.rank])
        local = SGD(0.05, momentum=0.5)
        optimizer = PeriodicOptimizer(local, {"x": x}, EASGD(0.2), 7, process_set=communicator)
        for _ in range(40):
            optimizer.step([problem.sample(communicator.rank, x, generator)[1]])
        optimizer.synchronizer.finalize()
        counters = optimizer.synchronizer.counters
        with optimizer.center():
            return problem.loss(x), counters.rounds, counters.bytes_sent

    words = "--problem quadratic --workers 3 --dimension 5 --heterogeneity 0.5 --seed 7 --steps 40"
    words += " --learning-rate 0.05 --momentum 0.5 --algorithm easgd(moving_rate=0.2) --period 7"
    [run] = simulated(capsys, *words.split())["runs"]
    loss, rounds, sent = run_ranks(3, program)[0]
    assert (run["center"], run["exchanges"], run["bytes"]) == (loss, rounds, sent)
    assert (run["algorithm"], run["period"], run["learning_rate"]) == ("easgd(moving_rate=0.2)", "7", 0.05)
    course = run["course"]
    assert (course[0]["step"], course[-1]["step"]) == (0, 40)
    assert course[0]["center"] == course[0]["replicas"] == problem.loss(problem.start)
    assert course[-1]["distance"] > 0


def test_all_combinations_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--steps",
        "6",
        "--algorithm",
        "average,slowmo(0.2)",
        "--period",
        "1,post-local(start=3)",
        "--learning-rate",
    ]
    runs = simulated(capsys, *words, "0.1,0.01", "--workers", "2")["runs"]
    typed = [(run["algorithm"], run["period"], run["learning_rate"]) for run in runs]
    assert typed[:3] == [("average", "1", 0.1), ("average", "1", 0.01), ("average", "post-local(start=3)", 0.1)]
    assert typed[-1] == ("slowmo(0.2)", "post-local(start=3)", 0.01)
    assert len(typed) == 8


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("words", ["--overlap period --compression int8", "--fragments 2 --heterogeneity 1"])
def test_training_learns(problem: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--problem", problem, "--workers", "2", "--steps", "200", "--noise", "0.1", "--algorithm", "average"]
    [run] = simulated(capsys, *common, *words.split())["runs"]
    assert run["center"] < 0.8 * run["course"][0]["center"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By central differences; all examples at once, and no noise."""
    monkeypatch.setattr(problems, "EXAMPLES", 8)
    shape = Shape(workers=1, dimension=3, noise=0.0, batch=8)
    problem = PROBLEMS[name](shape, np.random.default_rng(1))

    class Everything:
        def integers(self, limit: int, size: int) -> Array:
            assert limit == size == 8
            return np.arange(8)

        def standard_normal(self, shape: tuple[int, ...]) -> Array:
            return np.zeros(shape)

    x = problem.start + 0.3
    _, gradient = problem.sample(0, x, Everything())  # type: ignore[arg-type]
    steps = 1e-6 * np.eye(len(x))
    expected = [(problem.loss(x + step) - problem.loss(x - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_a_table_says_which_one_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algorithm", "average", "--learning-rate", "0.1,30", "--steps", "100", "--workers", "2"]
    assert main(["simulate", *words]) == 0
    out = capsys.readouterr().out
    assert "diverged at step" in out
    assert "\x1b" not in out
    [good, bad] = simulated(capsys, *words)["runs"]
    assert good["diverged"] is None
    assert 0 < bad["diverged"] < 100
    assert bad["center"] is None


@pytest.mark.parametrize("more", ["", "--compression int8 --overlap 1"])
@pytest.mark.parametrize("rate", ["1e200", "1e308"])
def test_updates_that_overflow_have_diverged(rate: str, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those after which ranks would exchange at once."""
    words = ["--period", "1,2", "--algorithm", "easgd,diloco", "--workers", "2", "--steps", "20"]
    runs = simulated(capsys, *words, "--learning-rate", rate, *more.split())["runs"]
    assert all(run["diverged"] <= 4 for run in runs)


def test_a_function_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_simulate.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    [run] = simulated(capsys, "--function", "mine_of_simulate:bowl", "--algorithm", "average")["runs"]
    assert run["course"][0]["center"] == 12.5
    assert run["center"] < 0.1
    assert simulated(capsys, "--function", "mine_of_simulate:overflowing")["runs"][0]["diverged"] == 2
    assert "must return (loss, gradient). Received: ndarray" in refused(capsys, "--function", "mine_of_simulate:wrong")
    message = "must return a gradient of shape (20,). Received: (1,)"
    assert message in refused(capsys, "--function", "mine_of_simulate:other_shape")
    assert "Received: int" in refused(capsys, "--function", "mine_of_simulate:number")
    assert "has no nothing. It has: " in refused(capsys, "--function", "mine_of_simulate:nothing")
    assert "module:name" in refused(capsys, "--function", "mine_of_simulate")
    assert "No module named 'not_there'" in refused(capsys, "--function", "not_there:f")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algorithm esgd", "Unknown algorithm 'esgd'. Did you mean easgd? Known: agn, average, averaging, bmuf,"),
        ("--algorithm easgd(moving_rate=-1)", "moving_rate=...)` must be positive and finite. Received: -1"),
        ("--algorithm easgd(1.9)", "must be in (0, 2/(n+1)]"),
        ("--algorithm easgd(rate=1)", "unexpected keyword argument 'rate'"),
        ("--algorithm easgd(", "must be a list like agn,average"),
        ("--algorithm hvd_periodic.numpy.SGD(0.1)", "it must be an instance of Algorithm"),
        ("--period 0", "`--period`, unless it is a schedule, must be an int >= 1. Received: 0"),
        ("--period 2.5", "must be an int >= 1. Received: 2.5"),
        ("--period dubling", "Did you mean doubling?"),
        (
            "--learning-rate fast",
            "`--learning-rate` must be a number, or several with commas between. Received: 'fast'",
        ),
        ("--learning-rate 0", "`--learning-rate` must be positive and finite"),
        ("--momentum 1", "`--momentum` must be in [0, 1)"),
        ("--workers 0", "`--workers` must be an int >= 1"),
        ("--steps -1", "`--steps` must be an int >= 1"),
        ("--overlap long", "`--overlap` must be local steps, or period. Received: 'long'"),
        ("--fragments 11", "`fragments` must be at most the local steps of a period"),
        ("--compression zip", "Unknown compression 'zip'. Known: bf16, e3m0, fp16, int2, int4, int8, none, topk"),
        ("--compression none,int8", "`--compression` takes one value for all trainings"),
        ("--compression int8(3)", "it takes no arguments"),
        ("--condition 0.5", "`--condition` must be at least 1"),
        ("--noise nan", "`--noise` must be zero or positive and finite"),
    ],
)
def test_nonsense_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "--steps", "20", *words.split())


def test_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    assert main(["simulate", "--steps", "20", "--plot", str(file)]) == 0
    assert "<svg" in file.read_text()
    capsys.readouterr()
    assert "must end in one of" in refused(capsys, "--plot", str(tmp_path / "plot.doc"))
    assert "there is no folder" in refused(capsys, "--plot", str(tmp_path / "nowhere" / "plot.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'hvd_periodic[cli]'" in refused(capsys, "--plot", str(file))


def test_without_rich_there_is_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["simulate", "--steps", "20", "--algorithm", "average"]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines()[1].split()[:4] == ["algorithm", "period", "rate", "center"]
    assert error == ""


def test_by_default_periods_and_algorithms_differ_as_in_practice(capsys: pytest.CaptureFixture[str]) -> None:
    """Long periods cost accuracy; the outer momentum of DiLoCo makes up for it."""
    assert main(["simulate", "--algorithm", "average,diloco", "--period", "1,100", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    center = {(run["algorithm"], run["period"]): run["center"] for run in runs}
    assert center["average", "100"] > 1.01 * center["average", "1"]
    assert center["diloco", "100"] > 1.01 * center["diloco", "1"]
    assert center["diloco", "100"] < 0.99 * center["average", "100"]
