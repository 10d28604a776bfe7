"""Parameters with policies of their own in elastic jobs of PyTorch; see ``policies_of`` in ``elastic_scenarios.py``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.parallel.elastic_scenarios import (
    MOMENTUM,
    RATE,
    SIZE,
    has_seldom,
    led_target,
    table_momentum,
    target,
    touched,
)


class Further:
    """The parameters ``led``, ``seldom`` and ``table`` of a model, as far as there are policies for them.

    Args:
        model: gets them.
        policies: their policies.
    """

    def __init__(self, model: torch.nn.Module, policies: Mapping[str, str]) -> None:
        shapes = {"led": (1,), "seldom": (1,), "table": (SIZE, 1)}
        self._model = model
        self._parameters = {
            name: torch.nn.Parameter(torch.zeros(shapes[name], dtype=torch.float64))
            for name in shapes
            if name in policies
        }
        for name, parameter in self._parameters.items():
            model.register_parameter(name, parameter)

    def optimizer(self, algorithm: str) -> torch.optim.Optimizer:
        """Return the local optimizer of the model."""
        tables = [each for name, each in self._parameters.items() if name == "table"]
        others = [each for each in self._model.parameters() if not any(each is table for table in tables)]
        groups = [{"params": others}, *({"params": [each], "momentum": table_momentum(algorithm)} for each in tables)]
        return torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)

    def descend(self, rank: int, step: int) -> None:
        """Set the gradients of a step."""
        for name, parameter in self._parameters.items():
            parameter.grad = parameter.detach() - led_target(rank)
            if name == "seldom" and not has_seldom(rank, step):
                parameter.grad = None
            if name == "table":
                away = parameter.detach().reshape(-1).numpy() - target(rank, step)
                parameter.grad = torch.from_numpy(away * touched(rank, step)).reshape(SIZE, 1)

    def values(self, suffix: str = "") -> dict[str, list[float]]:
        """Return the values by name, with a suffix."""
        return {f"{name}{suffix}": each.detach().reshape(-1).tolist() for name, each in self._parameters.items()}
