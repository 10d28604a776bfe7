"""Copies of torch optimizers, and the part of their parameter groups that their own steps change."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeAlias

import torch

from hvd_periodic.arguments import outer_name
from hvd_periodic.torch.gradient_averaging import innermost, plain_class
from hvd_periodic.torch.neutral import random_numbers_kept

Groups: TypeAlias = list[dict[str, Any]]

TRIAL_STEPS = 16
"""Enough for late changes: a learned step size compares gradients, and RAdam begins to adapt at the sixth step."""

_LARGEST = 4
"""Most elements per dimension of the tensors on which a copy is tried."""


@dataclass(frozen=True)
class OwnState:
    """State that an optimizer keeps in its parameter groups and attributes, among the hyper-parameters.

    Attributes:
        keys: keys of parameter groups, such as a step counter, or the mode of a schedule-free optimizer.
        learned: the ``keys`` whose values depend on the gradients, such as the step size of Prodigy.
        attributes: names of attributes of the optimizer.
    """

    keys: frozenset[str] = frozenset()
    learned: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()

    def __or__(self, other: OwnState) -> OwnState:
        return OwnState(self.keys | other.keys, self.learned | other.learned, self.attributes | other.attributes)


def settings_in(group: Mapping[str, Any], own: OwnState = OwnState()) -> dict[str, Any]:
    """Return the settings of a parameter group, for schedulers and users: all but parameters and own state."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names", *own.keys}}


def copied(template: torch.optim.Optimizer, groups: Groups, own: OwnState = OwnState()) -> torch.optim.Optimizer:
    """Return a new optimizer of the template's class, with its attributes.

    Constructor arguments are looked up by name among the defaults, in which optimizers keep settings that a group may
    override, and among the attributes. Some act in the constructor only, such as Adagrad's initial accumulator. The
    copy does not take over attributes that are the template's own state.

    Raises:
        TypeError: the template's class cannot be constructed from parameter groups, defaults and attributes.
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
    for key in vars(made).keys() & attributes.keys() - _every_optimizer_has() - own.attributes:
        setattr(made, key, copy.deepcopy(attributes[key]))
    return made


def fresh_copy(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and settings over one parameter, ready to step; see :func:`copied`."""
    return in_train_mode(copied(optimizer, [{"params": [parameter]}]))


def deep_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a deep copy, parameters included; torch's own deep copy omits the attributes of subclasses."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    for key, value in vars(optimizer).items():
        if key not in vars(twin):
            setattr(twin, key, copy.deepcopy(value, memo))
    return twin


