"""The optimizer that moves the center, with a state of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_periodic.arguments import outer_name
from hvd_periodic.torch.gradient_averaging import innermost, plain_class
from hvd_periodic.vectors.lending import lends

CenterOptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer of the same parameters to be copied, or a function from parameter groups to an optimizer."""


class CenterOptimizer:
    """An optimizer over views of the center variables.

    A copied one takes over class, constructor arguments, attributes and hyper-parameters, and reads the
    hyper-parameters again before every step: a learning-rate scheduler of the original drives both. It shares no state
    with the original, and starts from what its constructor makes of the centers.

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
        TypeError: the source makes no torch optimizer, its class cannot be constructed from parameter groups, defaults
            and attributes, or it needs a closure or sparse gradients.
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
        self._on_host = all(center.device.type == "cpu" for center in centers)
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
        self.optimizer = self._construct(groups)
        _check_complete(self.optimizer.param_groups, centers)
        _check_steps(self.optimizer)
        self._initial = {
            center: {key: copy.deepcopy(value) for key, value in state.items()}
            for center, state in self.optimizer.state.items()
        }

    def steps(self, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        """Return what a new optimizer of this kind makes of ``x``, in a step per gradient."""
        moved = torch.from_numpy(x.copy())
        optimizer = self._construct([{"params": [moved]}])
        for group in optimizer.param_groups:
            group.update(_on_host(group))
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
        """Return a copy of the optimizer's state dict; or the state dict, where it is lent."""
        self._follow()
        state = self.optimizer.state_dict()
        return state if lends() else copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; a template other than the local optimizer gets its hyper-parameters back as well."""
        self.optimizer.load_state_dict(copy.deepcopy(state))
        if self._template is not None and not self._follows_local:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                original = self._template.param_groups[index]
                kept = {key: original[key] for key in _on_host(original)}
                original.update(_hyperparameters(group) | kept)

    def reset(self) -> None:
        """Forget all steps."""
        self.optimizer.state.clear()
        self.optimizer.state.update({center: copy.deepcopy(state) for center, state in self._initial.items()})

    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays of the state, after one that tells which tensors of it there are.

        They are those after the first step of a copy: as things are, and with a momentum, which schedulers set later.

        Raises:
            ValueError: the state holds something else than tensors.
        """
        self._follow()
        found: dict[tuple[int, int, str], tuple[tuple[int, ...], str]] = {}
        for momentum in (0.0, 0.5):
            trial = _twin(self.optimizer)
            for group in trial.param_groups:
                if "momentum" in group:
                    group["momentum"] = group["momentum"] or momentum
                for center in group["params"]:
                    center.grad = torch.zeros_like(center)
            trial.step()
            for g, i, key, value in _entries(trial):
                found[g, i, key] = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        self.keys = list(found)
        return [((len(found),), "bool"), *found.values()]

    def keeps_state(self) -> bool:
        """Return whether there is a state after a step, as things are."""
        trial = _twin(self.optimizer)
        for group in trial.param_groups:
            for center in group["params"]:
                center.grad = torch.zeros_like(center)
        trial.step()
        return any(True for _ in _entries(trial))

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Make these arrays the state."""
        present, *tensors = arrays
        for (g, i, key), there, array in zip(self.keys, present, tensors, strict=True):
            state = self._state_of(g, i)
            if there:
                state[key] = torch.from_numpy(array)
            else:
                state.pop(key, None)

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Put the state into these arrays, if they are not the state itself.

        Raises:
            ValueError: the state holds more than :meth:`shapes` knew of.
        """
        present, *tensors = arrays
        here = {(g, i, key): value for g, i, key, value in _entries(self.optimizer)}
        unknown = sorted({key for _, _, key in here.keys() - set(self.keys)})
        if unknown:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps {unknown[0]!r} now, which it did not when constructed, and "
                f"processes share what it kept then: set hyper-parameters before, or pass another `{outer_name()}`"
            )
        for n, (place, array) in enumerate(zip(self.keys, tensors, strict=True)):
            present[n] = place in here
            if place in here and here[place].data_ptr() != array.ctypes.data:
                torch.from_numpy(array).copy_(here[place])

    def _state_of(self, group: int, index: int) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        return state

    def _construct(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return a new optimizer of these groups, of which the first ones of the template are taken."""
        if self._template is None:
            return _make(self._source, groups)
        for index, group in zip(self._groups, groups, strict=False):
            group.update(self._settings_of(index))
        return _copy(self._template, groups)

    def _settings_of(self, index: int) -> dict[str, Any]:
        """Return the hyper-parameters of a group of the template, as they are for the centers."""
        group = _hyperparameters(self._template.param_groups[index]) if self._template is not None else {}
        return group | (_on_host(group) if self._on_host else {})

    def _follow(self) -> None:
        if self._template is not None:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                group.update(self._settings_of(index))


def _copy(template: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a new optimizer of the class of the template, with its attributes.

    An argument of a constructor is known by its name: among the defaults, where optimizers keep what a group may
    override, or among the attributes. Some act in the constructor only, such as Adagrad's initial accumulator.
    """
    construct: Callable[..., torch.optim.Optimizer] = plain_class(template)
    template = innermost(template)
    attributes = {key: value for key, value in vars(template).items() if not _holds_tensors(value)}
    known = {**attributes, **template.defaults}
    try:
        made = construct(groups, **{name: known[name] for name in _arguments(plain_class(template)) if name in known})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(template).__name__} cannot be copied for the center ({error}). Pass "
            f"`{outer_name()}=lambda groups: ...` that constructs one"
        ) from error
    every_optimizer_has = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    for key in vars(made).keys() & attributes.keys() - every_optimizer_has.keys():
        setattr(made, key, copy.deepcopy(attributes[key]))
    return made


