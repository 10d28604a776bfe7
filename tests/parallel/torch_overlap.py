"""Exchanges that travel while PyTorch trains on; see ``scenarios.py``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests import oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.program import Scenarios, crossed
from tests.parallel.torch_job import hvd

scenario = Scenarios()

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25),
    "easgd_rho": lambda: hvdp.EASGD(0.25, rho=0.5),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(0.5),
}
OVERLAPS = (1, "period")


def made(name: str, overlap: int | str, parameters: list[Any], inner: Any) -> Any:
    return hvdp.PeriodicOptimizer(inner, parameters, ALGORITHMS[name](), PERIOD, overlap=overlap)


@scenario
def overlapped_quadratics() -> Any:
    """The losses of the oracle, with momentum: x after every step; of elastic averaging also without overlap."""
    results = {}
    without = [(name, 0) for name in ALGORITHMS if name.startswith("easgd")]
    for name, overlap in [*without, *crossed(list(ALGORITHMS), OVERLAPS)]:
        parameter = torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64))
        inner = torch.optim.SGD([parameter], lr=oracle.RATE, momentum=oracle.MOMENTUM)
        optimizer, seen = made(name, overlap, [("w", parameter)], inner), []
        for _ in range(oracle.STEPS):
            parameter.grad = torch.tensor(oracle.gradient(hvd.rank(), parameter.tolist()), dtype=torch.float64)
            optimizer.step()
            seen.append(parameter.tolist())
        optimizer.synchronizer.finalize()
        with optimizer.center():
            seen.append(parameter.tolist())
        results[f"{name} {overlap}"] = seen
    return results


def digest(model: Any, optimizer: Any) -> list[float]:
    with optimizer.center():
        return [float(tensor.double().sum()) for tensor in model.state_dict().values()]


@scenario
def overlapped_networks() -> Any:
    """Batch normalization and Adam, ranks with other numbers of batches, a copy and a checkpoint in mid-flight.

    Returns the centers at the end; whether the copy, and what was loaded, went on like the original.
    """
    results = {}
    for name, overlap in (("easgd_rho", 2), ("average", 1), ("agn", "period"), ("diloco", 2)):
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 2))

        def optimizer_of(model: Any, name: str = name, overlap: Any = overlap) -> Any:
            # Adam's first steps are signs of gradients, which may turn where sums are rounded in another order.
            adam = torch.optim.Adam(model.parameters(), 0.01) if hvd.size() <= 2 else None
            inner = adam or torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
            return hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, overlap=overlap)

        def train(model: Any, optimizer: Any, seed: int, batches: int) -> None:
            torch.manual_seed(seed)
            for _ in range(batches):
                data = torch.randn(16, 6) + hvd.rank()
                optimizer.zero_grad()
                (model(data) - data[:, :2]).square().mean().backward()
                optimizer.step()

        optimizer = optimizer_of(model)
        train(model, optimizer, 1, PERIOD + 1)
        copied, copy_of_optimizer = copy.deepcopy((model, optimizer))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        loaded = copy.deepcopy(model)
        other = optimizer_of(loaded)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        loaded.load_state_dict(weights)
        other.load_state_dict(state)
        ends = []
        for trained, its_optimizer in ((model, optimizer), (copied, copy_of_optimizer), (loaded, other)):
            train(trained, its_optimizer, 2, 4 + 3 * hvd.rank())
            its_optimizer.synchronizer.finalize()
            ends.append(digest(trained, its_optimizer))
        results[name] = ends
    return results
