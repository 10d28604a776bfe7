"""Parameters of PyTorch models that take part by pattern: as on numpy, see ``test_participation.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from tests.covering import covering  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
}
POLICIES = {"expert.*": "local", "router.*": "broadcast"}
STEPS, PERIOD, ROOT = 7, 2, 1
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
    "reset": {"optimizer_state": "reset"},
    "skip": {"nonfinite": "skip"},
}


def part(*values: float) -> Any:
    """Return a module with one parameter."""
    module = torch.nn.Module()
    module.x = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    return module


def everything(rank: int) -> Any:
    model = torch.nn.Module()
    model.body = part(1.0, -2.0, 0.5)
    model.expert = torch.nn.ModuleDict({f"of {rank}": part(*[1.0] * (rank + 1))})
    model.router = part(0.25, 4.0)
    return model


def body_alone(rank: int) -> Any:
    model = torch.nn.Module()
    model.body = part(1.0, -2.0, 0.5)
    return model


def made(model: Any, communicator: Any, algorithm: str, **options: Any) -> Any:
    local = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    return hvdp.PeriodicOptimizer(
        local, model, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, root_rank=ROOT, **options
    )


def trained(model: Any, optimizer: Any, rank: int, steps: int = STEPS) -> dict[str, list[Any]]:
    """Return the values of each parameter after each step, and those of the center at the end."""
    seen: dict[str, list[Any]] = {name: [] for name, _ in model.named_parameters()}

    def look() -> None:
        for name, x in model.named_parameters():
            seen[name].append(x.tolist())

    for _ in range(steps):
        for x in model.parameters():
            x.grad = (0.5 + 0.25 * rank) * (x.detach() - (1.5 - rank))
        optimizer.step()
        look()
    with optimizer.center():
        look()
    return seen


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_the_rest_is_exchanged_as_if_it_were_alone(algorithm: str, way: str) -> None:
    def by_pattern(communicator: ThreadCommunicator) -> Any:
        model, rank = everything(communicator.rank), communicator.rank
        return trained(model, made(model, communicator, algorithm, parameters=POLICIES, **WAYS[way]), rank)

    def alone(communicator: ThreadCommunicator) -> Any:
        model = body_alone(communicator.rank)
        return trained(model, made(model, communicator, algorithm, **WAYS[way]), communicator.rank)

    results = run(2, by_pattern)
    for rank, (found, expected) in enumerate(zip(results, run(2, alone), strict=True)):
        assert found["body.x"] == expected["body.x"]
        model = part(*[1.0] * (rank + 1))
        own = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        descended = trained(model, _Plain(own), rank)["x"]
        assert found[f"expert.of {rank}.x"] == descended
        for step in range(PERIOD - 1, STEPS, PERIOD):
            assert found["router.x"][step] == results[ROOT]["router.x"][step]
        assert found["router.x"][-1] == results[ROOT]["router.x"][STEPS - 2]
        assert found["router.x"][0] != results[1 - rank]["router.x"][0]


class _Plain:
    """An optimizer alone, whose center is the model."""

    def __init__(self, optimizer: Any) -> None:
        self.step = optimizer.step

    def center(self) -> Any:
        return torch.no_grad()


def test_a_frozen_parameter_may_be_local() -> None:
    """It is not started from the root's then; others are."""

    def work(communicator: ThreadCommunicator) -> list[float]:
        model = everything(communicator.rank)
        model.adapter, model.frozen = part(float(communicator.rank)), part(float(communicator.rank))
        for module in (model.adapter, model.frozen):
            module.x.requires_grad_(False)
        made(model, communicator, "average", parameters=POLICIES | {"adapter.*": "local"}).synchronizer.begin()
        return [model.adapter.x.item(), model.frozen.x.item()]

    assert run(2, work) == [[0.0, 1.0], [1.0, 1.0]]


