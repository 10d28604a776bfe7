"""Weights that training code assigns itself are named: parameters without gradients, and what no exchange touches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvd_periodic.numpy as numpy_front_end
from hvd_periodic import Communicator, LocalCommunicator
from tests.helpers import run_ranks

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402

TAKE_PART = "take part in exchanges, have never had a gradient, and were changed by other code than local steps: "
OWN = "Inside center(), these weights still have this rank's values: "

pytestmark = pytest.mark.timeout(60)


class Averaged(torch.nn.Module):
    """A network, and a copy of it that training code moves; a head that the loss does not use; a queue; statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.ema = torch.nn.Linear(3, 2)
        self.head = torch.nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(100, 2))


def average(inner: Any, model: Any, **options: Any) -> Any:
    return hvdp.ModelAverageOptimizer(inner, model, 2, **options)


def easgd(inner: Any, model: Any, **options: Any) -> Any:
    return hvdp.ElasticAverageOptimizer(inner, model, 2, 0.25, **options)


def bmuf(inner: Any, model: Any, **options: Any) -> Any:
    return hvdp.PeriodicOptimizer(inner, model, hvdp.BMUF(nesterov=True), 2, **options)


def agn(inner: Any, model: Any, **options: Any) -> Any:
    return hvdp.AGNOptimizer(inner, model, 2, **options)


def diloco(inner: Any, model: Any, **options: Any) -> Any:
    return hvdp.PeriodicOptimizer(inner, model, hvdp.DiLoCo(), 2, **options)


def trained(make: Any, steps: int = 4, assign: bool = True, model: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = model or Averaged()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = make(inner, model, process_set=LocalCommunicator(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model.network(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        if assign:
            with torch.no_grad():
                model.ema.weight.lerp_(model.network[0].weight, 0.5)
    return model, optimizer


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("make", [average, agn, diloco])
def test_parameters_without_gradients_that_are_assigned(
    make: Any, center: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in the exchange after the first assignment; not the head, which nothing but weight decay changes."""
    trained(make, center=center)
    assert caplog.text.count(TAKE_PART) == 1
    assert f"{TAKE_PART}'ema.weight'. " in caplog.text
    assert "Set requires_grad = False on them before the optimizer is made" in caplog.text


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("make", [easgd, average, agn, bmuf])
def test_parameters_that_other_ranks_train(make: Any, center: str, caplog: pytest.LogCaptureFixture) -> None:
    """Exchanges alone change them on this rank, by a pull to the center or by the whole way."""

    def work(communicator: Communicator) -> None:
        shared, *heads = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        inner = torch.optim.AdamW([shared, *heads], lr=0.1, weight_decay=0.5)
        named = [("shared", shared), ("0", heads[0]), ("1", heads[1])]
        optimizer = make(inner, named, process_set=communicator, center=center)
        for _ in range(6):
            optimizer.zero_grad()
            (shared.square().sum() + heads[communicator.rank].square().sum()).backward()
            optimizer.step()

    run_ranks(2, work)
    assert TAKE_PART not in caplog.text


@pytest.mark.parametrize("options", [{"fragments": 2}, {"overlap": 1}], ids=str)
def test_in_every_mode(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    trained(average, steps=6, **options)
    assert f"{TAKE_PART}'ema.weight'. " in caplog.text


@pytest.mark.parametrize("make", [average, agn, diloco])
def test_parameters_without_gradients_that_nothing_assigns(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained(make, steps=6, assign=False)
    assert TAKE_PART not in caplog.text


def test_loops_that_show_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """Local steps that compute gradients elsewhere are not taken for assignments."""
    model = torch.nn.Linear(2, 1)
    synchronizer = hvdp.Synchronizer(model, hvdp.Averaging(), 2, process_set=LocalCommunicator())
    for _ in range(4):
        with torch.no_grad():
            model.weight.add_(1.0)
        synchronizer.step()
    assert TAKE_PART not in caplog.text


def test_weights_that_no_exchange_touches(caplog: pytest.LogCaptureFixture) -> None:
    """A frozen copy and a queue, where the center is read for the first time; once."""
    model = Averaged()
    model.ema.requires_grad_(False)
    model, optimizer = trained(average, model=model)
    with optimizer.center():
        pass
    assert f"{OWN}'ema.weight'. No exchange touches them" in caplog.text
    caplog.clear()
    model.queue += 1
    with optimizer.center():
        pass
    assert OWN not in caplog.text


@pytest.mark.parametrize(("buffers", "named"), [(None, True), ({"queue": "local"}, False), ("local", False)])
def test_buffers_that_are_local(buffers: Any, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Named, unless somebody has asked for that."""
    model, optimizer = trained(average, assign=False, buffers=buffers)
    with optimizer.center():
        pass
    assert OWN not in caplog.text
    model.queue[:50] = 1.0
    with optimizer.center():
        pass
    assert (f"{OWN}'queue'. " in caplog.text) == named


def test_arrays_without_gradients_that_are_assigned(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"w": np.ones(2), "ema": np.zeros(2), "unused": np.ones(2)}
    optimizer = numpy_front_end.ModelAverageOptimizer(numpy_front_end.SGD(0.1), arrays, 2)
    for _ in range(4):
        optimizer.step({"w": arrays["w"]})
        arrays["ema"] += arrays["w"]
    assert f"{TAKE_PART}'ema'. " in caplog.text
