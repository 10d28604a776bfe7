"""What a copy of an optimizer for the center takes over, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402


class Limited(torch.optim.SGD):
    """Keeps its own arguments as attributes, one of them under another name, and looks at no group for them."""

    def __init__(self, params: Any, lr: float, factor: float, limit: float = 9.0) -> None:
        super().__init__(params, lr=lr)
        self.factor, self._limit, self._held = factor, limit, [p for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> Any:
        for parameter in self._held:
            if parameter.grad is None:
                continue
            parameter.grad = (self.factor * parameter.grad).clamp(-self._limit, self._limit)
        return super().step(closure)


class Passing(torch.optim.Adagrad):
    def __init__(self, params: Any, **others: Any) -> None:
        super().__init__(params, **others)


MADE: dict[str, Callable[[Any], Any]] = {
    "initial accumulator": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=1.0),
    "handed on": lambda p: Passing(p, lr=0.01, initial_accumulator_value=1.0),
    "attributes": lambda p: Limited(p, 0.1, 2.0, limit=1.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def one_worker(optimizer: Any, parameter: Any, steps: int, period: int) -> list[float]:
    """With a gradient of 1 and a period, a step of the center is a local step of its optimizer."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    seen = []
    for step in range(steps * period):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if (step + 1) % period == 0:
            seen.append(parameter[0].item())
            scheduler.step()
    return seen


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", MADE)
def test_a_copy_steps_like_the_original(case: str, asynchronous: bool) -> None:
    plain = torch.nn.Parameter(torch.zeros(3))
    expected = one_worker(MADE[case]([plain]), plain, 5, 1)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvdp.AGNOptimizer(
        MADE[case]([parameter]), [("w", parameter)], 2, asynchronous=asynchronous, process_set=LocalCommunicator()
    )
    assert one_worker(optimizer, parameter, 5, 2) == pytest.approx(expected)


@pytest.mark.parametrize("center", ["root", "sharded"])
@pytest.mark.parametrize("case", MADE)
def test_a_copy_steps_alike_wherever_the_center_is(case: str, center: str) -> None:
    def work(communicator: ThreadCommunicator, center: str) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(3))
        made = MADE[case]([parameter])
        optimizer = hvdp.AGNOptimizer(made, [("w", parameter)], 2, center=center, process_set=communicator)
        return one_worker(optimizer, parameter, 4, 2)

    assert run(2, lambda c: work(c, center)) == run(2, lambda c: work(c, "replicated"))


def test_a_constructor_that_cannot_be_called_again_is_refused() -> None:
    class Named(torch.optim.SGD):
        def __init__(self, params: Any, names: list[str]) -> None:
            super().__init__(params, lr=0.1)

    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"Named cannot be copied .*'names'.*lambda groups"):
        hvdp.AGNOptimizer(Named([parameter], ["w"]), [("w", parameter)], process_set=LocalCommunicator())


@pytest.mark.parametrize("common", [{}, {"center": "sharded"}, {"asynchronous": True}], ids=str)
def test_sparse_adam_is_refused_at_construction(common: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"SparseAdam takes only sparse gradients.*outer_optimizer"):
        hvdp.AGNOptimizer(
            torch.optim.SparseAdam([parameter]), [("w", parameter)], process_set=LocalCommunicator(), **common
        )


