"""The optimizer that moves the center, with a state of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

CenterOptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer of the same parameters to be copied, or a function from parameter groups to an optimizer."""


class CenterOptimizer:
    """An optimizer over views of the center variables.

    A copied one takes over class and hyper-parameters, and reads the hyper-parameters again before every step: a
    learning-rate scheduler of the original drives both. It shares no state with the original.

    Args:
        source: the optimizer to copy, or a function that makes one.
        parameters: the model's parameters.
        centers: their centers, in the same order.
        gradients: what will hold the gradients of the centers.

    Raises:
        TypeError: the source makes no torch optimizer, its class cannot be constructed from parameter groups alone, or
            it needs a closure.
        ValueError: the optimizer to copy lacks some of the parameters.
    """

    def __init__(
        self,
        source: CenterOptimizerLike,
        parameters: Sequence[torch.Tensor],
        centers: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._template: list[dict[str, Any]] = []
        for center, gradient in zip(centers, gradients, strict=True):
            center.grad = gradient
        if isinstance(source, torch.optim.Optimizer):
            self.optimizer = self._copy(source, dict(zip(map(id, parameters), centers, strict=True)))
        else:
            made = source([{"params": list(centers)}]) if callable(source) else source
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(
                    "`center_optimizer` must be a torch optimizer to copy, or a function from parameter groups to a "
                    f"torch optimizer. Received: {type(made).__name__}"
                )
            self.optimizer = made
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"{type(self.optimizer).__name__} steps with a closure only, and there is no loss of the center to "
                "evaluate. Pass another `center_optimizer`"
            )

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step, by readable name."""
        groups = self._template or self.optimizer.param_groups
        return {
            f"{key} of group {i} of the center optimizer": value
            for i, group in enumerate(groups)
            for key, value in sorted(_hyperparameters(group).items())
        }

    def step(self) -> None:
        """Move the centers by their gradients."""
        for group, template in zip(self.optimizer.param_groups, self._template, strict=False):
            group.update(_hyperparameters(template))
        self.optimizer.step()

    def _copy(self, source: torch.optim.Optimizer, center_of: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
        groups = []
        for template in source.param_groups:
            centers = [center_of.pop(id(p)) for p in template["params"] if id(p) in center_of]
            if centers:
                groups.append({"params": centers, **_hyperparameters(template)})
                self._template.append(template)
        if center_of:
            raise ValueError(f"`center_optimizer` must hold all parameters of the model. It lacks {len(center_of)}")
        try:
            return type(source)(groups)  # type: ignore[call-arg]
        except TypeError as error:
            raise TypeError(
                f"{type(source).__name__} cannot be copied for the center ({error}). Pass "
                "`center_optimizer=lambda groups: ...` that constructs one"
            ) from error


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
