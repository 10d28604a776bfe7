"""``hvdp plan``: what the cost model says, in a table; models of all formats; advice; what it says to nonsense."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Compression
from hvd_periodic.cli import ranks
from hvd_periodic.cli.main import main
from hvd_periodic.comm import LocalCommunicator
from hvd_periodic.cost_model import Job, Network, seconds_per_step, typical

WORDS = ["--parameters", "25M", "--ranks", "8", "--bandwidth", "10", "--step", "100"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


def test_rows_are_those_of_the_cost_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *WORDS, "--spread", "5", "--latency", "20", "--period", "7,30")
    network = Network(2e-5, 8e-10)
    by_name = {(row["exchange"], row["period"]): row for row in found["rows"]}
    for period in (7, 30):
        for overlap in (0, period - 1):
            for name, wire in (("", Compression.none), (", int8", Compression.int8)):
                job = Job(8, 1e8, 0.1, period, overlap, 1, wire, 0.005)
                row = by_name[f"average{name}{', overlap' if overlap else ''}", period]
                assert row["rate"] == pytest.approx(1 / seconds_per_step(job, typical(wire), network))
                assert row["share"] == pytest.approx(1 - 0.1 * row["rate"])
    assert found["own_work"]["average, int8"] == {
        "begin_seconds": 0.0015,
        "byte_seconds": typical(Compression.int8).work,
    }
    assert by_name["allreduce of gradients", 1]["sent"] == pytest.approx(2 * 7 / 8 * 1e8)


def test_advice_follows_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    """An exchange at every step, where that costs nothing; then periods; then overlap; then nothing helps."""

    def advice(*words: str) -> tuple[int, str, str]:
        found = planned(capsys, *WORDS, *words)["recommended"]
        assert found["moving_rate"] == pytest.approx(0.9 / 64 if "64" in words else 1 / 9)
        return found["period"], found["exchange"], found["why"]["Period"]

    assert advice("--bandwidth", "1e5", "--step", "10000")[:2] == (1, "average")
    period, exchange, why = advice()
    assert exchange == "average"
    assert 5 < period < 50
    assert f"{period}, average. Exchanges then take" in why
    period, exchange, why = advice("--bandwidth", "1", "--steps", "2000")
    assert exchange == "average, overlap"
    assert period <= 20
    assert "leaves a run of 2000 steps fewer than 100 exchanges" in why
    _, _, why = advice("--bandwidth", "0.001")
    assert "Only a period of" in why
    assert "would reduce that to 10 %, and periods above 100 are long" in why
    period, exchange, why = advice("--parameters", "7B", "--ranks", "64", "--bandwidth", "100", "--step", "2000")
    assert (period, exchange) == (100, "average"), "overlap would take as long: steps are computed meanwhile"
    assert "Exchanges then take 10.1 % of the time. Only a period of 101 would reduce that to 10 %" in why


@pytest.mark.parametrize("steps", ["1", "150", "199", "250"])
def test_no_period_beyond_the_limit(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing fits, the run is what counts: a hundred exchanges of it, if it has so many steps."""
    found = planned(capsys, *WORDS, "--bandwidth", "0.001", "--steps", steps)["recommended"]
    assert found["period"] == max(1, int(steps) // 100)
    longest = f"the longest period that leaves a run of {steps} steps 100 exchanges is {found['period']}"
    assert longest in found["why"]["Period"]
    assert found["period"] > 1 or "overlap" not in found["exchange"]


def test_a_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--learning-rate", "0.1"]) == 0
    out = capsys.readouterr().out
    table = [line.rstrip() for line in out.splitlines() if line.startswith((" ", "p", "a")) and "average" in line]
    assert len(table) >= 12
    assert max(map(len, table)) <= 80
    assert "Learning rate: 0.1, not 0.8: that of a single-worker run." in out
    assert "\x1b" not in out


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is floating point counts; optimizers do not."""
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "BF16", "shape": [10, 20], "data_offsets": [0, 400]},
        "steps": {"dtype": "I64", "shape": [1], "data_offsets": [400, 408]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    np.savez(tmp_path / "b.npz", w=np.zeros((10, 19)), b=np.zeros(10, "f4"), steps=np.arange(3))
    files = ["a.safetensors", "b.npz"]
    for file in files:
        assert planned(capsys, "--model", str(tmp_path / file), *WORDS[2:])["parameters"] == 200


def test_a_model_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(19, 10)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 19)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "c.pt")
    assert planned(capsys, "--model", str(tmp_path / "c.pt"), *WORDS[2:])["parameters"] == 200


def test_weights_of_keras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros((19, 10), "f4")
        file["layers/dense/vars/1"] = np.zeros(10, "f4")
        file["optimizer/vars/0"] = np.zeros(200, "f4")
    assert planned(capsys, "--model", str(tmp_path / "model.weights.h5"), *WORDS[2:])["parameters"] == 200


def test_files_that_are_no_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: str, content: bytes | None = b"") -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        return refused(capsys, "--model", str(tmp_path / name), *WORDS[2:])

    assert "must end in one of .safetensors, .npz, .keras, .h5, .pt, .pth" in said("a.onnx")
    assert "there is no file" in said("a.npz", None)
    for name in ("b.npz", "b.safetensors"):
        assert "cannot be read as" in said(name, b"something else, long enough")
    assert "holds no floating-point numbers" in said("c.safetensors", (2).to_bytes(8, "little") + b"{}")
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "pip install h5py" in said("d.weights.h5", b"")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parameters 25.6kM", "`--parameters` must be a number such as 25.6M. Received: '25.6kM'"),
        ("--parameters many", "`--parameters` must be a number such as 25.6M. Received: 'many'"),
        ("--parameters -3", "`--parameters` must be positive and finite"),
        ("--parameters 0.4", "`--parameters` must be at least 1. Received: '0.4'"),
        ("--ranks 0", "`--ranks` must be an int >= 1. Received: 0"),
        ("--step 0", "`--step` must be positive and finite. Received: 0.0"),
        ("--spread -1", "`--spread` must be zero or positive"),
        ("--bandwidth 0", "`--bandwidth` must be positive"),
        ("--latency nan", "`--latency` must be zero or positive and finite. Received: nan"),
        ("--period 1,x", "`--period` must be an int, or several with commas between. Received: 'x'"),
        ("--period 0", "`--period` must be an int >= 1"),
        ("--algorithm avg", "Unknown algorithm 'avg'"),
        ("--compression gzip", "Unknown compression 'gzip'. Known: bf16, e3m0, fp16, int2, int4, int8, none, topk"),
        ("--share 1.5", "`--share` must be between 0 and 1"),
        ("--steps 0", "`--steps` must be an int >= 1"),
        ("--learning-rate 0", "`--learning-rate` must be positive"),
        ("--measure", "--measure measures the network and the ranks itself: omit --ranks and --bandwidth"),
    ],
)
def test_nonsense_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *WORDS, *words.split())


def test_what_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Pass --ranks, or use --measure in a job" in refused(capsys, "--parameters", "1M", "--step", "10")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--ranks", "3"])


def test_one_rank_has_no_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FRAMEWORKS", {"none": lambda: ranks.Ranks(LocalCommunicator(), np.asarray)})
    assert "mpirun -np 4 hvdp plan --measure" in refused(capsys, "--parameters", "1M", "--step", "10", "--measure")

    def missing() -> Any:
        raise ImportError("No module named 'horovod'")

    monkeypatch.setattr(ranks, "FRAMEWORKS", {"torch": missing})
    error = refused(capsys, "--parameters", "1M", "--step", "10", "--measure")
    assert "see hvdp doctor. torch: No module named 'horovod'" in error


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert main(["plan", *WORDS, "--plot", str(file)]) == 0
    assert "<svg" in file.read_text()
