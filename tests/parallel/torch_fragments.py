"""Parameters in fragments in PyTorch; see ``scenarios.py``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests import oracle
from tests.parallel.program import Scenarios, attempt, crossed, repeated
from tests.parallel.torch_job import hvd
from tests.parallel.torch_overlap import ALGORITHMS, digest

scenario = Scenarios()

PERIOD = 5
OF_FRAGMENTS = ("easgd_rho", "average", "agn", "diloco", *repeated("easgd", "slowmo", "bmuf"))
"""Algorithms of the quadratics."""


def trained(name: str, schedule: Any, elements: Sequence[int], **options: Any) -> list[list[float]]:
    """Return the elements after every step on the oracle's losses, after the last exchange, and in the center."""
    starts = {element: torch.tensor(oracle.START[element], dtype=torch.float64) for element in elements}
    parameters = {element: torch.nn.Parameter(start) for element, start in starts.items()}
    inner = torch.optim.SGD(parameters.values(), lr=oracle.RATE, momentum=oracle.MOMENTUM)
    named = [(f"x{element}", parameter) for element, parameter in parameters.items()]
    optimizer = hvdp.PeriodicOptimizer(inner, named, ALGORITHMS[name](), schedule, **options)
    seen = []

    def note() -> None:
        seen.append([parameter.item() for parameter in parameters.values()])

    for _ in range(oracle.STEPS):
        x = [parameters[k].item() if k in parameters else 0.0 for k in range(len(oracle.START))]
        gradients = oracle.gradient(hvd.rank(), x)
        for element, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[element], dtype=torch.float64)
        optimizer.step()
        note()
    optimizer.synchronizer.finalize()
    note()
    with optimizer.center():
        note()
    return seen


def phase_of(element: int) -> Callable[[hvdp.Clock], int]:
    """Return the schedule of a fragment."""
    first = -(-(element + 1) * PERIOD // 3)
    return lambda clock: PERIOD if clock.round else first


@scenario
def fragments_of_quadratics() -> Any:
    """Three elements in as many fragments, in every place; and each alone in a training that begins with its phase."""
    results: dict[str, Any] = {}
    for name, center in crossed(OF_FRAGMENTS, ("replicated", "root", "sharded")):
        if f"{name} alone" not in results:
            alone = [trained(name, phase_of(element), [element]) for element in range(3)]
            results[f"{name} alone"] = [[x for (x,) in values] for values in zip(*alone, strict=True)]
        results[f"{name} {center}"] = trained(name, PERIOD, range(3), fragments=3, center=center)
        if name.startswith("easgd") and f"{name} overlap" not in results:
            results[f"{name} overlap"] = trained(name, PERIOD, range(3), fragments=3, overlap="period")
    return results


@scenario
def fragments_of_networks() -> Any:
    """Batch normalization, ranks with other numbers of batches, a copy and a checkpoint in the middle of a period.

    Returns the centers at the end: of the original, of the copy, and of what was loaded.
    """
    results = {}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("easgd_rho", {"fragments": 2}),
        ("average", {"fragments": 3, "overlap": 1, "optimizer_state": "average"}),
        ("agn", {"fragments": 2, "outer_optimizer": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)}),
        ("diloco", {"fragments": 3, "compression": hvdp.Compression.int8, "overlap": 2}),
    ]
    for name, options in cases:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 2))

        def optimizer_of(model: Any, name: str = name, options: Any = options) -> Any:
            inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
            return hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, **options)

        def train(model: Any, optimizer: Any, seed: int, batches: int) -> None:
            torch.manual_seed(seed)
            for _ in range(batches):
                data = torch.randn(16, 6) + hvd.rank()
                optimizer.zero_grad()
                (model(data) - data[:, :2]).square().mean().backward()
                optimizer.step()

        optimizer = optimizer_of(model)
        train(model, optimizer, 1, PERIOD + 3)
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
        for network, its_optimizer in ((model, optimizer), (copied, copy_of_optimizer), (loaded, other)):
            train(network, its_optimizer, 2, 4 + 3 * hvd.rank())
            its_optimizer.synchronizer.finalize()
            ends.append(digest(network, its_optimizer))
        results[name] = ends
    return results


@scenario
def fragments_refused() -> Any:
    """Wrong numbers of fragments, on all ranks or on the last one; and another number in a saved state."""
    last = hvd.rank() == hvd.size() - 1

    def made(fragments: Any, period: Any = PERIOD, **options: Any) -> Any:
        parameters = [(f"x{i}", torch.nn.Parameter(torch.ones(2))) for i in range(3)]
        inner = torch.optim.SGD([p for _, p in parameters], lr=0.1)
        options["fragments"] = fragments
        return hvdp.PeriodicOptimizer(inner, parameters, hvdp.Averaging(), period, **options)

    def stepped(optimizer: Any, steps: int) -> Any:
        for _ in range(steps):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    def loaded() -> None:
        made(2).load_state_dict(stepped(made(3), 2).state_dict())

    shrinking = hvdp.Piecewise({0: 3, 3: 2})
    return {
        "many": attempt(lambda: made(4)),
        "on the last": attempt(lambda: made(4 if last else 3)),
        "different": attempt(lambda: made(2 if last else 3)),
        "short": attempt(lambda: made(3, 2)),
        "shrinking": attempt(lambda: stepped(made(3, shrinking), 3)),
        "loaded": attempt(loaded),
    }