def in_train_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Put the optimizer into train mode, if it has modes as schedule-free optimizers do, and return it."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of every parameter group, without entries that the optimizer's own steps change.

    If the optimizer cannot be copied, its steps cannot be tried, and all entries are returned.
    """

    def make(groups: Groups, own: OwnState) -> torch.optim.Optimizer:
        for group, settings in zip(groups, optimizer.param_groups, strict=True):
            group.update(settings_in(settings, own))
        return copied(optimizer, groups, own)

    own = own_state(make, optimizer, [group["params"] for group in optimizer.param_groups])
    return [settings_in(group, own) for group in optimizer.param_groups]


def own_state(
    make: Callable[[Groups, OwnState], torch.optim.Optimizer],
    template: torch.optim.Optimizer | None,
    like: Sequence[Sequence[torch.Tensor]],
) -> OwnState:
    """Return the state that an optimizer changes outside the state of its parameters; empty if none can be tried.

    ``make`` makes an optimizer from parameter groups, as a copy of the template if there is one, without its own state.
    The trial uses a small tensor for each number of dimensions that the tensors of a group in ``like`` have.
    """
    # A maximum that a used template has reached no longer changes: also try a copy with the constructor's defaults.
    defaults = frozenset() if template is None else frozenset(innermost(template).defaults)
    found = OwnState()
    for left_out in {frozenset(), defaults}:
        found |= _changed_by_steps(lambda groups, left_out=left_out: make(groups, OwnState(left_out)), like)  # type: ignore[misc]
    return found


def _changed_by_steps(
    make: Callable[[Groups], torch.optim.Optimizer], like: Sequence[Sequence[torch.Tensor]]
) -> OwnState:
    try:
        with random_numbers_kept():
            gradients = (lambda places, step: places, lambda places, step: torch.cos(places * step))
            seen, others = (_tried(make, [_small(tensors) for tensors in like], gradient) for gradient in gradients)
    except Exception:
        return OwnState()
    keys, attributes = (_changed([each[part] for each in seen]) for part in (0, 1))
    return OwnState(keys, keys & _changed([seen[-1][0], others[-1][0]]), attributes)


def _tried(
    make: Callable[[Groups], torch.optim.Optimizer],
    parameters: Sequence[Sequence[torch.Tensor]],
    gradient: Callable[[torch.Tensor, int], torch.Tensor],
) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return the values of parameter groups and attributes: at the start, after some steps, and in eval mode."""
    optimizer = make([{"params": tensors} for tensors in parameters])
    if {id(p) for group in optimizer.param_groups for p in group["params"]} - {id(p) for p in chain(*parameters)}:
        raise ValueError  # A function has returned an optimizer over other parameters, which must not change.
    for group in optimizer.param_groups:
        group.update(copy.deepcopy(settings_in(group)))  # Tensors may belong to another optimizer.
        if group.get("lr") is not None and not group["lr"]:  # A warm-up may begin at 0, which moves nothing.
            group["lr"] = 0.1
    seen = [_values(optimizer)]
    in_train_mode(optimizer)
    for step in range(1, TRIAL_STEPS + 1):
        for parameter in chain(*parameters):
            parameter.grad = gradient(torch.arange(1.0, parameter.numel() + 1), step).reshape(parameter.shape)
        optimizer.step()
    seen.append(_values(optimizer))
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()  # type: ignore[attr-defined]
        seen.append(_values(optimizer))
    return seen


def _small(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a small tensor for each number of dimensions among the tensors."""
    shapes = {tensor.dim(): tuple(min(size, _LARGEST) for size in tensor.shape) for tensor in tensors if tensor.numel()}
    return [torch.ones(shape) for shape in shapes.values()] or [torch.ones(1)]


def _values(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], dict[Any, Any]]:
    groups = {
        (index, key): copy.deepcopy(value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in settings_in(group).items()
    }
    others = vars(optimizer).keys() - _every_optimizer_has()
    attributes = {key: vars(optimizer)[key] for key in others if not _holds_tensors(vars(optimizer)[key])}
    return groups, {(0, key): copy.deepcopy(value) for key, value in attributes.items()}


def _every_optimizer_has() -> set[str]:
    """Return the names of the attributes that every optimizer has."""
    return set(vars(torch.optim.Optimizer([torch.zeros(1)], {})))


def _changed(seen: Sequence[Mapping[Any, Any]]) -> frozenset[str]:
    """Return the keys whose value was added or changed from one observation to the next."""
    return frozenset(
        key
        for before, after in pairwise(seen)
        for (index, key), value in after.items()
        if (index, key) not in before or not _same(before[index, key], value)
    )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return type(first) is type(second) and torch.equal(first, second)
    kind: Any = type(first)
    by_identity = kind.__eq__ is object.__eq__  # A copy never compares equal.
    return type(first) is type(second) if by_identity else bool(first == second)


def _arguments(made: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of a constructor's arguments; if it passes on ``**others``, also the names of its bases'."""
    names: list[str] = []
    for base in made.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())
            names += [parameter.name for parameter in parameters[2:]]
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names


def _holds_tensors(value: object) -> bool:
    """Return whether a value is tied to the parameters that an optimizer was made for, as far as can be told."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or inspect.ismethod(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, (*value.keys(), *value.values())))
    return isinstance(value, (list, tuple, set)) and any(map(_holds_tensors, value))
