"""The state of a Keras optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.center_optimizer import copied
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.vectors.store import Store

_OTHERS = ("_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients")
"""Lists that Keras itself keeps for every optimizer: the variables, moving averages of them, sums of gradients."""


class KerasOptimizerState:
    """What a Keras optimizer keeps of every variable that is exchanged, in its shape.

    Optimizers of Keras hold it in lists, in the order of the variables; each is called after the variable that it
    belongs to, followed by the name of the entry.

    Args:
        optimizer: the local optimizer, built.
        replica: the variables.
    """

    def __init__(self, optimizer: Any, replica: VariableReplica) -> None:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._optimizer, self._replica = optimizer.inner_optimizer if scales else optimizer, replica
        self._initial: dict[str, float] | None = None

    def entries(self) -> Mapping[str, Sequence[tuple[str, tf.Variable]]]:
        """Return it by the optimizer's names, such as ``momentum``."""
        names = {parameter.ref(): name for name, parameter in self._replica.named.parameters}
        entries: dict[str, list[tuple[str, tf.Variable]]] = {}
        for entry, owner, variable in _kept(self._optimizer):
            if owner.ref() in names:
                entries.setdefault(entry, []).append((names[owner.ref()], variable))
        return {entry: entries[entry] for entry in sorted(entries)}

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[Any]:
        """Return variables as a store."""
        return self._replica.store_of(pairs)

    def reset(self) -> None:
        """Fill all with what a new optimizer has: zeros, or what it is told, such as Adagrad's."""
        if self._initial is None:
            with tf.init_scope():
                self._initial = _initial_values(self._optimizer)
        for entry, pairs in self.entries().items():
            for _, variable in pairs:
                variable.assign(tf.fill(variable.shape, tf.cast(self._initial.get(entry, 0.0), variable.dtype)))


def _kept(optimizer: Any) -> Iterator[tuple[str, tf.Variable, tf.Variable]]:
    """Yield name of the entry, variable, and what is kept of it in its shape."""
    owners = optimizer._trainable_variables
    for attribute, kept in vars(optimizer).items():
        if not isinstance(kept, list) or len(kept) != len(owners) or attribute in _OTHERS:
            continue
        for owner, variable in zip(owners, kept, strict=True):
            if isinstance(variable, keras.Variable) and tuple(variable.shape) == tuple(owner.shape):
                path = getattr(owner, "path", owner.name).replace("/", "_").replace(":", "_")
                yield variable.name.removeprefix(f"{path}_"), native(owner), variable.value


def _initial_values(optimizer: Any) -> dict[str, float]:
    """Return what the entries of a new optimizer are filled with."""
    trial = copied(optimizer, learning_rate=0.0)
    trial.build([keras.Variable(np.zeros(1, np.float32), name="probe")])
    return {entry: float(variable.numpy()[0]) for entry, _, variable in _kept(trial)}
