"""The optimizer that moves the center, with a state of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_periodic.torch.distributed import plain_class

CenterOptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer of the same parameters to be copied, or a function from parameter groups to an optimizer."""


class CenterOptimizer:
    """An optimizer over views of the center variables.

    A copied one takes over class and hyper-parameters, and reads the hyper-parameters again before every step: a
    learning-rate scheduler of the original drives both. It shares no state with the original.

    Args:
        source: the optimizer to copy, or a function that makes one.
        local: the local optimizer, whose parameter groups such a function is given.
        parameters: the model's parameters.
        centers: their centers, in the same order, or parts of them.
        gradients: what will hold the gradients of the centers.
        owners: which parameter each center belongs to, where they are parts of centers.

    Attributes:
        keys: group, number in the group and key of every tensor of the state, once :meth:`shapes` has found them.
        followed: the hyper-parameters of every group for the next step, where they are those of another rank.

    Raises:
        TypeError: the source makes no torch optimizer, its class cannot be constructed from parameter groups alone, or
            it needs a closure.
        ValueError: the optimizer lacks some of the parameters, or has others.
    """

    def __init__(
        self,
        source: CenterOptimizerLike,
        local: torch.optim.Optimizer | None,
        parameters: Sequence[torch.Tensor],
        centers: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        owners: Sequence[int] | None = None,
    ) -> None:
        for center, gradient in zip(centers, gradients, strict=True):
            center.grad = gradient
        self.keys: list[tuple[int, int, str]] = []
        self.followed: list[dict[str, Any]] | None = None
        self._source = source
        self._template = source if isinstance(source, torch.optim.Optimizer) else None
        self._follows_local = source is local
        grouping = local if self._template is None else self._template
        self._groups: list[int] = []
        groups: list[dict[str, Any]] = []
        centers = list(centers)
        centers_of: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in parameters}
        for owner, center in zip(range(len(centers)) if owners is None else owners, list(centers), strict=True):
            centers_of[id(parameters[owner])].append(center)
        for index, group in enumerate([{"params": parameters}] if grouping is None else grouping.param_groups):
            present = [p for p in group["params"] if id(p) in centers_of]
            members = [center for p in present for center in centers_of[id(p)]]
            if present and not members:  # Groups keep their numbers where this rank holds nothing of one.
                members = [torch.zeros(0, dtype=torch.float32)]
                centers += members
            if members:
                self._groups.append(index)
                groups.append({"params": members})
        _check_complete(groups, centers)
        if self._template is None:
            self.optimizer = _make(source, groups)
        else:
            for index, group in zip(self._groups, groups, strict=True):
                group.update(_hyperparameters(self._template.param_groups[index]))
            self.optimizer = _copy(self._template, groups)
        _check_complete(self.optimizer.param_groups, centers)
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"{type(self.optimizer).__name__} steps with a closure only, and there is no loss of the center to "
                "evaluate. Pass another `center_optimizer`"
            )

    def steps(self, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        """Return what a new optimizer of this kind makes of ``x``, in a step per gradient."""
        moved = torch.from_numpy(x.copy())
        groups: list[dict[str, Any]] = [{"params": [moved]}]
        if self._template is None:
            optimizer = _make(self._source, groups)
        else:
            groups[0].update(_hyperparameters(self._template.param_groups[self._groups[0]]))
            optimizer = _copy(self._template, groups)
        for gradient in gradients:
            moved.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
        return moved.numpy()

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step, by readable name."""
        self._follow()
        return {
            f"{key} of group {i} of the center optimizer": value
            for i, group in enumerate(self.optimizer.param_groups)
            for key, value in sorted(_hyperparameters(group).items())
        }

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return copies of the hyper-parameters of the next step, of every group."""
        self._follow()
        return copy.deepcopy([_hyperparameters(group) for group in self.optimizer.param_groups])

    def step(self) -> None:
        """Move the centers by their gradients."""
        self._follow()
        for group, followed in zip(self.optimizer.param_groups, self.followed or (), strict=False):
            group.update(followed)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state dict."""
        self._follow()
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; a template other than the local optimizer gets its hyper-parameters back as well."""
        self.optimizer.load_state_dict(state)
        if self._template is not None and not self._follows_local:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                self._template.param_groups[index].update(_hyperparameters(group))

    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the tensors of the state after the first step: let a copy take one.

        Raises:
            ValueError: the state holds something else than tensors.
        """
        self._follow()
        trial = copy.deepcopy(self.optimizer)
        for group in trial.param_groups:
            for center in group["params"]:
                center.grad = torch.zeros_like(center)
        trial.step()
        shapes = []
        self.keys = []
        for g, group in enumerate(trial.param_groups):
            for i, center in enumerate(group["params"]):
                for key, value in sorted(trial.state.get(center, {}).items()):
                    if value is None:
                        continue
                    if not isinstance(value, torch.Tensor):
                        raise ValueError(
                            f"{type(trial).__name__} keeps {key!r} as {type(value).__name__}: processes can share "
                            "tensors only. Pass another `center_optimizer`"
                        )
                    shapes.append((tuple(value.shape), str(value.dtype).removeprefix("torch.")))
                    self.keys.append((g, i, key))
        return shapes

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Make these arrays the state."""
        for (state, key), array in zip(self._entries(), arrays, strict=True):
            state[key] = torch.from_numpy(array)

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Put the state into these arrays, if they are not the state itself."""
        for (state, key), array in zip(self._entries(), arrays, strict=True):
            shared = torch.from_numpy(array)
            if state[key].data_ptr() != shared.data_ptr():
                shared.copy_(state[key])

    def _entries(self) -> Iterator[tuple[dict[str, Any], str]]:
        for g, i, key in self.keys:
            yield self.optimizer.state[self.optimizer.param_groups[g]["params"][i]], key

    def _follow(self) -> None:
        if self._template is not None:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                group.update(_hyperparameters(self._template.param_groups[index]))


def _copy(template: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    construct: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = plain_class(template)
    try:
        return construct(groups)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(template).__name__} cannot be copied for the center ({error}). Pass "
            "`center_optimizer=lambda groups: ...` that constructs one"
        ) from error


def _make(source: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    made = source(groups) if callable(source) else source
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "`center_optimizer` must be a torch optimizer to copy, or a function from parameter groups to a torch "
            f"optimizer. Received: {type(made).__name__}"
        )
    return made


def _check_complete(groups: Sequence[dict[str, Any]], centers: Sequence[torch.Tensor]) -> None:
    held, wanted = {id(p) for group in groups for p in group["params"]}, set(map(id, centers))
    if held != wanted:
        raise ValueError(
            "`center_optimizer` must hold the parameters of the model, all and no others; a function must use the "
            f"groups it is given. It lacks {len(wanted - held)} of {len(wanted)} and has {len(held - wanted)} others"
        )


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
