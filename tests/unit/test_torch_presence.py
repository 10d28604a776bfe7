"""Parameters of PyTorch models to which only ranks with gradients contribute: as on numpy, see ``test_presence.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from tests.presence_oracle import MOMENTUM, RATE, Element, trajectory, uses  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "agn": hvdp.AGN,
    "agn average": lambda: hvdp.AGN(op="average"),
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
}
RANKS, STEPS, PERIOD = 3, 13, 2
START = {"body": [1.0, 0.25], "experts.0": [1.0, -2.0, 0.5], "experts.1": [-1.0]}
POLICIES = {"experts.*": "present"}


class Experts(torch.nn.Module):
    """A body and two experts, of which a forward pass uses some."""

    def __init__(self, dtype: Any = torch.float64) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.tensor(START["body"], dtype=dtype))
        self.experts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.tensor(START[f"experts.{i}"], dtype=dtype)) for i in range(2)
        )

    def forward(self, rank: int, used: list[int]) -> Any:
        """Return the loss, whose gradients are those of the oracle."""
        parts = [self.body, *(self.experts[i] for i in used)]
        return sum((0.5 * (0.5 + 0.25 * rank) * (x - (1.5 - rank)) ** 2).sum() for x in parts)


def made(model: Any, communicator: Any, algorithm: str, **options: Any) -> Any:
    local = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    if algorithm.startswith("agn"):
        options["outer_optimizer"] = lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)
    options = {"parameters": POLICIES, "period": PERIOD} | options
    return hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), process_set=communicator, **options)


def stepped(model: Any, optimizer: Any, rank: int, step: int) -> dict[str, Any]:
    """Take a step, and return the values after it."""
    optimizer.zero_grad(set_to_none=True)
    model(rank, [i for i in range(2) if uses(rank, step, i)]).backward()
    optimizer.step()
    return {name: x.tolist() for name, x in model.named_parameters()}


def expected(algorithm: str, delay: int = 0) -> list[list[dict[str, list[float]]]]:
    """Return the values on each rank after each step, and the center, by the oracle."""
    found = [[{name: list[float]() for name in START} for _ in range(STEPS + 1)] for _ in range(RANKS)]
    for name, values in START.items():
        which = None if name == "body" else int(name[-1])
        for value in values:
            element = Element(value, RANKS, algorithm, takes_part=which is None)
            replicas = trajectory(
                element,
                STEPS,
                range(PERIOD, STEPS + 1, PERIOD),
                lambda i, t, which=which: which is None or uses(i, t, which),
                delay,
            )
            for rank in range(RANKS):
                for step, of_ranks in enumerate([*replicas, [element.center] * RANKS]):
                    found[rank][step][name].append(of_ranks[rank])
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_oracle(algorithm: str, way: str) -> None:
    def work(communicator: ThreadCommunicator) -> Any:
        model, rank = Experts(), communicator.rank
        optimizer = made(model, communicator, algorithm, **WAYS[way])
        seen = [stepped(model, optimizer, rank, step) for step in range(1, STEPS + 1)]
        with optimizer.center():
            return [*seen, {name: x.tolist() for name, x in model.named_parameters()}]

    for found, right in zip(run(RANKS, work), expected(algorithm, WAYS[way].get("overlap", 0)), strict=True):
        for step, (values, of_oracle) in enumerate(zip(found, right, strict=True)):
            for name in START:
                assert values[name] == pytest.approx(of_oracle[name], rel=1e-9), (name, step)
