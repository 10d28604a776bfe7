"""Names of TensorFlow and Keras that are not public: the only module that uses them, but for those of TensorFlow 1.

Every function says why nothing public serves. ``tests/unit/test_tensorflow_private.py`` asks each of them for what it
is there for, and fails where an upgrade has changed that. Names of Horovod are in ``gradient_averaging.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.variables import default_variable_creator_v2


def create_variable(**options: Any) -> tf.Variable:
    """Make a variable past all creators: that of a function that is compiled again refuses to make any."""
    return default_variable_creator_v2(**options)


def compiles_with_xla() -> bool:
    """Return whether XLA compiles the function that is being traced: it would fail later, of unknown operations."""
    return not tf.executing_eagerly() and bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def eager() -> AbstractContextManager[None]:
    """Return a ``with`` block in which operations run at once, also where a program has disabled eager execution.

    There, a thread that Python code of a graph runs in, or starts, would add operations to a graph; ``tf.init_scope``
    does not leave that graph.
    """
    block: AbstractContextManager[None] = tf.__internal__.eager_context.eager_mode()
    return block


def list_variables(optimizer: keras.optimizers.Optimizer, old: Sequence[Any], new: Sequence[Any]) -> None:
    """Let variables of an optimizer be others, at the end of its list: Keras knows only how to add some.

    The list is another one: of one from which something was taken, TensorFlow saves no checkpoint.
    """
    gone = set(map(id, old))
    tracker, kept = optimizer._tracker, [variable for variable in optimizer._variables if id(variable) not in gone]
    listed = tf.__internal__.tracking.wrap([*kept, *new])
    optimizer._track_trackable(listed, "_variables", overwrite=True)
    object.__setattr__(optimizer, "_variables", listed)
    tracker.config["variables"] = tracker.config["variables"][0], listed
    tracker.stored_ids["variables"] = set(map(id, listed))


def track(owner: Any, part: Any, name: str) -> None:
    """Let checkpoints of TensorFlow hold a part of an object; as an attribute, files of Keras would hold it as well."""
    owner._track_trackable(part, name, overwrite=True)


def all_layers(model: keras.Model) -> list[Any]:
    """Return the model and all its layers, at any depth: ``model.layers`` has only those directly inside."""
    return list(model._flatten_layers())


def made_untrainable(layer: Any) -> Sequence[Any]:
    """Return what a layer itself has made as not trainable: ``non_trainable_variables`` has frozen weights as well."""
    found: Sequence[Any] = getattr(layer, "_non_trainable_variables", ())
    return found


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Return whether an optimizer lets a variable decay: ``exclude_from_weight_decay`` can only be told."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_same_names(optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer) -> None:
    """Let an unused optimizer spare its weight decay the names that another does, which no configuration holds."""
    pattern = getattr(other, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None:
        optimizer._exclude_from_weight_decay_pattern = pattern


def built_on(optimizer: keras.optimizers.Optimizer) -> Sequence[Any]:
    """Return the variables that an optimizer was built on, in whose order it has its own."""
    found: Sequence[Any] = optimizer._trainable_variables
    return found
