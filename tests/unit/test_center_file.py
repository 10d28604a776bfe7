"""The file in which an asynchronous center lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic.asynchronous.transport import MemoryTransport
from hvd_periodic.comm.base import Communicator
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer
from tests.helpers import errors, run_ranks

load_file = pytest.importorskip("safetensors.numpy").load_file


def of_mean(file: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a file has of tensors that mean something."""
    return {name: values for name, values in file.items() if not name.startswith("hvd_periodic.")}


@pytest.mark.parametrize("algorithm", ["easgd", "agn"])
def test_it_holds_the_center_at_every_moment(algorithm: str, tmp_path: Path) -> None:
    """Tensors of several dtypes and shapes, before the first step, in training, and at the end."""
    path = tmp_path / "center.safetensors"

    def train(communicator: Communicator) -> list[dict[str, np.ndarray]]:
        x: dict[str, Any] = {
            "w": np.full((3, 5), 1.0 + communicator.rank, np.float32),
            "half": np.full(3, 2.0, np.float16),
            "double": np.full((2, 1, 2), 3.0),
            "none": np.zeros((0, 4), np.float32),
            "scalar": np.array(4.0),
        }
        common: dict[str, Any] = {"asynchronous": True, "process_set": communicator, "center_file": path}
        optimizer: Any = (
            ElasticAverageOptimizer(SGD(0.1), x, 2, moving_rate=0.5, **common)
            if algorithm == "easgd"
            else AGNOptimizer(SGD(0.1), x, 2, **common)
        )
        seen = []
        for step in range(6):
            optimizer.step([np.full_like(array, 1.0 + communicator.rank) for array in x.values()])
            communicator.allgather_object(None, "stepped")
            with optimizer.center():
                seen.append({name: array.copy() for name, array in x.items()})
            assert path.exists() == (step > 0)
            for name, values in of_mean(load_file(path if step > 0 else f"{path}.unfinished")).items():
                assert values.shape == x[name].shape
                np.testing.assert_array_equal(values.astype(x[name].dtype), seen[-1][name], err_msg=name)
            communicator.allgather_object(None, "seen")
        optimizer.synchronizer.finalize()
        with optimizer.center():
            seen.append({name: array.copy() for name, array in x.items()})
        return seen

    (seen, other), file = run_ranks(2, train), of_mean(load_file(path))
    assert {name: values.dtype for name, values in file.items()} == {
        "w": np.float32,
        "half": np.float32,
        "double": np.float64,
        "none": np.float32,
        "scalar": np.float64,
    }
    for name, values in file.items():
        np.testing.assert_array_equal(values.astype(seen[-1][name].dtype), seen[-1][name], err_msg=name)
        np.testing.assert_array_equal(other[-1][name], seen[-1][name], err_msg=name)
    assert not np.array_equal(file["w"], seen[0]["w"])
    assert [path.name for path in tmp_path.iterdir()] == ["center.safetensors"]


def test_parameters_and_statistics_of_a_model(tmp_path: Path) -> None:
    """They have the names that they have in the model."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    from safetensors.torch import load_file as load_tensors

    import hvd_periodic.torch as hvdp

    def model() -> Any:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).bfloat16())

    def train(communicator: Communicator) -> dict[str, Any]:
        own = model()
        optimizer = hvdp.ElasticAverageOptimizer(
            torch.optim.SGD(own.parameters(), lr=0.1),
            own,
            1,
            process_set=communicator,
            asynchronous=True,
            center_file=tmp_path / "center",
        )
        before = (tmp_path / "center").exists()
        communicator.allgather_object(None, "constructed")
        assert not before
        for seed in range(3):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * seed + communicator.rank))
            optimizer.zero_grad()
            own[2](own[1](own[0](inputs)).bfloat16()).square().sum().backward()
            optimizer.step()
        optimizer.finalize()
        state: dict[str, Any] = hvdp.center_state_dict(own, optimizer)
        return state

    expected = run_ranks(2, train)[0]
    restored = model()
    missing, unexpected = restored.load_state_dict(load_tensors(tmp_path / "center"), strict=False)
    assert missing == []
    assert all(name.startswith("hvd_periodic.unused.") for name in unexpected)
    for name, values in restored.state_dict().items():
        assert torch.equal(values, expected[name]), name


def train(communicator: Communicator, path: object, start: float = 0.0) -> np.ndarray:
    """Train for two steps."""
    x = np.full(3, start)
    options: dict[str, Any] = {"asynchronous": True, "process_set": communicator, "center_file": path}
    optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 1, moving_rate=0.5, **options)
    for _ in range(2):
        optimizer.step([np.ones(3)])
    optimizer.synchronizer.finalize()
    with optimizer.center():
        return x.copy()


def test_pushes_that_were_not_shown_are_in_the_file_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a worker that ends between a push and its copy."""
    path, show = tmp_path / "center.safetensors", MemoryTransport.show

    def pushes_alone(communicator: Communicator) -> np.ndarray:
        monkeypatch.setattr(MemoryTransport, "_show", lambda *_: None)

        def shown(transport: MemoryTransport) -> None:
            monkeypatch.undo()
            show(transport)

        monkeypatch.setattr(MemoryTransport, "show", shown)
        return train(communicator, path)

    expected = run_ranks(1, pushes_alone)[0]
    np.testing.assert_array_equal(load_file(path)["x"], expected)
    assert expected[0] < 0


