"""The variables of a graph that no exchange touches, whose values the ranks of a session compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.participation import PARAMETERS, Policies
from hvd_periodic.participation.buffers import AVERAGE, LOCAL, is_of_random_generator
from hvd_periodic.participation.patterns import PolicyArgument
from hvd_periodic.tensorflow.contrib_opt.branches import Assigned, value_of
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter, can_be_sent, decide, is_decided
from hvd_periodic.tensorflow.contrib_opt.python_call import python_call
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.tensorflow.graph import VariableSynchronizer

_COLLECTIONS = tf.compat.v1.GraphKeys

BUFFERS = PolicyArgument("buffers", "non-trainable variable", (AVERAGE, LOCAL))


class UnexchangedVariables:
    """The variables that no optimizer of this package exchanges, without those that the user keeps local.

    These are trainable variables without a gradient, integers, and variables that no getter has created. Variables of
    optimizers, the global step and the state of random generators are not among them.

    Args:
        getter: knows the variables of the model.
        parameters: policies of trainable variables.
        buffers: policies of the others.
        global_step: the step that the optimizer increments, if any.
        compares: whether ranks compare them: once for all minimizations of an optimizer.
    """

    def __init__(
        self, getter: CustomGetter, parameters: Policies, buffers: Policies, global_step: Any, compares: bool
    ) -> None:
        self._getter, self._parameters, self._buffers = getter, parameters, buffers
        self._global_step, self._compares = global_step, compares
        self._variables: dict[str, Any] = {}
        self._values: dict[str, np.ndarray] = {}

    def untrained(self) -> list[Any]:
        """Return the variables of the graph that are not trainable, with those that are exchanged."""
        return [variable for variable in self._candidates() if not variable.trainable]

    def in_session(self) -> dict[str, tf.Tensor]:
        """Return the values of the variables that exist now, by name; zeros of those that are not initialized."""
        candidates = self._candidates()
        decide(*(variable for variable in candidates if self._is_local_by_choice(variable)))
        found = {v.op.name: v for v in candidates if self._compares and not is_decided(v)}
        self._variables |= found
        return {name: _value_if_initialized(variable) for name, variable in found.items()}

    @contextmanager
    def holding(self, names: Sequence[str], arrays: Sequence[np.ndarray]) -> Iterator[None]:
        """Take these as the values of the session inside the ``with`` block."""
        self._values = dict(zip(names, arrays, strict=True))
        try:
            yield
        finally:
            self._values = {}

    def digests(self) -> dict[str, bytes]:
        """Return digests of the values, without those of variables that an optimizer made later takes."""
        return {
            name: hashlib.sha256(array.tobytes()).digest()
            for name, array in self._values.items()
            if not is_decided(self._variables[name])
        }

    def advice(self, name: str) -> str:
        """Return what users can do about a variable that differs between ranks."""
        argument = "parameters" if self._variables[name].trainable else "buffers"
        return f"Assign it identically on all ranks; or, to keep each rank's own, pass {argument}={{{name!r}: 'local'}}"

    def _candidates(self) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        steps = [self._global_step, *graph.get_collection(_COLLECTIONS.GLOBAL_STEP)]
        everything = [*self._getter.found(), *graph.get_collection(_COLLECTIONS.TRAINABLE_VARIABLES)]
        return [
            variable
            for variable in {variable.ref(): variable for variable in everything}.values()
            if can_be_sent(variable)
            and all(variable is not step for step in steps)
            and not is_of_random_generator(variable.op.name)
        ]

    def _is_local_by_choice(self, variable: Any) -> bool:
        given, argument = (self._parameters, PARAMETERS) if variable.trainable else (self._buffers, BUFFERS)
        return argument.policy_of(given, variable.op.name, variable) == LOCAL


def averaged_among(statistics: Sequence[Any], given: Policies, untrained: Sequence[Any]) -> list[Any]:
    """Return the statistics that exchanges average.

    Args:
        statistics: variables that can be averaged.
        given: the ``buffers`` argument.
        untrained: all variables that are not trainable.

    Raises:
        ValueError: a pattern matches no variable, or ``"average"`` only such that cannot be averaged.
    """
    names = [variable.op.name for variable in statistics]
    BUFFERS.check_patterns(given, list(dict.fromkeys([*names, *(variable.op.name for variable in untrained)])))
    if isinstance(given, Mapping):
        means = {pattern: policy for pattern, policy in given.items() if policy == AVERAGE}
        replace(BUFFERS, noun="variable that can be averaged").check_patterns(means, names)
    return [v for v in statistics if BUFFERS.policy_of(given, v.op.name, v) != LOCAL]


def compared(synchronizer: VariableSynchronizer, turn: Turn, purpose: Purpose) -> Assigned:
    """Return the operations with which the ranks of a session compare what no exchange touches; version 1 control flow.

    Args:
        synchronizer: of the optimizer.
        turn: the turn of the optimizer.
        purpose: the call in which the ranks are.
    """
    unexchanged, progress = synchronizer.replica.unexchanged_variables, synchronizer.progress
    values = unexchanged.in_session()

    def compare(*arrays: np.ndarray) -> None:
        with turn(), unexchanged.holding(list(values), arrays):
            synchronizer.handshake.check_same_call(purpose)
            synchronizer.exchanger.context.differences.compare()

    return python_call(compare, synchronizer.replica.values, [progress.store()], list(values.values()))[1]


def _value_if_initialized(variable: Any) -> tf.Tensor:
    def zeros() -> tf.Tensor:
        return tf.zeros(variable.shape, variable.dtype.base_dtype)

    return tf.cond(tf.compat.v1.is_variable_initialized(variable), lambda: value_of(variable), zeros)
