"""Weights by work in PyTorch: what ``step(examples=...)`` counts, also through wrappers of optimizers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import run  # noqa: E402
from tests.helpers import errors  # noqa: E402


def made(communicator: Any, period: int, weight: str) -> tuple[Any, Any]:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvdp.ModelAverageOptimizer(
        sgd, [("x", parameter)], period, process_set=communicator, weight=weight, run_log=False
    )
    return parameter, optimizer


def step(parameter: Any, optimizer: Any, move: float, **options: Any) -> float:
    parameter.grad = torch.full_like(parameter, -move)
    optimizer.step(**options)
    return float(parameter.detach())


@pytest.mark.parametrize(("weight", "mean"), [("steps", (2 * 1 + 1 * 4) / 3), ("examples", (8 * 1 + 24 * 4) / 32)])
def test_a_weighted_mean_by_hand(weight: str, mean: float) -> None:
    """Moves of 1 in two updates of eight examples, and of 4 in one update of 24."""

    def work(communicator: Any) -> float:
        parameter, optimizer = made(communicator, 2, weight)
        if communicator.rank == 0:
            step(parameter, optimizer, 1.0, examples=torch.tensor(6))
            return step(parameter, optimizer, 0.0, examples=2)
        step(parameter, optimizer, 4.0, examples=24)
        optimizer.skip()
        return float(parameter.detach())

    assert run(2, work, 60) == pytest.approx([mean] * 2)


def test_an_update_that_an_overflow_skips_does_no_work() -> None:
    def work(communicator: Any) -> float:
        parameter, optimizer = made(communicator, 2, "examples")
        step(parameter, optimizer, 1.0 + communicator.rank, examples=1)
        if communicator.rank == 0:
            optimizer.found_inf = torch.ones(1)  # As GradScaler sets it.
        return step(parameter, optimizer, 0.0, examples=2)

    assert run(2, work, 60) == pytest.approx([(1 * 1 + 3 * 2) / 4] * 2)


def test_levels_share_a_report() -> None:
    parameter, inner = made(LocalCommunicator(), 4, "examples")
    optimizer = hvdp.ModelAverageOptimizer(
        inner, [("x", parameter)], 4, process_set=LocalCommunicator(), weight="examples"
    )
    for _ in range(3):
        step(parameter, optimizer, 1.0, examples=5)
    notes = [each.synchronizer.progress.notes for each in (optimizer, inner)]
    assert [(each.examples, each.reports) for each in notes] == [(15.0, 3)] * 2


def test_a_synchronizer_without_optimizer() -> None:
    def work(communicator: Any) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        synchronizer = hvdp.Synchronizer(
            [("x", parameter)], hvdp.Averaging(), 1, process_set=communicator, weight="examples"
        )
        with torch.no_grad():
            parameter += communicator.rank
        synchronizer.step(examples=1 + 2 * communicator.rank)
        return float(parameter.detach())

    assert run(2, work, 60) == pytest.approx([0.75] * 2)


def test_bad_examples() -> None:
    def work(communicator: Any) -> None:
        parameter, optimizer = made(communicator, 2, "examples")
        for _ in range(2):
            step(parameter, optimizer, 1.0, examples=-1 if communicator.rank else 1)

    for _, message in errors(2, work):
        assert "`examples` must be a finite number of at least 0. Received: -1" in message
