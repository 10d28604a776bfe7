"""Variables of TensorFlow, and the Keras models to which they belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from hvd_periodic.keras import model as of_keras
from hvd_periodic.participation.patterns import Policies

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


def named_variables(
    trainable: Iterable[AnyVariable],
    model: keras.Model | None = None,
    buffers: Policies = None,
    parameters: Policies = None,
    former: Mapping[int, str] = MappingProxyType({}),
) -> of_keras.NamedVariables:
    """Return TensorFlow's variables by role, as :func:`hvd_periodic.keras.model.named_variables` returns Keras's.

    Raises:
        TypeError: a parameter is not a variable.
        ValueError: a parameter is given twice; or a pattern matches no weight.
    """
    trained = list(trainable)
    for variable in trained:
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            raise TypeError(f"Exchanged objects must be variables. Received: {type(variable).__name__}")
    return of_keras.named_variables(trained, model, buffers, parameters, native, former)
