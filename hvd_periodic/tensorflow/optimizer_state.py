"""The state of a Keras optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.keras.private import built_on
from hvd_periodic.tensorflow.center_optimizer import MARK, copied
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.vectors.store import Store

_TRAINED = "_trainable_variables"

_OTHERS = ("_model_variables_moving_average", "_accumulated_gradients")
"""Lists that Keras keeps for every optimizer: moving averages of the variables, sums of gradients."""


class KerasOptimizerState:
    """The state of a Keras optimizer in the shape of exchanged variables.

    Keras optimizers hold it in lists, in the order of the variables. A state variable's name is that of the variable
    that it belongs to, followed by the name of the entry.

    Args:
        optimizer: the optimizer, without those of this package around it.
        replica: the variables of this rank.
        nested: whether another optimizer of this package, which exchanges as well, is between the two.
    """

    def __init__(self, optimizer: Any, replica: VariableReplica, nested: bool = False) -> None:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._optimizer, self._replica = optimizer.inner_optimizer if scales else optimizer, replica
        self._start: dict[str, float | None] = {}
        self._nested = nested

    complete = True

    @property
    def _of_several(self) -> bool:
        return hasattr(self._optimizer, "optimizers")

    def entries(self) -> Mapping[str, Sequence[tuple[str, tf.Variable]]]:
        """Return the state by the optimizer's names, such as ``momentum``."""
        if self._of_several:
            raise ValueError(
                f"`optimizer_state` must be 'local' with {type(self._optimizer).__name__}, which consists of several "
                "optimizers with states of their own"
            )
        names = {parameter.ref(): name for name, parameter in self._replica.named.parameters}
        entries: dict[str, list[tuple[str, tf.Variable]]] = {}
        for entry, owner, variable in _kept(self._optimizer):
            if owner.ref() in names:
                entries.setdefault(entry, []).append((names[owner.ref()], variable))
        return {entry: entries[entry] for entry in sorted(entries)}

    def variables(self) -> list[tf.Variable]:
        """Return all variables of the optimizer."""
        return [native(variable) for variable in self._optimizer.variables]

    def store(self, pairs: Sequence[tuple[str, Any]]) -> Store[Any]:
        """Return variables as a store."""
        return self._replica.store_of(pairs)

    def stores(self) -> list[Store[Any]]:
        """Return all entries as stores; none for an optimizer of several, whose state is not exchanged."""
        return [] if self._of_several else [self.store(pairs) for pairs in self.entries().values()]

    def learn_start(self) -> None:
        """Find the initial values from a built copy; raise a TypeError if the optimizer cannot be copied."""
        try:
            with tf.init_scope():
                self._start = _start_of(self._optimizer)
        except Exception as error:
            raise TypeError(
                "`optimizer_state='reset'` and `nonfinite='skip'` need the initial state of "
                f"{type(self._optimizer).__name__}, and a copy that would show it cannot be made "
                f"({type(error).__name__}: {error})"
            ) from error

    def moves_untouched(self, names: Collection[str]) -> str | None:
        """Return what moves rows without gradients: momentum, weight decay, another optimizer, or constraints."""
        if self._nested:
            return "an optimizer whose own exchanges move them"
        name = type(self._optimizer).__name__
        if not isinstance(self._optimizer, (keras.optimizers.SGD, keras.optimizers.Adagrad)):
            return f"{name}, which moves all rows, or is not known to leave them alone"
        named = self._replica.named
        for (parameter, _), constraint in zip(named.parameters, named.constraints, strict=False):
            if parameter in names and constraint is not None:
                return f"the constraint of {parameter!r}"
        for setting in ("momentum", "weight_decay", "gradient_accumulation_steps"):
            if getattr(self._optimizer, setting, None):
                return f"{name} with {setting}={getattr(self._optimizer, setting)!r}"
        return None

    def reset(self, but: Collection[str] = ()) -> None:
        """Reset all state to that of a new optimizer: zeros, the variables, or values from its settings."""
        of_name, values = dict(self._replica.named.parameters), self._replica.values
        for entry, pairs in self.entries().items():
            start = self._start.get(entry, 0.0)
            for name, variable in pairs:
                if name in but:
                    continue
                parameter = values.read(of_name[name])
                value = parameter if start is None else np.full(parameter.shape, start)
                values.write(variable, value.astype(variable.dtype.as_numpy_dtype))


def state_of(optimizer: Any, owners: Collection[int]) -> list[tf.Variable]:
    """Return what an optimizer keeps of some of the variables that it trains, given by ``id``."""
    inside = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "inner_optimizer", optimizer)]
    if inside != [optimizer]:
        return [variable for each in inside for variable in state_of(each, owners)]
    return [native(variable) for _, owner, variable in _of_each(optimizer) if id(native(owner)) in owners]


def _of_each(optimizer: Any) -> Iterator[tuple[str, Any, keras.Variable]]:
    """Yield each list that an optimizer keeps, by attribute, with a variable that it trains and what it keeps of it."""
    owners = built_on(optimizer)
    for attribute, kept in vars(optimizer).items():
        if isinstance(kept, list) and len(kept) == len(owners) and attribute not in ("_variables", _TRAINED):
            for owner, variable in zip(owners, kept, strict=True):
                if isinstance(variable, keras.Variable):
                    yield attribute, owner, variable


def _kept(optimizer: Any) -> Iterator[tuple[str, tf.Variable, tf.Variable]]:
    """Yield the name of each entry, the variable, and its state variable of the same shape."""
    for attribute, owner, variable in _of_each(optimizer):
        real = keras.backend.is_float_dtype(variable.dtype)
        if real and attribute not in _OTHERS and tuple(variable.shape) == tuple(owner.shape):
            path = getattr(owner, "path", owner.name).replace("/", "_").replace(":", "_")
            yield variable.name.removeprefix(f"{path}_"), native(owner), variable.value


def _start_of(optimizer: Any) -> dict[str, float | None]:
    """Return the initial values of a new optimizer's entries; None for a copy of the variable."""
    trial = copied(optimizer, learning_rate=0.0)
    trial.build([keras.Variable(np.full(1, MARK, np.float32), name="probe")])
    values = {entry: float(variable.numpy()[0]) for entry, _, variable in _kept(trial)}
    return {entry: None if abs(value - MARK) < 1e-6 else value for entry, value in values.items()}
