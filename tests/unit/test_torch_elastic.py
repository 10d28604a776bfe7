"""What cannot be kept while ranks come and go."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402


def optimizer(model: Any, inner: Any = None, **options: Any) -> Any:
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.1)
    return hvdp.PeriodicOptimizer(inner, model, hvdp.EASGD, 2, process_set=LocalCommunicator(), **options)


def test_optimizers_whose_ranks_cannot_change() -> None:
    message = "exchanges over one process, whose ranks cannot change"
    model = torch.nn.Linear(2, 1)
    made = optimizer(model)
    with pytest.raises(ValueError, match=f"`optimizer` .*{message}"):
        hvdp.elastic.State(model, made)
    with pytest.raises(ValueError, match=f"`other` .*{message}"):
        hvdp.elastic.State(model, torch.optim.SGD(model.parameters(), lr=0.1), other=made)


def test_when_to_commit() -> None:
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`commit` must be 'call' or 'exchange'\. Received: 'sometimes'"):
        hvdp.elastic.State(model, plain, commit="sometimes")
    with pytest.raises(ValueError, match=r"commit='exchange' needs an optimizer of hvd_periodic\.torch"):
        hvdp.elastic.State(model, plain, commit="exchange")


def test_everything_with_a_state_is_kept() -> None:
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    state = hvdp.elastic.State(model, plain, scheduler=scheduler, epoch=3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    state.save()
    with torch.no_grad():
        model.weight.fill_(2.0)
    plain.step()
    scheduler.step()
    state.epoch = 4
    assert plain.param_groups[0]["lr"] == 0.05
    state.reset()
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert (plain.param_groups[0]["lr"], scheduler.last_epoch, state.epoch) == (0.1, 0, 3)


def test_a_model_may_be_replaced() -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    state = hvdp.elastic.State(first)
    state.model = second
    state.save()
    kept = second.weight.tolist()
    with torch.no_grad():
        second.weight.zero_()
    state.reset()
    assert (state.model, second.weight.tolist()) == (second, kept)


def test_an_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rigid'"):
        hvdp.rigid  # noqa: B018
