"""Decides which variables of a Keras model take part in exchanges, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from hvd_periodic.keras.private import all_layers, made_untrainable
from hvd_periodic.participation import EXCHANGED, Broadcast, Local, Policies, by_policy, participation_of
from hvd_periodic.participation.buffers import AVERAGE, BROADCAST, BUFFERS, LOCAL, MAXIMUM, is_statistic

Named = Sequence[tuple[str, Any]]
"""Variables with their names."""

Native = Callable[[Any], Any]


@dataclass(frozen=True)
class NamedVariables:
    """The named variables of a model, by their role in exchanges.

    Attributes:
        parameters: variables on which the algorithm acts.
        averaged: real statistics, averaged at every exchange.
        counted: variables that take the maximum over ranks at every exchange, such as integers.
        followed: variables that take the root's values at every exchange.
        constants: variables that are broadcast at the start only.
        frozen: those of ``constants`` that nothing changes.
        constraints: for every parameter, the constraint that Keras applies after each update, or None.
        deriving: layers that compute with values derived from their weights; ``finalize_state()`` recomputes them.
        unasked: those of ``constants`` that the user has not asked to be constant.
        following: trained variables that take the root's values at every exchange.
        trained: number of trained variables.
        positions: the index of every parameter among the trained variables, if there are others; None: all of these
            are parameters.
        own: trained variables that are not exchanged.
        by_policy: names of the trained variables that have another policy than the default, by the policy's name.
        formerly: for every variable that version 0.1 averaged, whether it is in ``averaged``; empty if the user has
            chosen policies.
    """

    parameters: Named
    averaged: Named = field(default_factory=list)
    counted: Named = field(default_factory=list)
    followed: Named = field(default_factory=list)
    constants: Named = field(default_factory=list)
    frozen: Named = field(default_factory=list)
    constraints: Sequence[Callable[[Any], Any] | None] = ()
    deriving: Sequence[Any] = ()
    unasked: Named = field(default_factory=list)
    following: Named = field(default_factory=list)
    trained: int = 0
    positions: Sequence[int] | None = None
    own: Named = field(default_factory=list)
    by_policy: Mapping[str, Sequence[str]] = field(default_factory=dict)
    formerly: Sequence[bool] = ()

    def names(self) -> dict[int, str]:
        """Return the names of all variables here, by their ``id``."""
        roles = (self.parameters, self.averaged, self.counted, self.followed, self.constants, self.following)
        return {id(variable): name for role in roles for name, variable in role}


def described(value: object) -> str:
    """Return the type name of an invalid argument; for an object of Keras 2, with advice."""
    kind = type(value)
    old = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "tf_keras"), None)
    if old is None:
        return kind.__name__
    return (
        f"{kind.__name__} of tf_keras, which is Keras 2. Exchanges are for Keras 3: unset the environment variable "
        "TF_USE_LEGACY_KERAS, which makes tf.keras tf_keras, or take model and optimizer from `import keras`; a script "
        "that needs tf_keras exchanges with hvdp.Synchronizer(model.trainable_variables, ...) in its own loop"
    )


def check_policy(buffers: Policies, model: object, loaded: bool = False) -> None:
    """Check that ``buffers`` holds valid policies, and that ``model`` is a Keras model or None.

    A loaded optimizer may get its model later.

    Raises:
        TypeError: the model or the policies have another type.
        ValueError: a policy is unknown, or needs a model and there is none.
    """
    BUFFERS.check(buffers)
    if model is not None and not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {described(model)}")
    if buffers not in (None, LOCAL) and model is None and not loaded:
        raise ValueError(f"`buffers={buffers!r}` needs the model, which knows its statistics: pass `model`")


def named_variables(
    trained: Sequence[Any],
    model: keras.Model | None,
    buffers: Policies,
    parameters: Policies = None,
    native: Native = lambda variable: variable,
    former: Mapping[int, str] = MappingProxyType({}),
) -> NamedVariables:
    """Return variables by role.

    Args:
        trained: the trained variables.
        model: the model to which they belong. Its other weights are exchanged according to ``buffers``, or broadcast at
            the start. Seeds and metrics stay local.
        buffers: a policy for the layers' variables that are neither trainable nor frozen weights; or policies by
            patterns or by a function, for all weights that are not trained. Default: the mean of variables whose names
            mark them as statistics, and the maximum of integers.
        parameters: policies of the trained variables, see :class:`~hvd_periodic.options.Options`.
        native: returns the variable behind one of Keras, which takes its place in the result.
        former: names by which the variables behind some of them, given by ``id``, are known already.

    Raises:
        ValueError: a parameter is given twice; or a pattern matches no weight.
    """
    names = set(former.values())

    def name_of(variable: Any) -> str:
        return former.get(id(native(variable))) or _unique(variable, names)

    held = {id(native(variable)) for variable in trained}
    if len(held) < len(trained):
        raise ValueError(
            f"A variable must be given once. Received: {len(trained)} variables, {len(held)} of them different"
        )
    deriving = [] if model is None else _deriving(model)
    known = set() if model is None else {id(native(variable)) for variable in _statistics(model, deriving)}
    others = [weight for weight in ([] if model is None else model.weights) if id(native(weight)) not in held]
    weights = [(name_of(weight), weight) for weight in others if _is_number(weight)]
    BUFFERS.check_patterns(buffers, [*dict.fromkeys([*(name for name, _ in weights), *former.values()])])
    roles: dict[str, list[tuple[str, Any]]] = {policy: [] for policy in BUFFERS.policies}
    frozen, unasked, formerly = [], [], []
    for name, weight in weights:
        variable, statistic = native(weight), id(native(weight)) in known
        policy = _policy(buffers, name, weight, statistic)
        roles[policy].append((name, variable))
        if policy == LOCAL and not statistic and not weight.trainable:
            frozen.append((name, variable))
        if policy == LOCAL and buffers != LOCAL and BUFFERS.policy_of(buffers, name, weight) != LOCAL:
            unasked.append((name, variable))
        if buffers is None and statistic and _has_mean(weight):
            formerly.append(policy == AVERAGE)
    named = [(name_of(variable), native(variable)) for variable in trained]
    untrained = [name for name, weight in weights if id(native(weight)) not in known]
    pairs = [(name, v) for (name, _), v in zip(named, trained, strict=True)]
    participation = participation_of(parameters, pairs, [*untrained, *former.values()])
    positions = [i for i, (name, _) in enumerate(named) if participation[name] in EXCHANGED]
    special = by_policy(participation, named)
    return NamedVariables(
        [named[i] for i in positions],
        averaged=roles[AVERAGE],
        counted=roles[MAXIMUM],
        followed=roles[BROADCAST],
        constants=roles[LOCAL],
        frozen=frozen,
        constraints=[getattr(trained[i], "constraint", None) for i in positions],
        deriving=deriving,
        unasked=unasked,
        following=[pair for pair in named if pair[0] in special.get(Broadcast.name, ())],
        trained=len(named),
        positions=positions if len(positions) < len(named) else None,
        own=[pair for pair in named if pair[0] in special.get(Local.name, ())],
        by_policy=special,
        formerly=formerly,
    )


def _deriving(model: keras.Model) -> list[Any]:
    """Return layers that compute with values derived from untrained weights, such as Normalization."""
    return [layer for layer in all_layers(model) if hasattr(layer, "finalize_state") and layer.weights]


def _statistics(model: keras.Model, deriving: Iterable[Any]) -> Iterator[Any]:
    """Yield the variables that training changes without gradients, as opposed to frozen weights."""
    for layer in all_layers(model):
        if layer not in deriving:
            yield from made_untrainable(layer)


def _policy(buffers: Policies, name: str, weight: Any, statistic: bool) -> str:
    """Return the policy of a weight; a single policy for all applies to statistics only."""
    for_all = buffers is None or isinstance(buffers, str)
    policy = LOCAL if for_all and not statistic else BUFFERS.policy_of(buffers, name, weight)
    if policy is None:
        for_all = True
        policy = AVERAGE if statistic and (is_statistic(name) or not _is_real(weight)) else LOCAL
    if not math.prod(weight.shape):
        return LOCAL
    if policy == AVERAGE and not _is_real(weight):
        return MAXIMUM
    return LOCAL if policy == AVERAGE and for_all and not _has_mean(weight) else policy


def _has_mean(variable: Any) -> bool:
    """Return whether a variable has real, finite values and is not empty."""
    if not _is_real(variable) or not math.prod(variable.shape):
        return False
    return bool(np.isfinite(np.asarray(keras.ops.convert_to_numpy(variable), np.float64)).all())


def _is_real(variable: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype)))


def _is_number(variable: Any) -> bool:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return _is_real(variable) or dtype == "bool" or "int" in dtype


def _unique(variable: Any, names: set[str]) -> str:
    """Return the variable's path, with a number if another variable has the same path."""
    path = str(getattr(variable, "path", variable.name)).partition(":")[0]
    name, number = path, 1
    while name in names:
        number += 1
        name = f"{path}_{number}"
    names.add(name)
    return name