def fresh_copy(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and settings, of one parameter.

    Raises:
        TypeError: its class cannot be constructed from parameter groups, defaults and attributes.
    """
    return _copy(optimizer, [{"params": [parameter]}])


def _arguments(made: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of the arguments of a constructor; where it hands on ``**others``, also those of its bases."""
    names: list[str] = []
    for base in made.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())
            names += [parameter.name for parameter in parameters[2:]]
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names


def _holds_tensors(value: object) -> bool:
    """Whether this belongs to the parameters that an optimizer was made for, as far as can be told."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or inspect.ismethod(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, (*value.keys(), *value.values())))
    return isinstance(value, (list, tuple, set)) and any(map(_holds_tensors, value))


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a deep copy, parameters included; torch's own leaves out the attributes of subclasses."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    for key, value in vars(optimizer).items():
        if key not in vars(twin):
            setattr(twin, key, copy.deepcopy(value, memo))
    return twin


def _entries(optimizer: torch.optim.Optimizer) -> list[tuple[int, int, str, torch.Tensor]]:
    """Return group, number in the group, key and value of all tensors of the state.

    Raises:
        ValueError: the state holds something else.
    """
    entries = []
    for g, group in enumerate(optimizer.param_groups):
        for i, center in enumerate(group["params"]):
            for key, value in sorted(optimizer.state.get(center, {}).items()):
                if isinstance(value, torch.Tensor):
                    entries.append((g, i, key, value))
                elif value is not None:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} as {type(value).__name__}: processes can share "
                        f"tensors only. Pass another `{outer_name()}`"
                    )
    return entries


def _make(source: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    made = source(groups) if callable(source) else source
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"`{outer_name()}` must be a torch optimizer to copy, or a function from parameter groups to a torch "
            f"optimizer. Received: {type(made).__name__}"
        )
    return made


def _check_complete(groups: Sequence[dict[str, Any]], centers: Sequence[torch.Tensor]) -> None:
    held, wanted = {id(p) for group in groups for p in group["params"]}, set(map(id, centers))
    if held != wanted:
        raise ValueError(
            f"`{outer_name()}` must hold the parameters of the model, all and no others; a function must use the "
            f"groups it is given. It lacks {len(wanted - held)} of {len(wanted)} and has {len(held - wanted)} others"
        )


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} steps with a closure only, and there is no loss of the center to "
            f"evaluate. Pass another `{outer_name()}`"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "SparseAdam takes sparse gradients only, and those of the center are dense. Pass another "
            f"`{outer_name()}`, such as lambda groups: torch.optim.Adam(groups)"
        )


def _on_host(group: dict[str, Any]) -> dict[str, Any]:
    """Return what of a group is different for tensors in host memory, which no CUDA graph captures.

    Several tensors at once would need a capturable step for a learning rate that is a tensor.
    """
    return {"capturable": False, "foreach": None} if group.get("capturable") else {}


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
