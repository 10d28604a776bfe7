"""What people do around the exchanges of a PyTorch script, out of habit; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.habits_scenarios FOLDER
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import hvd_periodic.torch as hvdp
from tests.parallel.program import NotApplicableError, Scenarios, attempt, crossed
from tests.parallel.scenarios import bits

scenario = Scenarios()

MADE: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 2, **k),
}
PLACES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "asynchronous": {"asynchronous": True, "root_rank": 0},
}


def cases() -> list[tuple[str, str]]:
    """Return algorithms and places that go together, on this launcher."""
    places = [place for place in PLACES if place != "asynchronous" or hvd.mpi_enabled()]
    return [case for case in crossed(list(MADE), places) if case != ("average", "asynchronous")]


def network() -> torch.nn.Module:
    """Return a model that differs between ranks."""
    torch.manual_seed(17 + hvd.rank())
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def local(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


def batches(count: int, first: int = 0) -> list[torch.Tensor]:
    """Return data that differ between ranks and steps."""
    return [
        torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * s + hvd.rank())) for s in range(first, count)
    ]


def train(model: torch.nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    for inputs in data:
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()


def values(model: torch.nn.Module) -> str:
    return bits(list(model.parameters()))


def broadcasts(model: torch.nn.Module, optimizer: Any) -> None:
    """The lines of every Horovod script."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@scenario
def weights_loaded_after_construction() -> Any:
    """All weights 5 on the root, loaded after construction, with and without the broadcasts: largest distance from 5
    of replica and center after an exchange, steps, updates; and the same with a loop of one's own.
    """
    results = {}
    ways = [(True, True), (True, False), (False, True), (False, False)]
    for (name, place), (lines, wrapped) in crossed(cases(), ways):
        model = network()
        inner = local(model)
        if wrapped:
            optimizer = MADE[name](inner, model, **PLACES[place])
            synchronizer = optimizer.synchronizer
        else:
            made = {"easgd": hvdp.EASGD(0.25), "average": hvdp.Averaging(), "agn": hvdp.AGN()}[name]
            synchronizer = hvdp.Synchronizer(model, made, 2, optimizer=inner, **PLACES[place])
        if hvd.rank() == 0:
            model.load_state_dict({k: torch.full_like(v, 5) for k, v in model.state_dict().items()})
        if lines:
            broadcasts(model, optimizer if wrapped else inner)
        for inputs in batches(2):
            inner.zero_grad()
            (1e-3 * model(inputs)).square().mean().backward()
            if wrapped:
                optimizer.step()
            else:
                if name == "agn":
                    synchronizer.prepare_gradients()
                inner.step()
                synchronizer.step()
        synchronizer.finalize()
        far = [max((p.detach() - 5).abs().max().item() for p in model.parameters())]
        with synchronizer.center():
            far.append(max((p.detach() - 5).abs().max().item() for p in model.parameters()))
        counters = synchronizer.counters
        results[f"{name} {place} {lines} {wrapped}"] = [
            max(far),
            counters.local_steps,
            counters.skipped_updates,
        ]
    return results


