"""A model of which parts are trained, frozen and added, and model averaging of all its replicas in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.parallel.torch_job import hvd
from tests.parallel.trainer_ranks import PERIOD


class Net(torch.nn.Module):
    """A model that starts from the values of one rank, and has the data of another."""

    def __init__(self, start: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(start)
        self.backbone, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.double().inputs = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) * (rank + 1) / 10

    def loss(self) -> torch.Tensor:
        """Return the loss, which is the same at every step."""
        return (self.head(self.backbone(self.inputs).tanh()) - 1).square().mean()


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.5)


def values(model: torch.nn.Module) -> list[float]:
    return [x for p in model.parameters() for x in p.flatten().tolist()]


class Averaging:
    """Model averaging of all ranks in one process, of parameters that are trained.

    Args:
        models: the replicas, in the order of ranks.
    """

    def __init__(self, models: Sequence[Net]) -> None:
        self.models, self.since = models, 0
        self.optimizers = [sgd(model.parameters()) for model in models]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                model.loss().backward()
                optimizer.step()
            self.since += 1
            if self.since == PERIOD:
                self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Average; the next exchange is a period from here."""
        self.since = 0
        for replicas in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack(replicas).mean(0)
            for x in replicas if replicas[0].requires_grad else ():
                x.copy_(mean)

    def add(self, parameters: Callable[[Net], list[Any]], **options: Any) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.add_param_group({"params": [p.requires_grad_() for p in parameters(model)], **options})


def off(model: torch.nn.Module, averaging: Averaging) -> float:
    """Return how far a model is from that of this rank."""
    expected = values(averaging.models[hvd.rank()])
    return max(abs(a - b) for a, b in zip(values(model), expected, strict=True))
