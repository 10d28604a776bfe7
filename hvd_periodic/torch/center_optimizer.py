"""The optimizer that moves the center, with its own state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_periodic.arguments import outer_name
from hvd_periodic.torch.copies import OwnState, copied, in_train_mode, own_state, settings_in
from hvd_periodic.torch.modes import Modes
from hvd_periodic.vectors.lending import lends

EntryKey: TypeAlias = tuple[int, int, str]
"""Location of a state entry: parameter group, number in the group, key; see ``_OF_GROUP``, ``_OF_ALL``."""

_OF_GROUP, _OF_ALL = -1, -1
"""As the number: state in the parameter group itself; as the group: state that belongs to no parameter."""

CenterOptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer over the same parameters, to be copied, or a function from parameter groups to an optimizer."""


class CenterOptimizer:
    """An optimizer over views of the center variables.

    A copy takes over the original's class, constructor arguments, attributes and hyper-parameters. It reads the
    hyper-parameters again before every step, so a learning-rate scheduler of the original drives both. It shares no
    state with the original: its constructor makes the initial state from the centers. State in parameter groups means
    entries that the optimizer's own steps change, such as a step counter.

    Args:
        source: the optimizer to copy, or a function that makes one.
        local: the local optimizer; such a function receives the centers in the same parameter groups.
        parameters: the model's parameters.
        centers: their centers, in the same order, or parts of them.
        gradients: tensors that will hold the gradients of the centers.
        owners: the number of the parameter that each center belongs to, if ``centers`` are parts of centers.

    Attributes:
        keys: locations of all state entries, each with its type, once :meth:`shapes` has found them.
        followed: the hyper-parameters of every group for the next step, if they come from another rank.

    Raises:
        TypeError: ``source`` makes no torch optimizer, its class cannot be constructed from parameter groups, defaults
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
        self.keys: dict[EntryKey, type] = {}
        self.followed: list[dict[str, Any]] | None = None
        self._source = source
        self._template = source if isinstance(source, torch.optim.Optimizer) else None
        self._follows_local = source is local
        grouping = local if self._template is None else self._template
        self._on_host = True
        self._groups: list[int] = []
        groups: list[dict[str, Any]] = []
        like: list[list[torch.Tensor]] = []
        centers = list(centers)
        centers_of: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in parameters}
        for owner, center in zip(range(len(centers)) if owners is None else owners, list(centers), strict=True):
            centers_of[id(parameters[owner])].append(center)
        for index, group in enumerate([{"params": parameters}] if grouping is None else grouping.param_groups):
            present = [p for p in group["params"] if id(p) in centers_of]
            members = [center for p in present for center in centers_of[id(p)]]
            if present and not members:  # Keep the numbers of groups of which this rank holds nothing.
                members = [torch.zeros(0, dtype=torch.float32)]
                centers += members
            if members:
                self._groups.append(index)
                groups.append({"params": members})
                like.append(present)
        _check_complete(groups, centers)
        self._own = own_state(self._construct, self._template, like)
        self._on_host = all(center.device.type == "cpu" for center in centers)
        self.optimizer = self._construct(groups, self._own)
        _check_complete(self.optimizer.param_groups, centers)
        _check_steps(self.optimizer)
        self._modes = Modes(self.optimizer)
        self._initial = {key: _duplicate(value) for key, value in self.optimizer.state.items()}
        self._initial_groups = [copy.deepcopy(self._of_step(group)) for group in self.optimizer.param_groups]

    def steps(self, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        """Return ``x`` after a new optimizer of this kind has taken one step per gradient."""
        moved = torch.from_numpy(x.copy())
        optimizer = in_train_mode(self._construct([{"params": [moved]}], self._own))
        for group in optimizer.param_groups:
            group.update(_on_host(group))
        for gradient in gradients:
            moved.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
        return moved.numpy()

    @property
    def learned(self) -> list[str]:
        """The keys of state in parameter groups that depends on the gradients of all parameters of a group."""
        return sorted(self._own.learned)

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step, by readable name."""
        self._follow()
        return {
            f"{key} of group {i} of the center optimizer": _in_words(value)
            for i, group in enumerate(self.optimizer.param_groups)
            for key, value in sorted(settings_in(group, self._own).items())
        }

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return copies of the hyper-parameters of every group for the next step, for ranks with any device."""
        self._follow()
        groups = [settings_in(group, self._own) for group in self.optimizer.param_groups]
        return copy.deepcopy([group | _in_host_memory(group) for group in groups])

    def step(self) -> None:
        """Take one step on the centers, with their gradients."""
        self._follow()
        for group, followed in zip(self.optimizer.param_groups, self.followed or (), strict=False):
            group.update({key: _on_device_of(value, group.get(key)) for key, value in followed.items()})
        in_train_mode(self.optimizer).step()
        self._modes.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict: a copy, except inside :func:`~hvd_periodic.vectors.lending.lending`."""
        self._follow()
        state = self.optimizer.state_dict()
        return state if lends() else copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict; a template other than the local optimizer also gets its hyper-parameters back."""
        self.optimizer.load_state_dict(copy.deepcopy(state))
        if self._template is not None and not self._follows_local:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                original = self._template.param_groups[index]
                kept = {key: original[key] for key in ("capturable", "foreach") if key in _on_host(original)}
                original.update(settings_in(group, self._own) | kept)

    def reset(self) -> None:
        """Reset the state to the one before the first step."""
        self.optimizer.state.clear()
        self.optimizer.state.update({key: _duplicate(value) for key, value in self._initial.items()})
        for group, initial in zip(self.optimizer.param_groups, self._initial_groups, strict=True):
            for key in self._of_step(group):
                del group[key]
            group.update(copy.deepcopy(initial))

    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays of the state, preceded by an array that marks the entries present.

        The entries are found by the first step of a copy: with the current settings, and with a momentum, which a
        scheduler may set later.

        Raises:
            ValueError: the state holds something other than tensors and numbers.
        """
        self._follow()
        found: dict[EntryKey, Any] = {}
        for momentum in (0.0, 0.5):
            trial = in_train_mode(_deep_copy(self.optimizer))
            for group in trial.param_groups:
                if "momentum" in group:
                    group["momentum"] = group["momentum"] or momentum
                for center in group["params"]:
                    center.grad = torch.zeros_like(center)
            trial.step()
            found.update(_entries(trial, self._own))
        counting = [key for key in sorted(self._own.attributes) if type(vars(self.optimizer).get(key)) in (int, float)]
        if counting:
            raise ValueError(
                f"{type(self.optimizer).__name__} changes its attribute {counting[0]!r} when it steps, but processes "
                f"can share only tensors and numbers in its state. Pass another `{outer_name()}`"
            )
        self.keys = {place: type(value) for place, value in found.items()}
        return [((len(found),), "bool"), *map(_shape, found.values())]

    def keeps_state(self) -> bool:
        """Return whether a step with the current settings leaves any state."""
        trial = _deep_copy(self.optimizer)
        for group in trial.param_groups:
            for center in group["params"]:
                center.grad = torch.zeros_like(center)
        in_train_mode(trial).step()
        kept = [state.values() if isinstance(state, dict) else [state] for state in trial.state.values()]
        return any(value is not None for values in kept for value in values)

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Use these arrays as the state."""
        present, *values = arrays
        for (place, kind), there, array in zip(self.keys.items(), present, values, strict=True):
            holder, key = self._holder(place), place[-1]
            if there:
                holder[key] = _number(kind, array) if kind in _NUMBERS else torch.from_numpy(array)
            else:
                holder.pop(key, None)

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy the state into these arrays, unless they are the state itself.

        Raises:
            ValueError: the state has entries that :meth:`shapes` did not find.
        """
        present, *values = arrays
        here = _entries(self.optimizer, self._own)
        unknown = sorted({key for _, _, key in here.keys() - self.keys.keys()})
        if unknown:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps {unknown[0]!r} now, which it did not at construction, but "
                f"processes share only what it kept then: set hyper-parameters earlier, or pass another "
                f"`{outer_name()}`"
            )
        for n, (place, array) in enumerate(zip(self.keys, values, strict=True)):
            present[n] = place in here
            value = here.get(place)
            if isinstance(value, torch.Tensor) and value.data_ptr() != array.ctypes.data:
                torch.from_numpy(array).copy_(value)
            elif isinstance(value, _NUMBERS):
                array[...] = value

    def _holder(self, place: EntryKey) -> dict[Any, Any]:
        """Return the dict in which the optimizer keeps the value at a location."""
        group, index, _ = place
        if group == _OF_ALL:
            return self.optimizer.state
        of_group: dict[str, Any] = self.optimizer.param_groups[group]
        return of_group if index == _OF_GROUP else self.optimizer.state[of_group["params"][index]]

    def _of_step(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a parameter group that are state."""
        return {key: group[key] for key in self._own.keys & group.keys()}

    def _construct(self, groups: list[dict[str, Any]], own: OwnState) -> torch.optim.Optimizer:
        """Return a new optimizer over these groups, with the settings of the template's first groups, in order."""
        if self._template is None:
            return _make(self._source, groups)
        for index, group in zip(self._groups, groups, strict=False):
            group.update(self._settings_of(index, own))
        return copied(self._template, groups, own)

    def _settings_of(self, index: int, own: OwnState) -> dict[str, Any]:
        """Return the hyper-parameters of a group of the template, adapted to the device of the centers."""
        group = {} if self._template is None else settings_in(self._template.param_groups[index], own)
        return group | (_on_host(group) if self._on_host else {})

    def _follow(self) -> None:
        if self._template is not None:
            for index, group in zip(self._groups, self.optimizer.param_groups, strict=True):
                group.update(self._settings_of(index, self._own))


def _deep_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a deep copy, parameters included; torch's own deep copy omits the attributes of subclasses."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    for key, value in vars(optimizer).items():
        if key not in vars(twin):
            setattr(twin, key, copy.deepcopy(value, memo))
    return twin


_NUMBERS = (bool, int, float)


def _entries(optimizer: torch.optim.Optimizer, own: OwnState) -> dict[EntryKey, Any]:
    """Return all state entries, by location.

    Raises:
        ValueError: an entry is neither a tensor nor a number.
    """
    found: dict[EntryKey, Any] = {}
    for g, group in enumerate(optimizer.param_groups):
        found |= {(g, _OF_GROUP, key): group[key] for key in sorted(own.keys & group.keys())}
        for i, center in enumerate(group["params"]):
            found |= {(g, i, key): value for key, value in sorted(optimizer.state.get(center, {}).items())}
    state: dict[Any, Any] = optimizer.state
    others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    found |= {(_OF_ALL, 0, key): value for key, value in others.items() if value != {}}
    found = {place: value for place, value in found.items() if value is not None}
    for (*_, key), value in found.items():
        if not isinstance(value, (torch.Tensor, *_NUMBERS)):
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r} as {type(value).__name__}: processes can share "
                f"tensors and numbers only. Pass another `{outer_name()}`"
            )
    return found


