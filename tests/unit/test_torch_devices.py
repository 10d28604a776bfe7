"""Local steps leave tensors where they are: on the meta device, whatever reads a value on the host raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.torch import replica  # noqa: E402

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, p: hvdp.ElasticAverageOptimizer(o, m, p, 0.2, rho=0.5, **alone()),
    "average": lambda o, m, p: hvdp.ModelAverageOptimizer(o, m, p, **alone()),
    "agn": lambda o, m, p: hvdp.AGNOptimizer(o, m, p, **alone()),
}


def alone() -> dict[str, Any]:
    """Return options of one rank; whether values are finite is known on the host."""
    return {"process_set": LocalCommunicator(), "nonfinite": "ignore"}


def meta_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model without values, which the optimizers would otherwise refuse."""
    monkeypatch.setattr(replica, "_accumulation_dtype", lambda name, tensor: torch.float32)
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def begun(optimizer: Any) -> Any:
    """Return the optimizer after its start, the only time that parameters are read on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer.synchronizer.replica, "to_bytes", lambda value: b"")
        optimizer.synchronizer.begin()
    return optimizer


def take_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, device="meta")).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_local_steps_read_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model(monkeypatch)
    optimizer = begun(ALGORITHMS[name](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, 100))
    for _ in range(3):
        take_step(model, optimizer)
    assert optimizer.synchronizer.local_steps == 3
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model[0].weight.sum().item()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_exchanges_hand_over_buffers_where_the_parameters_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The integer buffers' maxima live with the model too."""
    model = meta_model(monkeypatch)
    optimizer = begun(ALGORITHMS[name](torch.optim.SGD(model.parameters(), lr=0.1), model, 2))
    devices: dict[str, str] = {}
    communicator = optimizer.synchronizer.membership.communicator
    allreduce = communicator.allreduce

    def watched(buffer: Any, label: str, op: str = "sum") -> Any:
        devices[label.split(".", 1)[-1]] = buffer.device.type
        return allreduce(buffer, label, op)

    monkeypatch.setattr(communicator, "allreduce", watched)
    take_step(model, optimizer)
    take_step(model, optimizer)
    assert optimizer.synchronizer.rounds == 1
    assert set(devices.values()) == {"meta"}
