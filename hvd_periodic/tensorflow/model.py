"""Decides which variables of a Keras model take part in exchanges, and how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.buffers import (
    AVERAGE,
    BROADCAST,
    BUFFERS,
    LOCAL,
    MAXIMUM,
    POLICIES,
    Policies,
    is_statistic,
    participation_of,
)
from hvd_periodic.tensorflow.private import all_layers, made_untrainable
from hvd_periodic.tensorflow.replica import NamedVariables

AnyVariable = Any
"""A ``keras.Variable`` or a ``tf.Variable``."""

NO_VALUES = (
    "The variables have no values yet, because the model is built inside of the compiled step: give it its input shape "
    "with keras.Input, or call model.build(input_shape), before it is trained"
)


def native(variable: AnyVariable) -> tf.Variable:
    """Return the TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def untracked(name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
    """Create a variable that is tracked by nothing; only the caller keeps it alive."""
    value = tf.broadcast_to(tf.cast(initial_value, dtype), tuple(shape))
    return tf.Variable(value, trainable=False, name=name.replace("/", "_"))


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


def with_rest_of(model: keras.Model | None, variables: Sequence[AnyVariable]) -> list[AnyVariable]:
    """Return the variables that take part: all trainable ones of the model, as if it were built, and the given ones.

    These are the variables of the first step, which may include others than the model's.
    """
    given = set(map(id, variables))
    trained = [] if model is None else [v for v in model.trainable_variables if id(v) in given or have_values([v])]
    if given <= set(map(id, trained)):
        return trained
    return [*variables, *(variable for variable in trained if id(variable) not in given)]


def have_values(variables: Iterable[AnyVariable]) -> bool:
    """Return whether variables have values; those that a compiled function creates have none until it is compiled."""
    with tf.init_scope():
        return not tf.executing_eagerly() or all(bool(native(variable).is_initialized()) for variable in variables)


def only_makes(variables: Iterable[AnyVariable]) -> bool:
    """Return whether the function being compiled has just created the variables, so that this version never runs.

    TensorFlow initializes them and compiles the function again before it takes a step. If it cannot, since the initial
    values depend on arguments of the function, running this version is an error.
    """
    if tf.executing_eagerly() or have_values(variables):
        return False
    tf.debugging.Assert(False, [NO_VALUES])
    return True


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
    trainable: Iterable[AnyVariable],
    model: keras.Model | None = None,
    buffers: Policies = None,
    parameters: Policies = None,
) -> NamedVariables:
    """Return variables by role.

    Args:
        trainable: the trained variables.
        model: the model to which they belong. Its other weights are exchanged according to ``buffers``, or broadcast at
            the start. Seeds and metrics stay local.
        buffers: a policy for the layers' variables that are neither trainable nor frozen weights; or policies by
            patterns or by a function, for all weights that are not trained. Default: the mean of variables whose names
            mark them as statistics, and the maximum of integers.
        parameters: policies of the trained variables, see :class:`~hvd_periodic.options.Options`.

    Raises:
        TypeError: a parameter is not a variable.
        ValueError: a parameter is given twice; or a pattern matches no weight.
    """
    trained = list(trainable)
    names: set[str] = set()
    for variable in trained:
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            raise TypeError(f"Exchanged objects must be variables. Received: {type(variable).__name__}")
    held = {id(native(variable)) for variable in trained}
    if len(held) < len(trained):
        raise ValueError(
            f"A variable must be given once. Received: {len(trained)} variables, {len(held)} of them different"
        )
    deriving = [] if model is None else _deriving(model)
    known = set() if model is None else _statistics(model, deriving)
    others = [weight for weight in ([] if model is None else model.weights) if id(native(weight)) not in held]
    weights = [(_unique(weight, names), weight) for weight in others if _is_number(native(weight))]
    BUFFERS.check_patterns(buffers, [name for name, _ in weights])
    roles: dict[str, list[tuple[str, tf.Variable]]] = {policy: [] for policy in POLICIES}
    frozen, unasked, formerly = [], [], []
    for name, weight in weights:
        variable, statistic = native(weight), id(native(weight)) in known
        policy = _policy(buffers, name, weight, statistic)
        roles[policy].append((name, variable))
        if policy == LOCAL and not statistic and not weight.trainable:
            frozen.append((name, variable))
        if policy == LOCAL and buffers != LOCAL and BUFFERS.policy_of(buffers, name, weight) != LOCAL:
            unasked.append((name, variable))
        if buffers is None and statistic and _has_mean(variable):
            formerly.append(policy == AVERAGE)
    named = [(_unique(variable, names), native(variable)) for variable in trained]
    participation = participation_of(parameters, named)
    positions = [i for i, (name, _) in enumerate(named) if participation[name] == AVERAGE]
    return NamedVariables(
        [named[i] for i in positions],
        positions=positions if len(positions) < len(named) else None,
        trained=len(named),
        following=[pair for pair in named if participation[pair[0]] == BROADCAST],
        averaged=roles[AVERAGE],
        counted=roles[MAXIMUM],
        followed=roles[BROADCAST],
        constants=roles[LOCAL],
        frozen=frozen,
        constraints=[getattr(trained[i], "constraint", None) for i in positions],
        deriving=deriving,
        unasked=unasked,
        formerly=formerly,
    )


def _deriving(model: keras.Model) -> list[Any]:
    """Return layers that compute with values derived from untrained weights, such as Normalization."""
    return [layer for layer in all_layers(model) if hasattr(layer, "finalize_state") and layer.weights]


def _statistics(model: keras.Model, deriving: Iterable[Any]) -> set[int]:
    """Return the ids of variables that training changes without gradients, as opposed to frozen weights."""
    return {
        id(native(variable))
        for layer in all_layers(model)
        if layer not in deriving
        for variable in made_untrainable(layer)
    }


def _policy(buffers: Policies, name: str, weight: AnyVariable, statistic: bool) -> str:
    """Return the policy of a weight; a single policy for all applies to statistics only."""
    variable, for_all = native(weight), buffers is None or isinstance(buffers, str)
    policy = LOCAL if for_all and not statistic else BUFFERS.policy_of(buffers, name, weight)
    if policy is None:
        for_all = True
        policy = AVERAGE if statistic and (is_statistic(name) or not variable.dtype.is_floating) else LOCAL
    if not math.prod(variable.shape):
        return LOCAL
    if policy == AVERAGE and not variable.dtype.is_floating:
        return MAXIMUM
    return LOCAL if policy == AVERAGE and for_all and not _has_mean(variable) else policy


def _has_mean(variable: tf.Variable) -> bool:
    """Return whether a variable has real, finite values and is not empty."""
    real = variable.dtype.is_floating and math.prod(variable.shape) > 0
    return bool(real and np.isfinite(tf.cast(variable, tf.float64).numpy()).all())


def _is_number(variable: tf.Variable) -> bool:
    return bool(variable.dtype.is_floating or variable.dtype.is_integer or variable.dtype.is_bool)


def _unique(variable: AnyVariable, names: set[str]) -> str:
    """Return the variable's path, with a number if another variable has the same path."""
    path = str(getattr(variable, "path", variable.name)).partition(":")[0]
    name, number = path, 1
    while name in names:
        number += 1
        name = f"{path}_{number}"
    names.add(name)
    return name