def _shape(value: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of the array that holds a tensor or a number."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return (), "bool" if isinstance(value, bool) else "float64"


def _number(kind: type, array: np.ndarray) -> Any:
    """Return the number in an array, as an int if it was an int and still is integral."""
    number = array.item()
    return int(number) if kind is int and number.is_integer() else number


def _duplicate(value: Any) -> Any:
    """Return a copy of the state under one key, which is a parameter or a name."""
    return (
        {key: copy.deepcopy(each) for key, each in value.items()} if isinstance(value, dict) else copy.deepcopy(value)
    )


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
            f"{type(optimizer).__name__} requires a closure, but the center has no loss to evaluate. "
            f"Pass another `{outer_name()}`"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            "SparseAdam takes only sparse gradients, but those of the center are dense. Pass another "
            f"`{outer_name()}`, such as lambda groups: torch.optim.Adam(groups)"
        )


def _on_host(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that differ for tensors in host memory, which no CUDA graph captures.

    A learning rate that is a tensor has to be in host memory, too; with ``foreach`` it would need a capturable step.
    """
    return _in_host_memory(group) | ({"capturable": False, "foreach": None} if group.get("capturable") else {})


def _in_host_memory(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the settings that are tensors on another device, such as a learning rate."""
    return {key: value.cpu() for key, value in group.items() if isinstance(value, torch.Tensor) and not value.is_cpu}


def _on_device_of(value: Any, former: Any) -> Any:
    """Return a setting that came from another rank, on the device of the one that it replaces."""
    both = isinstance(value, torch.Tensor) and isinstance(former, torch.Tensor)
    return value.to(former.device) if both else value


def _in_words(value: Any) -> Any:
    """Return a setting for comparison between ranks, without the device, which has another number on each."""
    return value.cpu().tolist() if isinstance(value, torch.Tensor) else value