def test_a_local_parameter_may_be_replaced() -> None:
    """As long as the optimizer does not hold it."""

    def work(communicator: ThreadCommunicator) -> int:
        model = everything(communicator.rank)
        local = torch.optim.SGD(model.body.parameters(), 0.1)
        optimizer = hvdp.PeriodicOptimizer(
            local, model, hvdp.Averaging(), 2, process_set=communicator, parameters={"expert.*": "local"}
        )
        model.expert[f"of {communicator.rank}"].x = torch.nn.Parameter(torch.zeros(4))
        for _ in range(2):
            model.body.x.grad = torch.ones_like(model.body.x)
            optimizer.step()
        return optimizer.synchronizer.rounds

    assert run(2, work) == [1, 1]


def test_copies_of_the_optimizer_and_the_exported_center() -> None:
    def work(communicator: ThreadCommunicator) -> Any:
        rank, model = communicator.rank, everything(communicator.rank)
        optimizer = made(model, communicator, "diloco", parameters=POLICIES)
        trained(model, optimizer, rank, 3)
        exported = hvdp.center_state_dict(model, optimizer)
        assert exported[f"expert.of {rank}.x"].tolist() == model.expert[f"of {rank}"].x.tolist()
        return exported["router.x"].tolist(), exported["body.x"].tolist()

    first, second = run(2, work)
    assert first == second


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    def save(communicator: ThreadCommunicator) -> Any:
        rank, model = communicator.rank, everything(communicator.rank)
        optimizer = made(model, communicator, "diloco", parameters=POLICIES)
        trained(model, optimizer, rank, 3)
        hvdp.save(tmp_path, model, optimizer)
        return trained(model, optimizer, rank, 4)

    def resume(communicator: ThreadCommunicator) -> Any:
        rank, model = communicator.rank, everything(communicator.rank)
        optimizer = made(model, communicator, "diloco", parameters=POLICIES)
        hvdp.load(tmp_path, model, optimizer)
        return trained(model, optimizer, rank, 4)

    assert run(2, save) == run(2, resume)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_checkpoint_resumes_on_other_ranks(explicit: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that were there keep their own parameters, with their momentum; new ones have those of their models.

    Also where a parameter has two names in the saved model.
    """

    def model_of(communicator: ThreadCommunicator) -> tuple[Any, Any, Any]:
        model = torch.nn.ParameterDict({"x": torch.zeros(2), "own": torch.full((2,), 1.0 + communicator.rank)})
        model["tied"] = model["own"]
        local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"own": "local"}}
        if explicit:
            return model, hvdp.Synchronizer(model, hvdp.DiLoCo(), 2, optimizer=local, **options), local
        return model, hvdp.PeriodicOptimizer(local, model, hvdp.DiLoCo(), 2, **options), local

    def train(model: Any, optimizer: Any, local: Any, steps: int) -> list[float]:
        for _ in range(steps):
            for parameter in model.values():
                parameter.grad = parameter.detach() - 3.0
            if explicit:
                optimizer.prepare_gradients()
                local.step()
            optimizer.step()
        return model["own"].tolist()  # type: ignore[no-any-return]

    def save(communicator: ThreadCommunicator) -> None:
        model, optimizer, local = model_of(communicator)
        train(model, optimizer, local, 3)
        hvdp.save(tmp_path, model, optimizer, **({"local": local} if explicit else {}))

    def resume(communicator: ThreadCommunicator) -> list[float]:
        model, optimizer, local = model_of(communicator)
        hvdp.load(tmp_path, model, optimizer, **({"local": local} if explicit else {}))
        return train(model, optimizer, local, 2)

    def own(rank: int, steps: int) -> list[float]:
        x = torch.nn.Parameter(torch.full((2,), 1.0 + rank))
        local = torch.optim.SGD([x], lr=0.1, momentum=0.5)
        for _ in range(steps):
            x.grad = x.detach() - 3.0
            local.step()
        return x.tolist()  # type: ignore[no-any-return]

    run(2, save)
    assert run(3, resume) == [own(0, 5), own(1, 5), own(2, 2)]
    assert caplog.text.count("has written no file of") == 1
    assert "Rank 2 has written no file of" in caplog.text
    assert run(1, resume) == [own(0, 5)]
