"""A torch optimizer that moves the center."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_periodic.arguments import outer_name
from hvd_periodic.outer.elementwise import require_elementwise
from hvd_periodic.outer.framework import misfit
from hvd_periodic.outer.per_fragment import CloneableOptimizer
from hvd_periodic.torch.copies import OwnState, copied, deep_copy, in_train_mode, own_state, settings_in
from hvd_periodic.torch.modes import Modes
from hvd_periodic.torch.sharded_parameters import is_sharded
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.lending import lends
from hvd_periodic.vectors.store import FlatStore, Store

EntryKey: TypeAlias = tuple[int, int, str]
"""Location of a state entry: parameter group, number in the group, key; see ``_OF_GROUP``, ``_OF_ALL``."""

_OF_GROUP, _OF_ALL = -1, -1
"""As the number: state in the parameter group itself; as the group: state that belongs to no parameter."""

CenterOptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer over the same parameters, to be copied, or a function from parameter groups to an optimizer."""


class TorchOuterOptimizer(CloneableOptimizer):
    """An optimizer over views of the center variables, made when the center is bound.

    A copy takes over the original's class, constructor arguments, attributes and hyper-parameters. It reads the
    hyper-parameters again before every step, so a learning-rate scheduler of the original drives both. It shares no
    state with the original: its constructor makes the initial state from the centers. State in parameter groups means
    entries that the optimizer's own steps change, such as a step counter.

    Args:
        source: an optimizer of the same parameters to be copied, or a function from parameter groups to an optimizer.
        local: the local optimizer, if there is one; such a function receives the centers in the same parameter groups.
        parameters: the model's exchanged parameters, in layout order.
    """

    def __init__(
        self, source: CenterOptimizerLike, local: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.source = source
        self._local = local
        self._parameters = parameters
        self._template = source if isinstance(source, torch.optim.Optimizer) else None
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        groups = [[numbers[id(p)] for p in group["params"] if id(p) in numbers] for group in self._original_groups()]
        self._grouping = [group for group in groups if group]
        self._optimizer: torch.optim.Optimizer | None = None
        self._keys: dict[EntryKey, type] = {}
        self._followed: list[dict[str, Any]] = []

    def clone(self) -> TorchOuterOptimizer:
        """Return an optimizer like this one, without a center yet."""
        return TorchOuterOptimizer(self.source, self._local, self._parameters)

    def grouping(self) -> list[list[int]]:
        """Return the exchanged parameters, by number, of every parameter group that had any at construction."""
        return self._grouping

    @property
    def name(self) -> str:
        """The class of the optimizer; before :meth:`bind`, of its source."""
        return type(self.source if self._optimizer is None else self._optimizer).__name__

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, once the center is bound."""
        if self._optimizer is None:
            raise RuntimeError("The outer optimizer has no center yet: bind() comes first")
        return self._optimizer

    def bind(self, center: Store[torch.Tensor], gradient: Store[torch.Tensor], whole: Layout) -> None:
        """Make the optimizer.

        Raises:
            TypeError: ``source`` makes no torch optimizer, its class cannot be constructed from parameter groups,
                defaults and attributes, or it needs a closure or sparse gradients.
            ValueError: the optimizer lacks some of the parameters, or has others.
        """
        centers = center.tensors()
        for of_center, of_gradient in zip(centers, gradient.tensors(), strict=True):
            of_center.grad = of_gradient
        groups: list[dict[str, Any]] = []
        like: list[list[torch.Tensor]] = []
        self._groups: list[int] = []
        centers_of: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in self._parameters}
        self._owned = [(owner, c) for (owner, _, _), c in zip(center.layout.sources, centers, strict=True)]
        for owner, of_center in self._owned:
            centers_of[id(self._parameters[owner])].append(of_center)
        for index, group in enumerate(self._original_groups()):
            present = [p for p in group["params"] if id(p) in centers_of]
            members = [of_center for p in present for of_center in centers_of[id(p)]]
            if present and not members:  # Keep the numbers of groups of which this rank holds nothing.
                members = [torch.zeros(0, dtype=torch.float32)]
                centers += members
            if members:
                self._groups.append(index)
                groups.append({"params": members})
                like.append(present)
        _check_complete(groups, centers)
        self._on_host = True
        self._own = own_state(self._construct, self._template, like)
        self._on_host = all(of_center.device.type == "cpu" for of_center in centers)
        made = self._construct(groups, self._own)
        _check_complete(made.param_groups, centers)
        _check_steps(made)
        self._modes = Modes(made)
        self._initial = {key: _duplicate(value) for key, value in made.state.items()}
        self._initial_groups = [copy.deepcopy(self._of_step(group)) for group in made.param_groups]
        self._require_all(type(made).__name__, center.layout, whole)
        require_elementwise(type(made).__name__, center.layout, whole, self._steps)
        self._optimizer, self._followed = made, []

    def _require_all(self, name: str, share: Layout, whole: Layout) -> None:
        """Raise a ValueError if an optimizer that learns from all parameters would have only some of them."""
        elements = [sum(layout.arenas.values()) for layout in (share, whole)]
        divided = any(map(is_sharded, self._parameters))
        if self._own.learned and (divided or 0 < elements[0] < elements[1]):
            raise ValueError(
                f"{name} learns {', '.join(map(repr, sorted(self._own.learned)))} of its parameter groups "
                "from the gradients of all parameters, and would learn other values on each part of the center, "
                f"which is divided here (by {'islands' if divided else share.cut or 'fragments'}). Pass another "
                f"`{outer_name()}`, such as lambda groups: torch.optim.SGD(groups, lr=1.0)"
            )

    def _steps(self, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        """Return ``x`` after a new optimizer of this kind has taken one step per gradient."""
        moved = torch.from_numpy(x.copy())
        optimizer = in_train_mode(self._construct([{"params": [moved]}], self._own))
        for group in optimizer.param_groups:
            group.update(_on_host(group))
        for gradient in gradients:
            moved.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
        return moved.numpy()

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step, by readable name."""
        if self._optimizer is None:
            return {}
        self._follow()
        return {
            f"{key} of group {i} of the center optimizer": _in_words(value)
            for i, group in enumerate(self._optimizer.param_groups)
            for key, value in sorted(settings_in(group, self._own).items())
        }

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return copies of the hyper-parameters of every group for the next step, for ranks with any device."""
        self._follow()
        groups = [settings_in(group, self._own) for group in self.optimizer.param_groups]
        return copy.deepcopy([group | _in_host_memory(group) for group in groups])

    def follow(self, settings: Any) -> None:
        """Use these hyper-parameters of all groups for the next step."""
        self._followed = settings or []

    def take_hyperparameters(self, settings: Any) -> None:
        """Set these hyper-parameters of all groups, if the center is in this process."""
        if self._optimizer is not None:
            self._set(settings or [])

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, taken in zip(self.optimizer.param_groups, settings, strict=False):
            group.update({key: _on_device_of(value, group.get(key)) for key, value in taken.items()})

    def step(self, without: Set[int] = frozenset()) -> None:
        """Take one step on the centers, with their gradients."""
        self._follow()
        passed_over = [(of_center, of_center.grad) for owner, of_center in self._owned if owner in without]
        for of_center, _ in passed_over:
            of_center.grad = None
        self._set(self._followed)
        in_train_mode(self.optimizer).step()
        for of_center, gradient in passed_over:
            of_center.grad = gradient
        self._modes.evaluate()

    def state(self) -> Any:
        """Return the state dict; None if the center is not in this process.

        It is a copy, except inside :func:`~hvd_periodic.vectors.lending.lending`.
        """
        if self._optimizer is None:
            return None
        self._follow()
        state = self._optimizer.state_dict()
        return state if lends() else copy.deepcopy(state)

    def check(self, state: Any) -> None:
        """Check the parameter groups of a state dict, and the tensors of each parameter that has any state.

        Raises:
            ValueError: a group has another number of tensors; or a tensor is missing, or has another shape.
        """
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            raise misfit(self.name, "it is not a state dict with 'state' and 'param_groups'")
        groups = [list(group["params"]) for group in state["param_groups"]]
        there, here = (
            [len(each) for each in of] for of in (groups, [g["params"] for g in self.optimizer.param_groups])
        )
        if there != here:
            raise misfit(self.name, f"its parameter groups have {there} tensors, and {here} here")
        for number, expected in zip(chain(*groups), self._stepped(state), strict=True):
            saved = state["state"].get(number) or {}
            for key, shape in expected.items() if saved else ():
                if key not in saved:
                    raise misfit(self.name, f"it has no {key!r} of tensor {number}")
                found = getattr(saved[key], "shape", shape)
                if found != shape:
                    raise misfit(
                        self.name, f"{key!r} of tensor {number} has shape {tuple(found)}, and {tuple(shape)} here"
                    )

    def _stepped(self, state: Mapping[str, Any]) -> list[dict[str, torch.Size]]:
        """Return the shapes of the tensors that each parameter has after a step with the settings of a state dict.

        Loading restores these settings. The step is one of tensors without memory; an optimizer that cannot take it may
        have any state.
        """
        groups = [
            {"params": [torch.empty_like(center, device="meta") for center in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        tensors: list[torch.Tensor] = [tensor for group in groups for tensor in group["params"]]
        for tensor in tensors:
            tensor.grad = torch.empty_like(tensor)
        try:
            trial = self._construct(groups, self._own)
            for group, saved in zip(trial.param_groups, state["param_groups"], strict=True):
                settings = settings_in(saved, self._own)
                group.update(settings | (_on_host(settings) if self._on_host else {}))
            in_train_mode(trial).step()
        except Exception:
            return [{} for _ in tensors]
        entries = [trial.state.get(tensor, {}) for tensor in tensors]
        return [{key: v.shape for key, v in each.items() if isinstance(v, torch.Tensor)} for each in entries]

    def load(self, state: Any) -> None:
        """Load a state dict; a template other than the local optimizer also gets its hyper-parameters back."""
        self.optimizer.load_state_dict(copy.deepcopy(state))
        if self._template is not None and self._template is not self._local:
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

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Make the optimizer on tensors that are views of the arrays."""
        views = [
            FlatStore(store.layout, lambda kind, size, store=store: torch.from_numpy(store.arena(kind)))  # type: ignore[misc]
            for store in (center, gradient)
        ]
        self.bind(views[0], views[1], whole)

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays of the state, preceded by an array that marks the entries present.

        The entries are found by the first step of a copy on a center of zeros in host memory: with the current
        settings, and with a momentum, which a scheduler may set later.
        """

        def zeros(kind: str, size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=getattr(torch, kind.split()[0]))

        self.bind(FlatStore(layout, zeros), FlatStore(layout, zeros), layout)
        self._follow()
        found: dict[EntryKey, Any] = {}
        for momentum in (0.0, 0.5):
            found.update(_entries(self._stepped_copy(momentum), self._own))
        counting = [key for key in sorted(self._own.attributes) if type(vars(self.optimizer).get(key)) in (int, float)]
        if counting:
            raise ValueError(
                f"{type(self.optimizer).__name__} changes its attribute {counting[0]!r} when it steps, but processes "
                f"can share only tensors and numbers in its state. Pass another `{outer_name()}`"
            )
        self._keys = {place: type(value) for place, value in found.items()}
        return [((len(found),), "bool"), *map(_shape, found.values())]

    def keeps_state(self) -> bool:
        """Return whether a step with the current settings leaves any state."""
        states = self._stepped_copy().state.values()
        kept = [state.values() if isinstance(state, dict) else [state] for state in states]
        return any(value is not None for values in kept for value in values)

    def _stepped_copy(self, momentum: float = 0.0) -> torch.optim.Optimizer:
        """Return a copy after a step with gradients of zero, and with this momentum if the current one is 0."""
        trial = in_train_mode(deep_copy(self.optimizer))
        for group in trial.param_groups:
            if "momentum" in group:
                group["momentum"] = group["momentum"] or momentum
            for center in group["params"]:
                center.grad = torch.zeros_like(center)
        trial.step()
        return trial

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Use these arrays as the state."""
        present, *values = arrays
        for (place, kind), there, array in zip(self._keys.items(), present, values, strict=True):
            holder, key = self._holder(place), place[-1]
            if there:
                holder[key] = _number(kind, array) if kind in _NUMBERS else torch.from_numpy(array)
            else:
                holder.pop(key, None)

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy the state into these arrays, unless they are the state itself."""
        present, *values = arrays
        here = _entries(self.optimizer, self._own)
        unknown = sorted({key for _, _, key in here.keys() - self._keys.keys()})
        if unknown:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps {unknown[0]!r} now, which it did not at construction, but "
                f"processes share only what it kept then: set hyper-parameters earlier, or pass another "
                f"`{outer_name()}`"
            )
        for n, (place, array) in enumerate(zip(self._keys, values, strict=True)):
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

    def _original_groups(self) -> Sequence[dict[str, Any]]:
        """Return the parameter groups of the original, or those that a function receives."""
        grouping = self._local if self._template is None else self._template
        return [{"params": self._parameters}] if grouping is None else grouping.param_groups

    def _construct(self, groups: list[dict[str, Any]], own: OwnState) -> torch.optim.Optimizer:
        """Return a new optimizer over these groups, with the settings of the template's first groups, in order."""
        if self._template is None:
            return _make(self.source, groups)
        self._take_settings(groups, own)
        return copied(self._template, groups, own)

    def _follow(self) -> None:
        self._take_settings(self.optimizer.param_groups, self._own)

    def _take_settings(self, groups: list[dict[str, Any]], own: OwnState) -> None:
        """Set the hyper-parameters of groups to the template's, adapted to the device of the centers."""
        if self._template is None:
            return
        for index, group in zip(self._groups, groups, strict=False):
            settings = settings_in(self._template.param_groups[index], own)
            group.update(settings | (_on_host(settings) if self._on_host else {}))


_NUMBERS = (bool, int, float)


def _entries(optimizer: torch.optim.Optimizer, own: OwnState) -> dict[EntryKey, Any]:
    """Return all state entries, by location; refuse entries that are neither tensors nor numbers."""
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
    if isinstance(value, dict):
        return {key: copy.deepcopy(each) for key, each in value.items()}
    return copy.deepcopy(value)


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
