"""One rank of a program on PyTorch: every method is a call that a user might make."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import AGN, BMUF, EASGD, Averaging, DiLoCo, Doubling, Piecewise, PostLocal, SlowMo
from hvd_periodic.comm.base import Communicator
from tests.fuzz.ranks import InjectedError


def fail(where: str) -> int:
    """Raise what a user's code raises."""
    raise InjectedError(where)


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "averaging": Averaging,
    "easgd": EASGD,
    "easgd rho": lambda: EASGD(rho=0.1),
    "agn": AGN,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
}
PERIODS: dict[str, Any] = {
    "1": 1,
    "2": 2,
    "3": 3,
    "post local": PostLocal(start=2, period=2),
    "piecewise": Piecewise({0: 1, 2: 3}),
    "doubling": Doubling(1, every_rounds=2, limit=4),
    "fails later": lambda clock: 2 if clock.step < 4 else fail("in the schedule"),
}
COMPRESSIONS: dict[str, Any] = {
    "none": hvdp.Compression.none,
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "topk": hvdp.Compression.topk(0.5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
STATES: dict[str, Any] = {"local": "local", "reset": "reset", "average": "average"}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}
OF_STEPS = ("plain", "no_grad", "autocast")
"""Modes for local updates too: in the others, torch's own optimizers make state that they cannot use afterwards."""


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Set the default device, as a script does once, and the usual one again."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@dataclass(frozen=True)
class Setup:
    """What an optimizer is constructed with, by names."""

    algorithm: str = "averaging"
    period: str = "2"
    optimizer: str = "sgd"
    asynchronous: bool = False
    center: str = "replicated"
    overlap: int | str = 0
    fragments: int = 1
    compression: str = "none"
    optimizer_state: str = "local"
    audit_every: int = 0
    root_rank: int = 0
    width: int = 2
    levels: int = 1

    def options(self) -> dict[str, Any]:
        """Return those arguments that go to the constructor by keyword."""
        return {
            "center": self.center,
            "overlap": self.overlap,
            "fragments": self.fragments,
            "compression": COMPRESSIONS[self.compression],
            "optimizer_state": STATES[self.optimizer_state],
            "audit_every": self.audit_every,
            "root_rank": self.root_rank,
        }


def make_model(width: int) -> torch.nn.Module:
    """Return a model with statistics, and with a frozen parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    model[2].bias.requires_grad_(False)
    return model


def copied(state: Any) -> Any:
    """Return a copy that may be used in any mode, as what is read from a file."""
    with torch.inference_mode(False):
        return copy.deepcopy(state)


@dataclass
class Trained:
    """A model, and the optimizer that trains it."""

    setup: Setup
    model: torch.nn.Module
    optimizer: Any
    block: list[AbstractContextManager[Any]] = field(default_factory=list)
    before: list[torch.Tensor] | None = None
    """The parameters where the outermost block was entered, as long as nothing but that changes them."""

    def parameters(self) -> list[torch.Tensor]:
        """Return copies."""
        with torch.inference_mode(False):
            return [parameter.detach().clone() for parameter in self.model.parameters()]


class TorchPlayer:
    """One rank.

    Args:
        communicator: of this rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        torch.set_num_threads(1)
        self.communicator = communicator
        self.batches = 0
        self.all: list[Trained] = []
        self.saved: list[tuple[Setup, dict[str, Any], dict[str, Any]]] = []

    def call(self, name: str, mode: str, which: int, *arguments: Any) -> Any:
        """Make a call in a mode."""
        with MODES[mode]():
            return getattr(self, name)(*(() if name == "construct" else (self.all[which % len(self.all)],)), *arguments)

    def construct(self, *setups: Setup) -> None:
        """Construct an optimizer of a new model, perhaps not as other ranks do."""
        setup = setups[self.communicator.rank % len(setups)]
        with torch.inference_mode(False), torch.device("cpu"):
            model = make_model(setup.width)
            local = OPTIMIZERS[setup.optimizer](parameter for parameter in model.parameters())
        self.all.append(Trained(setup, model, self.wrapped(setup, model, local)))

    def wrapped(self, setup: Setup, model: torch.nn.Module, local: torch.optim.Optimizer) -> Any:
        """Wrap a local optimizer."""
        if setup.levels > 1:
            inner = replace(setup, levels=setup.levels - 1, algorithm="averaging", period="1", overlap=0)
            local = self.wrapped(inner, model, local)
        return hvdp.PeriodicOptimizer(
            local,
            model,
            ALGORITHMS[setup.algorithm],
            PERIODS[setup.period],
            asynchronous=setup.asynchronous,
            process_set=self.communicator,
            **setup.options(),
        )

    def loss(self, trained: Trained) -> torch.Tensor:
        """Return the loss on the next batch of this rank."""
        self.batches += 1
        generator = torch.Generator("cpu").manual_seed(1000 * self.communicator.rank + self.batches)
        with torch.device("cpu"):
            inputs = torch.randn(4, 3, generator=generator)
        try:
            return trained.model(inputs).square().mean()
        except RuntimeError as error:
            raise InjectedError("in the forward pass") from error

    def step(self, trained: Trained) -> None:
        """Take a step, as a script does."""
        with torch.enable_grad():
            trained.optimizer.zero_grad()
            self.loss(trained).backward()
        trained.optimizer.step()

    def overflow(self, trained: Trained) -> None:
        """Take a step as a GradScaler lets it take, where gradients are not finite."""
        trained.optimizer.grad_scale, trained.optimizer.found_inf = None, torch.ones(1, device="cpu")
        try:
            self.step(trained)
        finally:
            del trained.optimizer.grad_scale, trained.optimizer.found_inf

    def closure(self, trained: Trained, raising: bool) -> None:
        """Take a step with a closure, which may raise."""

        def evaluate() -> torch.Tensor:
            with torch.enable_grad():
                trained.optimizer.zero_grad()
                loss = self.loss(trained)
                loss.backward()
            if raising:
                raise InjectedError("in the closure")
            return loss

        trained.optimizer.step(evaluate)

    def skip(self, trained: Trained) -> None:
        """Pass over a batch."""
        trained.optimizer.skip()

    def sync(self, trained: Trained) -> None:
        """Exchange now."""
        trained.optimizer.synchronizer.sync()

    def finalize(self, trained: Trained) -> None:
        """Leave training."""
        trained.optimizer.finalize()

    def audit(self, trained: Trained) -> None:
        """Compare centers."""
        trained.optimizer.synchronizer.audit()

    def distance(self, trained: Trained) -> None:
        """Ask for the distance."""
        trained.optimizer.synchronizer.distance()

    def broadcast(self, trained: Trained) -> None:
        """Take over what the root has."""
        trained.optimizer.synchronizer.broadcast()

    def report(self, trained: Trained, loss: Any) -> None:
        """Report a loss."""
        trained.optimizer.synchronizer.report(loss)

    def enter(self, trained: Trained) -> None:
        """Enter a center() block."""
        block = trained.optimizer.center()
        before = trained.parameters()
        block.__enter__()
        trained.block.append(block)
        trained.before = before

    def leave(self, trained: Trained, raising: bool) -> None:
        """Leave the innermost center() block, if there is one; perhaps by an exception."""
        if not trained.block:
            return
        block, before, trained.before = trained.block.pop(), trained.before, None
        error = InjectedError("inside the block") if raising else None
        swallowed = block.__exit__(None if error is None else InjectedError, error, None)
        if before is not None:
            require_equal(trained.parameters(), before, "parameters after the block")
        if error is not None and not swallowed:
            raise error

    def save(self, trained: Trained) -> None:
        """Take a checkpoint."""
        saved = copied(trained.model.state_dict()), copied(trained.optimizer.state_dict())
        self.saved.append((trained.setup, *saved))

    def load(self, trained: Trained, number: int) -> None:
        """Load one of the checkpoints that were taken, perhaps of another optimizer."""
        if not self.saved:
            return
        _, model, optimizer = self.saved[number % len(self.saved)]
        alone = trained.setup.center == "replicated" and not trained.setup.asynchronous
        before = copied(trained.optimizer.state_dict()) if alone else None
        try:
            trained.optimizer.load_state_dict(copied(optimizer))
        except Exception:
            if before is not None:
                require_equal(trained.optimizer.state_dict(), before, "the state after one that was refused")
            raise
        trained.before = None
        load(trained.model, model)

    def resume(self, trained: Trained) -> None:
        """Save, and load into what was constructed anew; the state that this then has is the same."""
        model, state = copied(trained.model.state_dict()), trained.optimizer.state_dict()
        with torch.inference_mode(False), torch.device("cpu"):
            new = make_model(trained.setup.width)
            local = OPTIMIZERS[trained.setup.optimizer](new.parameters())
        optimizer = self.wrapped(trained.setup, new, local)
        load(new, model)
        optimizer.load_state_dict(copied(state))
        trained.model, trained.optimizer, trained.block = new, optimizer, []
        require_equal(optimizer.state_dict(), state, "state")

    def replaced(self, trained: Trained, how: str) -> None:
        """Go on with a copy."""
        pair = trained.model, trained.optimizer
        made = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        trained.model, trained.optimizer = made
        trained.block = []

    def change(self, trained: Trained, what: str) -> None:
        """Change parameters after construction."""
        trained.before = None
        weight = trained.model[0].weight  # type: ignore[index]
        if what == "freeze":
            weight.requires_grad_(not weight.requires_grad)
        elif what == "replace":
            trained.model[0].weight = torch.nn.Parameter(weight.detach().clone())  # type: ignore[index]
        elif what == "data":
            weight.data = weight.data.clone()
        elif what == "double":
            trained.model.double().float()
        elif what == "resize":
            weight.data = weight.data[:1]
        elif what == "group":
            trained.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        elif what == "buffer":
            trained.model.register_buffer("running_mean", torch.zeros(1))
        elif what == "rate":
            trained.optimizer.param_groups[0]["lr"] *= 0.5
        elif what == "state":
            trained.optimizer.state.clear()
        elif what == "nan":
            with torch.no_grad():
                weight.fill_(float("nan"))

    def standing(self, trained: Trained) -> dict[str, Any]:
        """Return what all ranks have alike where they have made the same calls, and what must be finite.

        Before training has begun, the center is what each rank's model holds: a forward pass moves its statistics.
        """
        counters, begun = trained.optimizer.synchronizer.counters, trained.optimizer.synchronizer.begun
        groups = trained.optimizer.synchronizer.tensor_groups if begun else ()
        return {
            "counters": (counters.local_steps, counters.rounds, counters.last_exchange, counters.next_exchange),
            "begun": begun,
            "inside": bool(trained.block),
            "centers": [
                [tensor.clone() for tensor in group.center.tensors()] for group in groups if group.placement.everywhere
            ],
            "finite": all(bool(p.isfinite().all()) for p in trained.model.parameters()),
        }


def load(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load weights, which may be those of another model."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InjectedError("loading weights") from error


def require_equal(found: Any, expected: Any, where: str) -> None:
    """Compare to the bit."""
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
        if not same or not torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0)):
            raise AssertionError(f"{where}: {found} where {expected} was saved")
    elif isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise AssertionError(f"{where}: {found.keys()} where {expected.keys()} were saved")
        for key, value in expected.items():
            require_equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise AssertionError(f"{where}: {len(found)} where {len(expected)} were saved")
        for place, pair in enumerate(zip(found, expected, strict=True)):
            require_equal(*pair, f"{where}[{place}]")
    elif found != expected:
        raise AssertionError(f"{where}: {found!r} where {expected!r} was saved")
