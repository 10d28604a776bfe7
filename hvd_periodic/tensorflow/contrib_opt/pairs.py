"""The (gradient, variable) pairs that a local step applies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import tensorflow as tf

from hvd_periodic.participation import PARAMETERS, Local, Policies
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter
from hvd_periodic.tensorflow.graph import VariableSynchronizer

Pairs = list[tuple[Any, Any]]
"""(gradient, variable) pairs."""


def with_gradient(pairs: Pairs) -> Pairs:
    """Return the pairs that have a gradient."""
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]


def trained_by(pairs: Pairs) -> list[Any]:
    """Return the variables for which there is a gradient."""
    return [variable for _, variable in with_gradient(pairs)]


def shown(synchronizer: VariableSynchronizer, pairs: Pairs, exchanged: Sequence[Any]) -> tf.Tensor:
    """Return a tensor that exists once the synchronizer has seen the gradients of the exchanged variables in a step."""
    of = {variable.ref(): gradient for gradient, variable in with_gradient(pairs)}
    indices = [i for i, variable in enumerate(exchanged) if variable.ref() in of]

    def show(*present: Any) -> tf.Tensor:
        gradients: list[Any] = [None] * len(exchanged)
        for i, gradient in zip(indices, present, strict=True):
            gradients[i] = gradient
        synchronizer.prepare_gradients(gradients)
        return tf.constant(True)

    return tf.function(show, autograph=False)(*(of[exchanged[i].ref()] for i in indices))


def checked(grads_and_vars: Iterable[Any]) -> Pairs:
    """Check that pairs are well-formed; return them as a list.

    Raises:
        TypeError: an element is not a pair.
        ValueError: no pairs, or no gradients.
    """
    pairs = list(grads_and_vars)
    if not pairs:
        raise ValueError("`grads_and_vars` is empty: there are no variables to train")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and hasattr(pair[1], "assign")):
            raise TypeError(
                f"`grads_and_vars` must hold (gradient, variable) pairs. Received: {type(pair).__name__}, {pair!r}"
            )
    if not trained_by(pairs):
        raise ValueError(f"There is no gradient for any variable: {[v.name for _, v in pairs]}")
    return pairs


def check_patterns(given: Policies, names: Sequence[str], others: Iterable[Any]) -> None:
    """Check that each pattern of ``parameters`` matches a variable that takes part in this graph.

    Args:
        given: the ``parameters`` argument.
        names: names of the variables that take part.
        others: trainable variables, some of which may take no part: they can only be each rank's own.

    Raises:
        ValueError: a pattern matches no variable, or only variables without a gradient that take no part.
    """
    without = [variable.op.name for variable in others if variable.op.name not in names]
    PARAMETERS.check_patterns(given, [*names, *without])
    for pattern in PARAMETERS.unmatched(given, names):
        variable = next(name for name in without if fnmatchcase(name, pattern))
        if isinstance(given, Mapping) and given[pattern] == Local.name:
            continue
        raise ValueError(
            f"`parameters` has a pattern for variables without a gradient in this graph: {pattern!r} matches "
            f"{variable}. Without a custom getter, they take no part in exchanges: use 'present' if other ranks train "
            "them, or leave the pattern out"
        )


def reference_of(variable: Any, getter: CustomGetter) -> Any:
    """Return the key of a variable in the getter's dicts; raise a ValueError if the variable has no center."""
    if variable.ref() not in getter.centers:
        raise ValueError(
            f"Variable {variable.op.name!r} was not created through the {type(getter).__name__} and has no "
            "center: create it by tf.compat.v1.get_variable in a variable_scope with the getter as its "
            "custom_getter, or leave it out of var_list"
        )
    return variable.ref()
