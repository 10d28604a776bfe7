"""A copy of an optimizer writes none of the files that the original writes; in every front end that has copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import LocalCommunicator, read_run_log

pytestmark = pytest.mark.timeout(90)

PERIOD = 2
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "of a copy": lambda pair: copy.deepcopy(copy.deepcopy(pair)),
}


@pytest.fixture(params=["given", "environment"])
def asked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ask for a run log, in either way."""
    if request.param == "environment":
        monkeypatch.setenv("HVD_PERIODIC_RUN_LOG", str(tmp_path / "run"))
    return {"run_log": str(tmp_path / "run")} if request.param == "given" else {}


def written(tmp_path: Path) -> list[tuple[str, str]]:
    """Return event and optimizer of all lines."""
    return [(line["event"], line["name"]) for line in read_run_log(tmp_path / "run")[0]]


@pytest.mark.parametrize("way", COPIES)
def test_in_pytorch(way: str, asked: dict[str, Any], tmp_path: Path) -> None:
    """Two levels."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    import hvd_periodic.torch as hvdp

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    def wrapped(local: Any, period: int) -> Any:
        return hvdp.ModelAverageOptimizer(local, model, period, process_set=_Alone(), **asked)

    model = torch.nn.Linear(3, 1)
    optimizer = wrapped(wrapped(torch.optim.SGD(model.parameters(), 0.1), 1), PERIOD)
    for _ in range(PERIOD):
        step(model, optimizer)
    before = written(tmp_path)
    assert [event for event, _ in before] == ["began", "began", *["exchanged"] * 3]
    copied_model, copied = COPIES[way]((model, optimizer))
    for _ in range(PERIOD):
        step(copied_model, copied)
    copied.finalize()
    assert copied.synchronizer.rounds == 2
    assert written(tmp_path) == before
    for _ in range(PERIOD):
        step(model, optimizer)
    assert len(written(tmp_path)) == len(before) + 3


@pytest.mark.parametrize("way", COPIES)
def test_in_keras(way: str, asked: dict[str, Any], tmp_path: Path) -> None:
    """Two levels."""
    keras, tf = _keras()
    import hvd_periodic.tensorflow as hvdp

    def wrapped(local: Any, period: int) -> Any:
        return hvdp.ModelAverageOptimizer(local, None, period, process_set=_Alone(), **asked)

    def train(optimizer: Any) -> None:
        w = keras.Variable(np.ones(3, np.float32))
        for _ in range(PERIOD):
            optimizer.apply([tf.ones(3)], [w])

    optimizer = wrapped(wrapped(keras.optimizers.SGD(0.1), 1), PERIOD)
    train(optimizer)
    before = written(tmp_path)
    assert [event for event, _ in before] == ["began", "began", *["exchanged"] * 3]
    copied = COPIES[way](optimizer)
    if way == "pickle":
        copied.attach(process_set=_Alone())
        copied.inner.attach(process_set=_Alone())
    train(copied)
    copied.finalize()
    assert copied.synchronizer.rounds == 1
    assert written(tmp_path) == before


def test_the_file_of_an_asynchronous_center_stays_that_of_the_original(tmp_path: Path) -> None:
    keras, tf = _keras()
    import hvd_periodic.tensorflow as hvdp

    optimizers = [
        hvdp.ElasticAverageOptimizer(
            keras.optimizers.SGD(0.1), None, 1, 0.5, asynchronous=True, center_file=tmp_path / "c", process_set=_Alone()
        )
    ]
    optimizers.append(copy.deepcopy(optimizers[0]))
    for optimizer in optimizers:
        optimizer.apply([tf.ones(3)], [keras.Variable(np.ones(3, np.float32))])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_none_is_written_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_periodic.numpy import SGD, ModelAverageOptimizer

    monkeypatch.setenv("HVD_PERIODIC_RUN_LOG", str(tmp_path / "run"))
    x = np.ones(3)
    ModelAverageOptimizer(SGD(0.1), {"x": x}, 1, run_log=False).step([x])
    assert not (tmp_path / "run").exists()


def _keras() -> tuple[Any, Any]:
    pytest.importorskip("horovod.tensorflow")
    return pytest.importorskip("keras"), pytest.importorskip("tensorflow")


class _Alone(LocalCommunicator):
    """The only rank, on tensors."""
