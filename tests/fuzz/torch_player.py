"""One rank of a program on PyTorch: every method is a call that a user might make."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.comm.base import Communicator
from tests.fuzz.player import ALGORITHMS, PERIODS, Player, Setup, Trained
from tests.fuzz.ranks import InjectedError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Set the default device, as a script does once, and the usual one again."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def make_model(width: int) -> torch.nn.Module:
    """Return a model with statistics, and with a frozen parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    model[2].bias.requires_grad_(False)
    return model


class TorchPlayer(Player):
    """One rank.

    Args:
        communicator: of this rank.
    """

    modes = MODES

    def __init__(self, communicator: Communicator) -> None:
        torch.set_num_threads(1)
        super().__init__(communicator)

    def copied(self, state: Any) -> Any:
        """Return a copy that may be used in any mode."""
        with torch.inference_mode(False):
            return copy.deepcopy(state)

    def made(self, setup: Setup) -> Trained:
        """Return a new model, and an optimizer of it."""
        with torch.inference_mode(False), torch.device("cpu"):
            model = make_model(setup.width)
            local = OPTIMIZERS[setup.optimizer](parameter for parameter in model.parameters())
        return Trained(setup, model, self.wrapped(setup, model, local))

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

    def replaced(self, trained: Trained, how: str) -> None:
        """Go on with a copy."""
        pair = trained.model, trained.optimizer
        made = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        trained.abandon()
        trained.model, trained.optimizer = made

    def change(self, trained: Trained, what: str) -> None:
        """Change parameters after construction."""
        trained.before = None
        weight = trained.model[0].weight
        if what == "freeze":
            weight.requires_grad_(not weight.requires_grad)
        elif what == "replace":
            trained.model[0].weight = torch.nn.Parameter(weight.detach().clone())
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

    def finalize(self, trained: Trained) -> None:
        """Leave training on every level."""
        trained.optimizer.finalize()

    def weights(self, trained: Trained) -> Any:
        """Return a copy of the state of the model."""
        return self.copied(trained.model.state_dict())

    def load_weights(self, trained: Trained, weights: Any) -> None:
        """Load weights, which may be those of another model."""
        try:
            trained.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InjectedError("loading weights") from error

    def parameters(self, trained: Trained) -> list[Any]:
        """Return copies."""
        with torch.inference_mode(False):
            return [parameter.detach().clone() for parameter in trained.model.parameters()]

    def is_finite(self, trained: Trained) -> bool:
        """Return whether all parameters are."""
        return all(bool(parameter.isfinite().all()) for parameter in trained.model.parameters())
