"""Private names of TensorFlow, and of Keras on TensorFlow: no other module uses them, except those of TensorFlow 1.

Every function says why no public name suffices. ``tests/unit/test_tensorflow_private.py`` checks the purpose of each
function, and fails if an upgrade has changed it. Private names of Horovod are in ``gradient_averaging.py``, and those
of Keras on any backend in ``hvd_periodic/keras/private.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.variables import default_variable_creator_v2


def create_variable(**options: Any) -> tf.Variable:
    """Create a variable without variable creators: a function being compiled again has one that refuses."""
    return default_variable_creator_v2(**options)


def compiles_with_xla() -> bool:
    """Return whether XLA compiles the function being traced; it would fail later, at unknown operations."""
    return not tf.executing_eagerly() and bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def eager() -> AbstractContextManager[None]:
    """Return a ``with`` block in which operations run at once, even if the program has disabled eager execution.

    In such a program, threads that run Python code of a graph, and threads that these start, would add operations to a
    graph, which ``tf.init_scope`` does not leave.
    """
    block: AbstractContextManager[None] = tf.__internal__.eager_context.eager_mode()
    return block


def list_variables(optimizer: keras.optimizers.Optimizer, old: Sequence[Any], new: Sequence[Any]) -> None:
    """Replace the variables ``old`` of an optimizer by ``new``, at the end of its list: Keras can only add variables.

    This makes a new list: TensorFlow saves no checkpoint of a list from which an element was removed.
    """
    gone = set(map(id, old))
    tracker, kept = optimizer._tracker, [variable for variable in optimizer._variables if id(variable) not in gone]
    listed = tf.__internal__.tracking.wrap([*kept, *new])
    optimizer._track_trackable(listed, "_variables", overwrite=True)
    object.__setattr__(optimizer, "_variables", listed)
    tracker.config["variables"] = tracker.config["variables"][0], listed
    tracker.stored_ids["variables"] = set(map(id, listed))


def build_again(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer on other variables, in place: Keras builds only once.

    State of variables that stay, and state that belongs to none, keeps its values. That of the others is as in a new
    optimizer, except for moving averages of variables, which start from the variables.
    """
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    levels = [optimizer, optimizer.inner_optimizer] if scales else [optimizer]
    before = [dict(vars(level)) for level in levels]
    for level in levels:
        level.built = False
        level._trainable_variables_indices.clear()
    optimizer.build(list(variables))
    for level, former in zip(levels, before, strict=True):
        _keep_state(level, former)
        attributes = (value for name, value in vars(level).items() if name != "_variables")
        held = {id(each) for value in attributes for each in (value if isinstance(value, list) else [value])}
        list_variables(level, [variable for variable in level._variables if id(variable) not in held], [])


def _keep_state(optimizer: Any, former: Mapping[str, Any]) -> None:
    """Assign the values that the attributes of an optimizer had on other variables."""
    then = {id(variable): i for i, variable in enumerate(former["_trainable_variables"])}
    trained = optimizer._trainable_variables
    stays = [(i, then[id(variable)]) for i, variable in enumerate(trained) if id(variable) in then]
    if optimizer.use_ema:
        for average, variable in zip(optimizer._model_variables_moving_average, trained, strict=True):
            average.assign(variable)
    for name, new in vars(optimizer).items():
        old, pairs = former.get(name), [(new, former.get(name))]
        if name in ("_variables", "_trainable_variables"):  # Not by trained variable, though their number may agree.
            continue
        if isinstance(new, list) and isinstance(old, list):
            here = len(new) == len(trained) and len(old) == len(then)
            pairs = [(new[i], old[j]) for i, j in stays] if here else []
        for variable, kept in pairs:
            if variable is not kept and isinstance(variable, keras.Variable) and isinstance(kept, keras.Variable):
                variable.assign(kept)


def know(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Replace the variables that a built optimizer knows, which has no state of them."""
    optimizer._trainable_variables_indices.clear()
    optimizer._trainable_variables_indices.update({optimizer._var_key(v): i for i, v in enumerate(variables)})
    object.__setattr__(optimizer, "_trainable_variables", list(variables))  # An attribute would be tracked.


def track(owner: Any, part: Any, name: str) -> None:
    """Add a part of an object to TensorFlow checkpoints; an attribute would add it to Keras files as well."""
    owner._track_trackable(part, name, overwrite=True)


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Return whether an optimizer decays a variable: ``exclude_from_weight_decay`` only sets this."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_same_names(optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer) -> None:
    """Exclude the names from weight decay that ``other`` excludes; a configuration does not hold them."""
    pattern = getattr(other, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None:
        optimizer._exclude_from_weight_decay_pattern = pattern