def test_the_file_of_the_job_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "center.safetensors"
    Path(f"{path}.unfinished").write_text("of a job that ended before its first step")
    first = run_ranks(2, lambda communicator: train(communicator, path, 7.0))[0]
    np.testing.assert_array_equal(load_file(path)["x"], first)
    start = float(first[0])
    second = run_ranks(2, lambda communicator: train(communicator, str(path), start))[0]
    np.testing.assert_array_equal(load_file(path)["x"], second)
    np.testing.assert_array_equal(load_file(f"{path}.previous")["x"], first)
    assert second[0] < first[0] < 7.0


def test_a_file_that_cannot_be_is_an_error_on_all(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "center", tmp_path):
        (tmp_path / "blocked").mkdir(exist_ok=True)
        Path(f"{tmp_path}.unfinished").mkdir(exist_ok=True)
        for kind, text in errors(2, lambda communicator, path=path: train(communicator, path)):
            assert kind is RuntimeError
            assert "`center_file` must be a path in an existing folder, on a disk with room" in text
            assert f"Received: {str(path)!r}; rank 0: " in text
    assert tmp_path.is_dir()


def test_a_file_that_another_optimizer_uses_is_refused(tmp_path: Path) -> None:
    """Until that one is at its end; what it has there stays."""
    path = tmp_path / "center"
    options: dict[str, Any] = {"asynchronous": True, "center_file": path}
    x = np.zeros(3)
    first = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 1, moving_rate=0.5, **options)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="another optimizer uses it: give each optimizer its own file"):
            ElasticAverageOptimizer(SGD(1.0), {"x": np.ones(3)}, 1, moving_rate=0.5, **options)
        first.step([np.ones(3)])
    np.testing.assert_array_equal(load_file(path)["x"], np.full(3, -1.0))
    first.synchronizer.finalize()
    second = ElasticAverageOptimizer(SGD(1.0), {"x": np.ones(3)}, 1, moving_rate=0.5, **options)
    second.step([np.zeros(3)])
    np.testing.assert_array_equal(load_file(path)["x"], np.ones(3))
    np.testing.assert_array_equal(load_file(f"{path}.previous")["x"], np.full(3, -1.0))


def test_a_relative_path_is_of_the_folder_of_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.zeros(3)
    optimizer = ElasticAverageOptimizer(
        SGD(1.0), {"x": x}, 1, moving_rate=0.5, asynchronous=True, center_file="center", run_log="run"
    )
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    optimizer.step([np.ones(3)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["center", "other", "run"]


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    def run(communicator: Communicator) -> None:
        train(communicator, None if communicator.rank else tmp_path / "center")

    for kind, text in errors(2, run):
        assert kind is ValueError
        assert "center_file" in text
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`center_file` is for asynchronous exchange, .* Received: center_file='x'"):
        ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 1, center_file="x")
    with pytest.raises(TypeError, match=r"`center_file` must be a path, or None\. Received: 3"):
        ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 1, center_file=3, asynchronous=True)