@pytest.mark.parametrize("common", [{}, {"center": "sharded"}, {"center": "root"}], ids=str)
def test_capturable_is_for_gpus(common: dict[str, Any]) -> None:
    """The center is in host memory here, where torch refuses such steps; the original keeps its setting."""

    def work(communicator: ThreadCommunicator, capturable: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(3))
        center = torch.optim.Adam([parameter], lr=0.1, capturable=capturable)
        local = torch.optim.SGD([parameter], lr=0.1)
        optimizer = hvdp.AGNOptimizer(
            local, [("w", parameter)], 2, outer_optimizer=center, process_set=communicator, **common
        )
        found = one_worker(optimizer, parameter, 2, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert center.param_groups[0]["capturable"] == capturable
        return found + one_worker(optimizer, parameter, 2, 2)

    assert run(2, lambda c: work(c, True)) == run(2, lambda c: work(c, False))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state["state"][0].pop("exp_avg_sq"), "it has no 'exp_avg_sq' of tensor 0"),
        (lambda state: state["state"][1].update(exp_avg=torch.zeros(5)), r"tensor 1 has shape \(5,\), and \(2,\) here"),
        (
            lambda state: state["param_groups"][0]["params"].pop(),
            r"parameter groups have \[1\] tensors, and \[2\] here",
        ),
        (lambda state: state.pop("state"), "it is not a state dict with 'state' and 'param_groups'"),
    ],
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_damaged_state_is_refused_before_anything_is_loaded(damage: Any, message: str, fragments: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    if fragments == 2:  # Each has one more parameter, so that both have two.
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 3, 2)]
    local = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer = hvdp.AGNOptimizer(
        local,
        [(f"w{i}", parameter) for i, parameter in enumerate(parameters)],
        2,
        outer_optimizer=torch.optim.Adam(parameters, lr=0.1),
        process_set=LocalCommunicator(),
        **({"fragments": 2} if fragments == 2 else {}),
    )
    for _ in range(4):
        optimizer.load_state_dict(optimizer.state_dict())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    damaged = copy.deepcopy(optimizer.state_dict())
    damaged["param_groups"][0]["lr"] = 7.0
    outer = damaged["hvd_periodic"]["center_optimizer"]
    damage(outer["fragments"][0] if fragments == 2 else outer)
    with pytest.raises(ValueError, match=f"does not fit Adam: .*{message}"):
        optimizer.load_state_dict(damaged)
    assert local.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("kind", ["template", "local", "function"])
def test_a_state_is_compared_with_its_own_settings(kind: str, saved: bool) -> None:
    """Loading restores them; ``amsgrad`` decides whether Adam keeps ``max_exp_avg_sq``."""

    def made(amsgrad: bool) -> tuple[Any, torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.zeros(3))
        adam = torch.optim.Adam([parameter], lr=0.1, amsgrad=amsgrad)
        local = adam if kind == "local" else torch.optim.SGD([parameter], lr=0.1)
        outer = {
            "template": adam,
            "local": None,
            "function": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=amsgrad),
        }[kind]
        options = {"outer_optimizer": outer, "process_set": LocalCommunicator()}
        return hvdp.AGNOptimizer(local, [("w", parameter)], 1, **options), parameter

    def stepped(optimizer: Any, parameter: torch.nn.Parameter) -> list[float]:
        for gradient in (3.0, 1.0, 2.0):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        return parameter.tolist()

    source, target = made(saved), made(not saved)
    stepped(*source)
    state, values = copy.deepcopy(source[0].state_dict()), source[1].detach().clone()
    target[0].load_state_dict(state)
    with torch.no_grad():
        target[1].copy_(values)
    assert stepped(*target) == stepped(*source)


def test_the_state_of_an_optimizer_that_needs_values_to_step_is_not_compared() -> None:
    class Nervous(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert all(bool((p.grad == p.grad).all()) for group in self.param_groups for p in group["params"])
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.zeros(3))
    outer = Nervous([parameter], lr=0.1, momentum=0.9)
    local = torch.optim.SGD([parameter], lr=0.1)
    optimizer = hvdp.AGNOptimizer(local, [("w", parameter)], 1, outer_optimizer=outer, process_set=LocalCommunicator())
    one_worker(optimizer, parameter, 2, 2)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_that_a_scheduler_brings_is_shared_by_asynchronous_workers(made: Any) -> None:
    """OneCycleLR sets momentum on an optimizer that was wrapped without; one worker, as if it were synchronous."""

    def train(asynchronous: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvdp.AGNOptimizer(
            made([parameter], lr=0.1), [("w", parameter)], 2, asynchronous=asynchronous, process_set=LocalCommunicator()
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
        seen = []
        for _ in range(12):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
            seen.append(parameter[0].item())
        assert "momentum_buffer" in next(
            iter(optimizer.state_dict()["hvd_periodic"]["center_optimizer"]["state"].values())
        )
        return seen

    assert train(True) == train(False)


def test_state_that_appears_later_is_never_left_out_in_silence() -> None:
    class Growing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if group["lr"] < 0.1:
                        self.state[p]["late"] = torch.zeros(1)
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvdp.AGNOptimizer(
        Growing([parameter], lr=0.1), [("w", parameter)], 1, asynchronous=True, process_set=LocalCommunicator()
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match="keeps 'late' now"):
        optimizer.step()
