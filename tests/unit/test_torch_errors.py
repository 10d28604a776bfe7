"""Bad input on the PyTorch side: refused where it is given, on every rank."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

LOCAL = {"process_set": LocalCommunicator()}


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters() if isinstance(model, torch.nn.Module) else model, lr=0.1)


LINEAR = torch.nn.Linear(2, 2)
NAMED = list(LINEAR.named_parameters())
W = torch.nn.Parameter(torch.zeros(2))

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "period 0": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, 0, **LOCAL),
        ValueError,
        r"communication_period.*Received: 0",
    ),
    "period 2.5": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, 2.5, **LOCAL),
        TypeError,
        r"communication_period.*Received: 2\.5",
    ),
    "interval True": (
        lambda: hvdp.ModelAverageOptimizer(sgd(LINEAR), LINEAR, True, **LOCAL),
        TypeError,
        r"interval_steps.*Received: True",
    ),
    "schedule": (
        lambda: hvdp.ModelAverageOptimizer(sgd(LINEAR), LINEAR, lambda step: 0, **LOCAL),
        ValueError,
        r"returned at step 0.*Received: 0",
    ),
    "center device": (
        lambda: hvdp.ModelAverageOptimizer(sgd(LINEAR), LINEAR, center_device="cuda:0", **LOCAL),
        ValueError,
        r"`center_device` must be None.* or 'cpu', .*Received: 'cuda:0'",
    ),
    "center device, asynchronous": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, center_device="cpu", asynchronous=True, **LOCAL),
        ValueError,
        r"`center_device` is for synchronous exchange.*Received: center_device='cpu', asynchronous=True",
    ),
    "rate 0": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, moving_rate=0, **LOCAL),
        ValueError,
        r"moving_rate=.*Received: 0",
    ),
    "rate too large": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, moving_rate=1.5, **LOCAL),
        ValueError,
        r"ElasticAverageOptimizer\(moving_rate=\.\.\.\)` must be in \(0, 2/\(n\+1\)\] = \(0, 1\].*moving_rate=1\.5",
    ),
    "beta too large": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, beta=1.1, **LOCAL),
        ValueError,
        r"beta=\.\.\..*Received: beta=1\.1",
    ),
    "both rates": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, moving_rate=0.1, beta=0.1, **LOCAL),
        ValueError,
        "not both",
    ),
    "negative rho": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, rho=-0.1, **LOCAL),
        ValueError,
        r"rho=.*Received: -0\.1",
    ),
    "asynchronous": (
        lambda: hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, moving_rate=1.5, asynchronous=True, **LOCAL),
        ValueError,
        r"must be in \(0, 1\] in asynchronous exchange. Received: moving_rate=1.5",
    ),
    "asynchronous outer optimizer": (
        lambda: hvdp.PeriodicOptimizer(
            sgd(LINEAR), LINEAR, hvdp.DiLoCo(), 2, outer_optimizer=torch.optim.SGD, asynchronous=True, **LOCAL
        ),
        ValueError,
        "`outer_optimizer` is for synchronous exchange: with asynchronous=True the momentum of DiLoCo waits",
    ),
    "op": (lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, op="mean", **LOCAL), ValueError, "Received: op='mean'"),
    "center": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, center="ps", **LOCAL),
        ValueError,
        "Received: center='ps'",
    ),
    "buffers": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, buffers="sum", **LOCAL),
        ValueError,
        "Received: buffers='sum'",
    ),
    "buffers of pairs": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), NAMED, buffers="average", **LOCAL),
        ValueError,
        "pass `model`, or",
    ),
    "root": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, root_rank=1, **LOCAL),
        ValueError,
        "root_rank.*Received: 1",
    ),
    "no optimizer": (lambda: hvdp.AGNOptimizer(LINEAR, LINEAR, **LOCAL), TypeError, "Received: Linear"),
    "LBFGS on the center": (
        lambda: hvdp.AGNOptimizer(torch.optim.LBFGS(LINEAR.parameters()), LINEAR, **LOCAL),
        TypeError,
        "LBFGS requires a closure, but the center has no loss",
    ),
    "unknown argument": (lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, interval=3, **LOCAL), TypeError, "'interval'"),
    "no model to export": (lambda: hvdp.center_state_dict(LINEAR, sgd(LINEAR)), TypeError, "Received: Linear, SGD"),
    "another model to export": (
        lambda: hvdp.center_state_dict(torch.nn.Linear(2, 2), hvdp.ModelAverageOptimizer(sgd(LINEAR), LINEAR, **LOCAL)),
        ValueError,
        "holds none of the parameters",
    ),
    "no parameters": (lambda: hvdp.AGNOptimizer(sgd([W]), [], **LOCAL), ValueError, "1 of 1 parameters without one"),
    "nothing trainable": (
        lambda: hvdp.ModelAverageOptimizer(sgd([torch.zeros(2)]), [], **LOCAL),
        ValueError,
        "`model` must name every parameter",
    ),
    "all frozen": (lambda: frozen(), ValueError, "at least one trainable parameter"),
    "duplicate names": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), [("w", p) for p in LINEAR.parameters()], **LOCAL),
        ValueError,
        "unique names.*'w'",
    ),
    "missing names": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), NAMED[:1], **LOCAL),
        ValueError,
        "1 of 2 parameters without one",
    ),
    "no names": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR.parameters(), **LOCAL),
        TypeError,
        r"\(name, tensor\) pairs",
    ),
    "None": (lambda: hvdp.AGNOptimizer(sgd(LINEAR), None, **LOCAL), TypeError, "Received: NoneType"),
    "meta": (lambda: meta(), ValueError, "meta device"),
    "lazy": (lambda: lazy(), ValueError, "one forward pass"),
    "complex": (lambda: complex_parameter(), TypeError, r"'w' must be float64.*Received: torch.complex32"),
    "center optimizer": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, outer_optimizer="adam", **LOCAL),
        TypeError,
        "outer_optimizer.*Received: str",
    ),
    "center optimizer of others": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, outer_optimizer=sgd([W]), **LOCAL),
        ValueError,
        "It lacks 2",
    ),
    "center optimizer that holds the model": (
        lambda: hvdp.AGNOptimizer(sgd(LINEAR), LINEAR, outer_optimizer=lambda groups: sgd(LINEAR), **LOCAL),
        ValueError,
        "It lacks 2 of 2 and has 2 others",
    ),
    "expanded buffer": (lambda: expanded(), ValueError, r"'mask' is an expanded tensor.*clone"),
    "no center optimizer": (
        lambda: hvdp.Synchronizer(LINEAR, hvdp.AGN(), 2, **LOCAL),
        ValueError,
        "pass `outer_optimizer`",
    ),
}


def expanded() -> Any:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1).expand(4))
    return hvdp.ModelAverageOptimizer(sgd(model), model, **LOCAL)


def frozen() -> Any:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    return hvdp.ModelAverageOptimizer(sgd(model), model, **LOCAL)


def meta() -> Any:
    model = torch.nn.Linear(2, 2, device="meta")
    return hvdp.ModelAverageOptimizer(sgd(model), model, **LOCAL)


def lazy() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))
    return hvdp.ModelAverageOptimizer(sgd(model[0]), model, **LOCAL)


def complex_parameter() -> Any:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    return hvdp.ModelAverageOptimizer(sgd([parameter]), [("w", parameter)], **LOCAL)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_construction(case: str) -> None:
    construct, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        construct()


def test_horovod_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"hvd\.init\(\)"):
        hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR)


def test_rate_past_one_warns() -> None:
    with pytest.warns(UserWarning, match="overshoot"):
        hvdp.ElasticAverageOptimizer(sgd(LINEAR), LINEAR, moving_rate=0.75, **LOCAL)


def errors(work: Callable[[ThreadCommunicator], Any], size: int = 2) -> list[str]:
    """Return the error of every rank, as text; empty where there was none."""

    def guarded(communicator: ThreadCommunicator) -> str:
        try:
            work(communicator)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run(size, guarded, timeout_seconds=60)


def test_a_bad_argument_on_one_rank_is_an_error_on_all() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        model = torch.nn.Linear(1, 1)
        rate = 1.5 if communicator.rank == 1 else 0.1
        hvdp.ElasticAverageOptimizer(sgd(model), model, moving_rate=rate, process_set=communicator)

    first, second = errors(work)
    assert "Rank 1 failed" in first
    assert "Received: moving_rate=1.5" in first
    assert second.startswith("ValueError")


def agn(communicator: ThreadCommunicator, rate: float) -> Any:
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    return hvdp.AGNOptimizer(inner, model, 2, process_set=communicator)


def take_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_hyperparameters_of_the_center_that_differ_are_errors() -> None:
    """At construction, and when a rank decides otherwise later."""
    for error in errors(lambda c: agn(c, 0.1 * (1 + c.rank))):
        assert "differ in lr of group 0 of the center optimizer: 0.1 on rank 0; 0.2 on rank 1" in error

    def work(communicator: ThreadCommunicator) -> None:
        optimizer = agn(communicator, 0.1)
        for step in range(4):
            if step == 3 and communicator.rank == 1:
                optimizer.param_groups[0]["momentum"] = 0.01
            take_step(optimizer)
        raise AssertionError("the exchange at step 4 was accepted")

    for error in errors(work):
        assert "differ in momentum of group 0 of the center optimizer: 0.5 on rank 0; 0.01 on rank 1" in error


def test_a_learning_rate_that_differs_is_that_of_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: ThreadCommunicator, rate: float, later: float) -> list[list[float]]:
        optimizer = agn(communicator, 0.1)
        for step in range(4):
            if step == 3:
                optimizer.param_groups[0]["lr"] = rate if communicator.rank == 0 else later
            take_step(optimizer)
        return [center.tolist() for center in optimizer.synchronizer.center_tensors()]

    different = run(2, lambda c: work(c, 0.01, 0.2), timeout_seconds=60)
    assert different[0] == different[1]
    assert "differ at local step 4: the optimizer of the center takes that of rank 0" in caplog.text
    assert run(2, lambda c: work(c, 0.01, 0.01), timeout_seconds=60) == different


def test_no_optimizer_on_one_rank_is_an_error_on_all() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        model = torch.nn.Linear(1, 1)
        hvdp.AGNOptimizer("sgd" if communicator.rank else sgd(model), model, process_set=communicator)

    first, second = errors(work)
    assert "Rank 1 failed" in first
    assert "Received: str" in second


def test_a_schedule_that_fails_later_on_one_rank_is_an_error_on_all() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        def schedule(clock: hvdp.Clock) -> int:
            if communicator.rank == 1 and failing:
                raise KeyError(clock.step)
            return 2

        failing = False
        model = torch.nn.Linear(1, 1)
        optimizer = hvdp.ModelAverageOptimizer(sgd(model), model, schedule, process_set=communicator)
        failing = True
        for _ in range(2):
            optimizer.step()

    first, second = errors(work)
    for error in (first, second):
        assert "The schedule failed: KeyError" in error


def test_an_exchange_that_failed_on_one_rank_is_an_error_on_all_at_the_next() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no step")

    Failing.__name__ = "SGD"  # Otherwise ranks find out at construction.

    def work(communicator: ThreadCommunicator) -> None:
        model = torch.nn.Linear(1, 1)
        make = Failing if communicator.rank == 1 else torch.optim.SGD
        optimizer = hvdp.AGNOptimizer(
            sgd(model), model, 2, outer_optimizer=lambda groups: make(groups, lr=0.1), process_set=communicator
        )
        for _ in range(2):
            optimizer.step() if communicator.rank == 0 else _tolerate(optimizer.step)
        for _ in range(2):
            optimizer.step()

    for error in errors(work):
        assert "The exchange at step 2 failed: no step" in error


def _tolerate(step: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):
        step()


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "parameter added to the optimizer": (
        lambda model, optimizer: optimizer.inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}),
        "Parameters of the optimizer were added",
    ),
    "parameter added to the model": (
        lambda model, optimizer: model.register_parameter("new", torch.nn.Parameter(torch.zeros(1))),
        "'new' was added",
    ),
    "dtype": (lambda model, optimizer: model[0].double(), r"'0.weight' was float32\[2, 2\] on cpu"),
    "unfrozen": (lambda model, optimizer: model[1].weight.requires_grad_(True), "'1.weight' was frozen"),
    "frozen": (lambda model, optimizer: model[0].bias.requires_grad_(False), "'0.bias' was trainable .* and is frozen"),
    "buffer replaced": (
        lambda model, optimizer: setattr(model[2], "running_mean", torch.zeros(2)),
        "'2.running_mean' was added to the model, removed or replaced",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_on_one_rank_are_noticed_on_all_at_the_next_exchange(case: str) -> None:
    change, message = CHANGES[case]

    def work(communicator: ThreadCommunicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model[1].requires_grad_(False)
        optimizer = hvdp.ModelAverageOptimizer(sgd(model), model, 2, process_set=communicator)
        optimizer.step()
        if communicator.rank == 1:
            change(model, optimizer)
        optimizer.step()

    first, second = errors(work)
    assert "Rank 1 failed" in first
    for error in (first, second):
        assert re.search(message, error)
