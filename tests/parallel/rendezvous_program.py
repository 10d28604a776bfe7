"""A worker of an elastic job over torch.distributed; see ``test_rendezvous.py`` and ``rendezvous_events.py``.

HVD_PERIODIC_RENDEZVOUS=... python -m tests.parallel.rendezvous_program SCENARIO FOLDER NUMBER

Every worker descends on quadratics of its rank, or trains digits. Whoever begins a stretch of training says so in
``FOLDER/begun``, and at the end everybody writes what it has.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvd_periodic.torch as hvdp
from tests.parallel.elastic_events import FOLDER, begin, end
from tests.parallel.elastic_scenarios import INNER_PERIOD, PERIOD, SIZE, policies_of, target
from tests.parallel.elastic_torch_model import Further
from tests.parallel.rendezvous_saves import Saves
from tests.parallel.rendezvous_scenarios import (
    DOWN,
    EVENTS,
    OWN_TARGET,
    SAVES,
    SCENARIOS,
    THOROUGH,
    UNDISTURBED,
    Scenario,
    read_file,
    replace_file,
)
from tests.parallel.rendezvous_worker import CountsNewStarts, UserError, arrive, happen, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


class State(CountsNewStarts, hvdp.elastic.State):
    """The state of a worker."""


def goes_on(scenario: Scenario, step: int, worker: int) -> bool:
    """Return whether another step of a worker comes; where others say so, wait until it may come."""
    if scenario.what != "events":
        return step < scenario.steps
    if worker == 0 and step % PERIOD == 0:
        replace_file(FOLDER / "progress", step)
    while True:
        fence, last = read_file(FOLDER / "fence")
        if step < fence:
            time.sleep(0.04 * (1 + worker % 2))
            return True
        if last:
            return False
        time.sleep(0.02)


class Quadratics(torch.nn.Module):
    """Each rank and each step has another one; ``own`` is the worker's and begins with its number."""

    def __init__(self, number: int, policies: dict[str, str]) -> None:
        super().__init__()
        self.x, self.y = (torch.nn.Parameter(torch.zeros(SIZE // 2, dtype=torch.float64)) for _ in range(2))
        self.own = torch.nn.Parameter(torch.tensor([number], dtype=torch.float64))
        self.further = Further(self, policies)

    def descend(self, step: int) -> None:
        """Set the gradients of a step."""
        to = torch.tensor(target(dist.get_rank(), step), dtype=torch.float64).split(SIZE // 2)
        for parameter, point in zip((self.x, self.y), to, strict=True):
            parameter.grad = parameter.detach() - point if parameter.requires_grad else None
        self.own.grad = self.own.detach() - OWN_TARGET
        self.further.descend(dist.get_rank(), step)


class Digits(torch.nn.Module):
    """The network of the examples; each rank and each step has other images."""

    def __init__(self) -> None:
        super().__init__()
        sys.path.insert(0, str(EXAMPLES))
        import digits_torch

        torch.manual_seed(0)
        self.network = digits_torch.build_model()
        self.further = Further(self, {})
        self._training, self._test = (data.tensors for data in digits_torch.data())

    def descend(self, step: int) -> None:
        """Set the gradients of a step."""
        images, labels = self._training
        among = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = torch.randint(len(labels), (32,), generator=among)
        self.zero_grad()
        torch.nn.functional.cross_entropy(self.network(images[batch]), labels[batch]).backward()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the fraction of other images that it recognizes."""
        images, labels = self._test
        self.eval()
        return float((self.network(images).argmax(dim=1) == labels).float().mean())


def forgets_sums(optimizer: hvdp.PeriodicOptimizer) -> bool:
    """Return whether this rank has nothing left of what 8 bits have not sent of the sums that it forms."""
    kept = optimizer.synchronizer.tensor_groups.parameters.error_feedback.second_hop_residual
    return kept is None or not any(tensor.any() for tensor in kept.tensors())


def center_of(model: torch.nn.Module, optimizer: hvdp.PeriodicOptimizer) -> list[float]:
    """Return the center of what is exchanged; collective, and completes an exchange in flight."""
    with optimizer.center():
        return values(model)


def optimizer_of(scenario: Scenario, model: Any, policies: dict[str, Any]) -> hvdp.PeriodicOptimizer:
    """Return the optimizer of a model."""
    local = model.further.optimizer(scenario.algorithm)
    algorithms = {"easgd": hvdp.EASGD, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}
    inner: Any = local
    if scenario.inner:
        inner = hvdp.PeriodicOptimizer(local, model, algorithms[scenario.inner](), INNER_PERIOD, parameters=policies)
    return hvdp.PeriodicOptimizer(
        inner,
        model,
        algorithms[scenario.algorithm](),
        PERIOD,
        center=scenario.center,
        overlap=scenario.overlap,
        fragments=scenario.fragments,
        compression=hvdp.Compression.int8 if scenario.int8 else hvdp.Compression.none,
        timeout_seconds=scenario.timeout,
        parameters=policies,
    )


def main(scenario: Scenario, number: int) -> None:
    """Train."""
    policies = {} if scenario.digits else {"own": "local", **policies_of(scenario)}
    model = Digits() if scenario.digits else Quadratics(number, policies)
    if isinstance(model, Quadratics):
        model.y.requires_grad = not scenario.thaws
    optimizer = optimizer_of(scenario, model, policies)
    state = State(model, optimizer, commit="exchange", batch=0, thawed=not scenario.thaws)
    saves = Saves(scenario, model, optimizer)

    arrive(scenario, number)

    @hvdp.elastic.run
    def train(state: Any) -> str:
        steps, number = optimizer.synchronizer.local_steps, state.job._state.view.round
        had = {"forgotten": state.forgotten, "forgets_sums": forgets_sums(optimizer)}
        if scenario.what == "events" and not scenario.digits:
            had |= {"x": values(model), "center": None if scenario.overlap else center_of(model, optimizer)}
        begin(dist.get_rank(), dist.get_world_size(), steps, round=number, **had)
        saves.hear()
        while goes_on(scenario, state.batch, dist.get_rank()):
            step = state.batch
            if scenario.what != "events":
                saves.begin(step)
                happen(scenario, step, state)
            if step == scenario.thaws and not state.thawed:
                model.y.requires_grad = state.thawed = True
                optimizer.adopt()
            model.descend(step)
            state.batch += 1
            optimizer.step()
        optimizer.finalize()
        return "done"

    try:
        assert train(state) == "done"
    except UserError:
        wait_for("wait.0")
        return
    assert "horovod" not in sys.modules
    replica = values(model)
    with optimizer.center():
        center = values(model)
        more = {"accuracy": model.accuracy()} if isinstance(model, Digits) else model.further.values("_center")
    more |= {"heard": saves.heard}
    if isinstance(model, Quadratics):
        more |= {"own": model.own.item(), "number": number, **model.further.values()}
    end(dist.get_rank(), x=replica, center=center, steps=optimizer.synchronizer.local_steps, batch=state.batch, **more)


def values(model: torch.nn.Module) -> list[float]:
    """Return all parameters that are exchanged."""
    exchanged = [each for name, each in model.named_parameters() if name in "xy" or "." in name]
    found: list[float] = torch.cat([each.detach().reshape(-1) for each in exchanged]).tolist()
    return found


if __name__ == "__main__":
    main((SCENARIOS | THOROUGH | DOWN | SAVES | EVENTS | UNDISTURBED)[sys.argv[1]], int(sys.argv[3]))
