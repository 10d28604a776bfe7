"""Optimizers that evaluate the model at another point than they train it: the center is the evaluation point."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

BETA, PERIOD = 0.75, 4


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free gradient descent: steps move z, x is their mean, gradients are those of y = (1 - β) z + β x."""

    def __init__(self, params: Any, lr: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, weight: float, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train_mode

    def train(self) -> None:
        self._move(1 - BETA, True)

    def eval(self) -> None:
        self._move(1 - 1 / BETA, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / BETA)
                z -= group["lr"] * p.grad
                x.lerp_(z, 1 / group["k"])
                p.copy_(x.lerp(z, 1 - BETA))


class BeginsLate(ScheduleFree):
    """Does not move at first, as RAdam does not."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["asked"] = group.get("asked", 0) + 1
        if self.param_groups[0]["asked"] > 5:
            super().step(closure)


class EvaluatesMean(torch.optim.SGD):
    """Evaluates a moving average beside the parameters, which train() puts back: nothing goes on from it."""

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.detach().clone()
            p.data.mul_(0.5)

    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "kept" in self.state[p]:
                p.data.copy_(self.state[p].pop("kept"))


def descend(optimizer: Any, x: Any, rank: int, steps: int) -> None:
    """Each rank to a place of its own."""
    for _ in range(steps):
        x.grad = x.detach() - float(rank + 1) * torch.tensor([1.0, -2.0])
        optimizer.step()


def made(communicator: Any, wrapper: Any = hvdp.ModelAverageOptimizer, kind: Any = ScheduleFree, **options: Any) -> Any:
    """Return a parameter, the local optimizer and the one around it, in train mode."""
    x = torch.nn.Parameter(torch.tensor([4.0, 3.0]))
    local = kind([x])
    optimizer = wrapper(local, [("x", x)], PERIOD, process_set=communicator, **options)
    optimizer.train()
    return x, local, optimizer


def alone(rank: int, steps: int) -> Any:
    """Return the evaluation point of a rank that trains without the others."""
    x = torch.nn.Parameter(torch.tensor([4.0, 3.0]))
    local = ScheduleFree([x])
    local.train()
    descend(local, x, rank, steps)
    local.eval()
    return x.detach()


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("steps", [PERIOD - 1, PERIOD])
@pytest.mark.parametrize("order", ["as it is", "eval first", "eval inside"])
def test_the_center_is_the_evaluation_point(center: str, steps: int, order: str) -> None:
    """Whether the steps divide by the period or not, and whoever calls eval() when."""

    def work(communicator: ThreadCommunicator) -> Any:
        x, _, optimizer = made(communicator, center=center)
        descend(optimizer, x, communicator.rank, steps)
        if order == "eval first":
            optimizer.eval()
        optimizer.finalize()
        with optimizer.center():
            if order == "eval inside":
                optimizer.eval()
            return x.detach().clone()

    mean = (alone(0, steps) + alone(1, steps)) / 2
    for found in run(2, work):
        torch.testing.assert_close(found, mean)


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_that_is_set_inside_does_not_outlive_the_block(training: bool) -> None:
    x, local, optimizer = made(LocalCommunicator())
    descend(optimizer, x, 0, PERIOD + 1)
    if not training:
        optimizer.eval()
    before = x.tolist()
    with optimizer.center():
        optimizer.train()
    assert (x.tolist(), local.param_groups[0]["train_mode"]) == (before, training)


def test_a_block_that_is_refused_leaves_the_mode() -> None:
    x, local, optimizer = made(LocalCommunicator())
    descend(optimizer, x, 0, 1)
    local.step()
    before = x.tolist()
    with pytest.raises(RuntimeError, match="the step was not counted") as refused, optimizer.center():
        pass
    assert (x.tolist(), local.param_groups[0]["train_mode"]) == (before, True), refused


@pytest.mark.parametrize("wrapper", [hvdp.ElasticAverageOptimizer, hvdp.ModelAverageOptimizer, hvdp.AGNOptimizer])
def test_reading_changes_nothing(wrapper: Any) -> None:
    def work(communicator: ThreadCommunicator, reads: bool) -> Any:
        x, _, optimizer = made(communicator, wrapper)
        for _ in range(3):
            descend(optimizer, x, communicator.rank, 3)
            if reads:
                with optimizer.center():
                    pass
                optimizer.synchronizer.distance()
                optimizer.state_dict()
        return x.tolist()

    assert run(2, lambda c: work(c, True)) == run(2, lambda c: work(c, False))


@pytest.mark.parametrize("options", [{}, {"center": "root"}, {"center": "sharded"}, {"overlap": 1}], ids=str)
def test_after_an_exchange_all_evaluate_the_center(options: dict[str, Any]) -> None:
    def work(communicator: ThreadCommunicator) -> Any:
        x, local, optimizer = made(communicator, **options)
        descend(optimizer, x, communicator.rank, 3 * PERIOD - 1)
        optimizer.finalize()
        assert local.param_groups[0]["train_mode"]
        optimizer.eval()
        with optimizer.center():
            return x.tolist(), optimizer.synchronizer.distance()

    (first, near), (second, _) = run(2, work)
    assert first == second
    assert near < 1e-6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_agn_moves_the_evaluation_point_by_a_schedule_free_center(asynchronous: bool) -> None:
    """One worker whose period is one step: the center is what the optimizer alone makes of the same gradients."""
    x = torch.nn.Parameter(torch.tensor([4.0, 3.0]))
    optimizer = hvdp.AGNOptimizer(
        ScheduleFree([x]), [("x", x)], 1, process_set=LocalCommunicator(), asynchronous=asynchronous
    )
    optimizer.train()
    plain = torch.nn.Parameter(torch.tensor([4.0, 3.0]))
    reference = ScheduleFree([plain])
    for step in range(6):
        reference.train()
        for parameter, moving in ((x, optimizer), (plain, reference)):
            parameter.grad = torch.tensor([1.0, -2.0]) * (step + 1)
            moving.step()
        reference.eval()
        with optimizer.center():
            torch.testing.assert_close(x.detach(), plain.detach())


def test_training_goes_on_to_the_bit() -> None:
    x, _, optimizer = made(LocalCommunicator())
    descend(optimizer, x, 0, PERIOD + 1)
    weights, state = x.detach().clone(), copy.deepcopy(optimizer.state_dict())
    descend(optimizer, x, 0, PERIOD)
    again, _, optimizer = made(LocalCommunicator())
    with torch.no_grad():
        again.copy_(weights)
    optimizer.load_state_dict(state)
    descend(optimizer, again, 0, PERIOD)
    assert again.tolist() == x.tolist()


def test_an_optimizer_that_begins_late_has_an_evaluation_point() -> None:
    x, _, optimizer = made(LocalCommunicator(), kind=BeginsLate)
    descend(optimizer, x, 0, 5 + 2 * PERIOD)
    optimizer.finalize()
    optimizer.eval()
    replica = x.detach().clone()
    with optimizer.center():
        torch.testing.assert_close(x.detach(), replica)


def test_what_training_does_not_go_on_from_is_left_alone() -> None:
    """Exchanged is what trains: train() would take back what an exchange had put in place of the average."""

    def work(communicator: ThreadCommunicator) -> Any:
        x, _, optimizer = made(communicator, kind=lambda params: EvaluatesMean(params, lr=0.25))
        descend(optimizer, x, communicator.rank, PERIOD)
        return x.tolist()

    first, second = run(2, work)
    assert first == second
