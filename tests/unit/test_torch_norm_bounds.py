"""Bounds on norms in PyTorch: the trajectories are those of numpy, see ``test_norm_bounds.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.covering import covering

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.comm.threads import run  # noqa: E402
from hvd_periodic.numpy import SGD, NumpyReplica, PeriodicOptimizer  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402
from hvd_periodic.torch.space import TensorSpace  # noqa: E402

ALGORITHMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "easgd": (lambda: hvdp.EASGD(0.25), {"max_message_norm": 0.5}),
    "easgd, median": (lambda: hvdp.EASGD(0.25, rho=0.5), {"max_message_norm": "median"}),
    "average": (hvdp.Averaging, {"max_message_norm": 0.75, "max_mean_norm": 0.25}),
    "agn": (hvdp.AGN, {"max_mean_norm": 0.5}),
    "agn, average": (lambda: hvdp.AGN("average"), {"max_message_norm": 0.5, "max_mean_norm": 0.25}),
    "diloco": (hvdp.DiLoCo, {"max_message_norm": "median", "max_mean_norm": 0.25}),
    "slowmo": (hvdp.SlowMo, {"max_mean_norm": 0.25}),
    "bmuf": (hvdp.BMUF, {"max_message_norm": 0.5}),
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "host": {"center_device": "cpu"},
    "overlap": {"overlap": 1},
    "int8": {"compression": hvdp.Compression.int8},
    "fragments": {"fragments": 2},
}
STEPS, PERIOD, RANKS = 8, 2, 3
START = [[1.0, -2.0, 0.5], [3.0, -1.0, 2.0]]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the parameters into buckets of two elements, more than are in flight otherwise."""
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", partial(NumpyReplica, bucket_bytes=16))
    monkeypatch.setattr("hvd_periodic.torch.synchronizer.TorchReplica", partial(TorchReplica, bucket_bytes=16))


def gradient_of(rank: int, x: Any) -> Any:
    return (0.5 + 0.25 * rank) * (x - (1.5 - rank))


def on_torch(communicator: Any, algorithm: str, **options: Any) -> Any:
    make, bounds = ALGORITHMS[algorithm]
    model = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))})
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = hvdp.PeriodicOptimizer(sgd, model, make(), PERIOD, process_set=communicator, **(bounds | options))
    seen = []
    for _ in range(STEPS):
        model["x"].grad = gradient_of(communicator.rank, model["x"].detach())
        optimizer.step()
        seen.append(model["x"].tolist())
    with optimizer.center():
        return [*seen, model["x"].tolist()]


def on_numpy(communicator: Any, algorithm: str, **options: Any) -> Any:
    make, bounds = ALGORITHMS[algorithm]
    x = np.array(START)
    optimizer = PeriodicOptimizer(SGD(0.125), {"x": x}, make(), PERIOD, process_set=communicator, **(bounds | options))
    seen = []
    for _ in range(STEPS):
        optimizer.step([gradient_of(communicator.rank, x)])
        seen.append(x.tolist())
    with optimizer.center():
        return [*seen, x.tolist()]


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_trajectories_are_those_of_numpy(algorithm: str, way: str) -> None:
    options = WAYS[way]
    numpy_options = {key: value for key, value in options.items() if key != "center_device"}
    found = run(RANKS, lambda c: on_torch(c, algorithm, **options), 60)
    wanted = run(RANKS, lambda c: on_numpy(c, algorithm, **numpy_options), 60)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    unbounded = dict.fromkeys(("max_message_norm", "max_mean_norm"))
    assert not np.allclose(found, run(RANKS, lambda c: on_torch(c, algorithm, **options, **unbounded), 60))


@pytest.mark.parametrize("center", ["replicated", "sharded"])
def test_an_optimizer_of_the_framework_moves_the_center(center: str) -> None:
    """Nesterov as DiLoCo has it."""

    def work(communicator: Any) -> Any:
        def outer(groups: Any) -> Any:
            return torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True)

        return on_torch(communicator, "diloco", outer_optimizer=outer, center=center)

    found, wanted = run(RANKS, work, 60), run(RANKS, lambda c: on_torch(c, "diloco", center=center), 60)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_copies_have_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = torch.nn.Linear(2, 2)
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, max_message_norm="median", max_mean_norm=2.0
    )
    bounds = copy.deepcopy(optimizer).synchronizer.exchanger.context.bounds
    assert bounds == ("median", 2.0)


def test_squares_do_not_depend_on_threads() -> None:
    """And are sums in float64, which half precision and float32 would overflow or round."""
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.add(TensorSpace().square(x))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(x @ x), rel=1e-12)
    assert TensorSpace().square(torch.full((2,), 1e30)) == pytest.approx(2e60)