@scenario
def frozen_weights_loaded_after_construction() -> Any:
    """A backbone that is not trained, loaded on the root alone with its statistics: what every rank has of it."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = MADE["average"](torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01), model)
    if hvd.rank() == 0:
        model[0].load_state_dict({key: torch.full_like(value, 5) for key, value in model[0].state_dict().items()})
        model[1].running_mean.fill_(15.0)
    train(model, optimizer, batches(2))
    return [float(model[0].weight.min()), float(model[1].running_mean.min()) > 5]


@scenario
def resumed_on_the_root() -> Any:
    """A checkpoint of the root, loaded there alone: with and without the broadcasts, all go on from it.

    What is reported, after one more step: replica, center, local steps and skipped updates; also for a job in which
    every rank has loaded that file.
    """
    results = {}
    for name, place in cases():
        model = network()
        optimizer = MADE[name](local(model), model, **PLACES[place])
        train(model, optimizer, batches(3))
        if place == "asynchronous":
            optimizer.synchronizer.finalize()
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        state = hvd.broadcast_object(state, 0)
        seen = {}
        for case in ("everywhere", "broadcasts", "alone"):
            model = network()
            optimizer = MADE[name](local(model), model, **PLACES[place])
            if hvd.rank() == 0 or case == "everywhere":
                model.load_state_dict(copy.deepcopy(state["model"]))
                optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            if case == "broadcasts":
                broadcasts(model, optimizer)
            counters = optimizer.synchronizer.counters
            train(model, optimizer, batches(4, first=3))
            skipped = optimizer.synchronizer.counters.skipped_updates - counters.skipped_updates
            after = optimizer.synchronizer.local_steps
            replica = values(model)
            with optimizer.center():
                center = values(model)
            seen[case] = [replica, center, after, skipped]
            optimizer.synchronizer.finalize()
        results[f"{name} {place}"] = seen
    return results


@scenario
def states_that_do_not_belong_together() -> Any:
    """The error of every rank."""
    last, results = hvd.rank() == hvd.size() - 1, {}
    for place in ("replicated", "sharded", *(["asynchronous"] if hvd.mpi_enabled() else [])):

        def make(place: str = place) -> tuple[Any, Any]:
            model = network()
            return model, MADE["easgd"](local(model), model, **PLACES[place])

        states = []
        for steps in (3, 4, 3):
            model, optimizer = make()
            train(model, optimizer, batches(steps))
            if place == "asynchronous":
                optimizer.synchronizer.finalize()
            states.append(copy.deepcopy(optimizer.state_dict()))

        def load(mine: Any, of_last: Any, make: Any = make) -> str:
            model, optimizer = make()
            chosen = of_last if last else mine
            if chosen is not None:
                optimizer.load_state_dict(copy.deepcopy(chosen))
            return attempt(lambda: train(model, optimizer, batches(1)))

        results[place] = {
            "other step": load(states[0], states[1]),
            "other run": load(states[0], states[2]),
            "not the root": load(None, states[0]),
            "together": load(states[0], states[0]),
        }
    model, optimizer = make_plain()
    train(model, optimizer, batches(3))
    state = optimizer.state_dict()

    def load_while_training() -> None:
        if last:
            optimizer.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, batches(6, first=3))

    results["in training"] = attempt(load_while_training)
    return results


def make_plain() -> tuple[Any, Any]:
    model = network()
    return model, MADE["average"](local(model), model)


@scenario
def state_makers() -> Any:
    """Steps by which libraries make the state of an optimizer: steps counted, whether anything has moved."""
    results = {}
    for name in MADE:
        for adaptive in (False, True):
            model = network()
            inner = torch.optim.AdamW(model.parameters()) if adaptive else torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = MADE[name](inner, model)
            before = values(model)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            if hvd.rank() == 0:
                model.zero_grad()
                get_optimizer_state_dict(model, optimizer)
            counted = [optimizer.synchronizer.local_steps, values(model) == before]
            train(model, optimizer, batches(3))
            if hvd.rank() == 0:
                optimizer.zero_grad()
                get_optimizer_state_dict(model, optimizer)
            counted.append(optimizer.synchronizer.local_steps)
            optimizer.synchronizer.finalize()
            results[f"{name} {adaptive}"] = counted
    return results


@scenario
def two_optimizers() -> Any:
    """A GAN with periods 3 and 4: with one update skipped by ``skip()``; by nothing; with other numbers of batches."""

    def gan() -> Any:
        models = [network(), network()]
        periods = zip(models, (3, 4), strict=True)
        return [(m, hvdp.ModelAverageOptimizer(local(m), m, period)) for m, period in periods]

    def play(counted: bool, steps: int) -> str:
        pair = gan()

        def loop() -> None:
            for step, inputs in enumerate(batches(steps)):
                for player, (model, optimizer) in enumerate(pair):
                    if step == 1 and player == 0 and hvd.rank() == hvd.size() - 1:
                        if counted:
                            optimizer.skip()
                        continue
                    train(model, optimizer, [inputs])
            for _, optimizer in pair:
                optimizer.synchronizer.finalize()

        return attempt(loop)

    return {"counted": play(True, 12), "not counted": play(False, 12), "uneven": play(True, 12 + 4 * hvd.rank())}


@scenario
def schedulers_and_uneven_steps() -> Any:
    """AGN, 10 batches on the last rank and 13 on others: centers, rates and steps at the end."""
    results = {}
    last = hvd.rank() == hvd.size() - 1
    for case in ("step", "epoch", "one cycle", "overflow"):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = hvdp.AGNOptimizer(inner, model, 4)
        if case == "one cycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
        else:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def work(case: str = case, model: Any = model, optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
            for _ in range(2):
                for step, inputs in enumerate(batches(10 if last and case != "overflow" else 13)):
                    if case == "overflow" and last and step == 2:
                        optimizer.skip()
                        continue
                    train(model, optimizer, [inputs])
                    if case != "epoch":
                        scheduler.step()
                if case == "epoch":
                    scheduler.step()
                optimizer.synchronizer.finalize()

        error = attempt(work)
        with optimizer.center():
            results[case] = [error, values(model), optimizer.synchronizer.local_steps]
    return results


@scenario
def values_that_count() -> Any:
    """Every step adds rank + 1; the last rank's second is NaN, in a gradient or in a statistic; or ranks weigh more."""
    results: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "raise": {},
        "skip": {"nonfinite": "skip"},
        "overlap": {"nonfinite": "skip", "overlap": 1},
        "int8": {"nonfinite": "skip", "compression": hvdp.Compression.int8},
        "sharded": {"nonfinite": "skip", "center": "sharded"},
        "root": {"nonfinite": "skip", "center": "root"},
        "weight": {"nonfinite": "skip", "weight": hvd.rank() + 1},
    }
    for where in ("gradient", "statistic"):
        for name, given in options.items():
            model = torch.nn.BatchNorm1d(3)
            inner = torch.optim.Adam([model.weight]) if name == "raise" else torch.optim.SGD([model.weight], 1.0, 0.0)
            optimizer = hvdp.ModelAverageOptimizer(inner, model, 1, **given)

            def work(model: Any = model, optimizer: Any = optimizer, where: str = where) -> None:
                for step in range(1, 5):
                    wrong = step == 2 and hvd.rank() == hvd.size() - 1
                    model.weight.grad = torch.full((3,), -1.0 - hvd.rank())
                    if wrong and where == "gradient":
                        model.weight.grad[1] = float("nan")
                    if wrong and where == "statistic":
                        model.running_var[2] = float("inf")
                    optimizer.step()
                optimizer.finalize()

            error = attempt(work)
            with optimizer.center():
                center = model.weight.tolist()
                finite = bool(model.running_var.isfinite().all())
            results[f"{where}, {name}"] = [error, center, finite, optimizer.synchronizer.counters.left_out]
    return results


@scenario
def asynchronous_in_another_order() -> Any:
    """Two asynchronous optimizers, finalized in different order: the error of every rank."""
    if hvd.size() == 1:
        raise NotApplicableError("needs several ranks")
    pair = [(m, MADE["easgd"](local(m), m, asynchronous=True)) for m in (network(), network())]
    for model, optimizer in pair:
        train(model, optimizer, batches(3))
    ends = pair[::-1] if hvd.rank() == 1 else pair
    error = attempt(lambda: [optimizer.synchronizer.finalize() for _, optimizer in ends])
    for _, optimizer in pair:
        optimizer.synchronizer.finalize()
    return error


def main() -> None:
    hvd.init()
    scenario.run(Path(sys.argv[1]), hvd.rank(), mpi=hvd.mpi_enabled())


if __name__ == "__main__":
    main()
