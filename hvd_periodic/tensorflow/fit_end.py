"""The end of ``model.fit``: ranks exchange the trained values before Keras puts other values into the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.comm.membership import Membership
from hvd_periodic.keras.fit import restores, swaps
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.store import accumulation_dtype


class FitEnd:
    """The end of one ``fit``, on all ranks together.

    Keras first calls ``finalize_variable_values`` of the optimizer, then ``on_train_end`` of the callbacks, in their
    order. The first of these calls runs :meth:`run`, so that the order does not matter.

    Raises:
        ValueError: callbacks that contradict each other.
    """

    def __init__(self, optimizer: Any, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._optimizer, self._model = optimizer, model
        self._swapping = [callback for callback in callbacks if swaps(callback)]
        self._restoring = [callback for callback in callbacks if restores(callback)]
        if self._swapping and self._restoring:
            raise ValueError(
                "EarlyStopping(restore_best_weights=True) restores the center, and SwapEMAWeights(swap_on_epoch=True) "
                "asks for moving averages: leave out one of the two arguments"
            )
        for callback in self._swapping:  # Its last epoch would overwrite the trained weights with the averages.
            callback.set_params({**callback.params, "epochs": callback.params.get("epochs", 1) + 1})
        self._centers: dict[int, list[Any]] = {}
        self._best: list[Any] | None = None

    def keep_best(self) -> None:
        """Make EarlyStopping keep the center if it has just kept the replica; between two epochs."""
        found = [
            callback
            for callback in self._restoring
            if callback.best_weights is not None and callback.best_weights is not self._centers.get(id(callback))
        ]
        if found or (self._restoring and self._optimizer.synchronizer.exchanger.reads_together):
            with self._optimizer.center():
                center = self._model.get_weights()
            for callback in found:
                callback.best_weights = self._centers[id(callback)] = center

    def run(self) -> None:
        """Exchange the trained values, set the model to the center, and EarlyStopping to the root's best center."""
        self.keep_best()
        for callback in self._swapping:
            callback.on_epoch_begin(0)  # This returns the trained values to the model.
        self._optimizer.finalize()
        shown = [
            variable for group in self._optimizer.synchronizer.tensor_groups for variable in group.values.tensors()
        ]
        with self._optimizer.center():
            center = [variable.numpy() for variable in shown]
        for variable, value in zip(shown, center, strict=True):
            variable.assign(value)
        self._best = self._best_of_root(shown)
        for callback in self._restoring:
            callback.best_weights = self._best

    def restore(self) -> None:
        """Set the model to the best center if the root's EarlyStopping restores it."""
        if self._best is not None:
            self._model.set_weights(self._best)

    def _best_of_root(self, shown: Sequence[tf.Variable]) -> list[Any] | None:
        """Return the weights that the root's EarlyStopping has kept, or None."""
        mine = next((c.best_weights for c in reversed(self._restoring) if c.best_weights is not None), None)
        senders = self._optimizer.synchronizer.membership.broadcasters("best")
        if not _sent(senders, np.array([mine is not None], np.int32))[0]:
            return None
        weights = self._model.get_weights() if mine is None else list(mine)
        exchanged = {id(variable) for variable in shown}
        for i, variable in enumerate(self._model.weights):
            if id(native(variable)) in exchanged:
                weights[i] = _sent(senders, weights[i])
        return weights


def _sent(senders: Sequence[Any], array: Any) -> Any:
    """Return the root's array."""
    value = tf.constant(array)
    vector = tf.reshape(tf.cast(value, accumulation_dtype(value.dtype)), [-1])  # Horovod sends no other dtypes.
    for send in senders:
        vector = send(vector)
    return tf.cast(tf.reshape(vector, value.shape), value.dtype).numpy()


def average_among(membership: Membership, variables: Sequence[Any]) -> None:
    """Set variables to their mean over the ranks that exchange."""
    ranks = membership.communicator
    for i, variable in enumerate(map(native, variables)):
        exact = tf.cast(variable.read_value(), tf.float64 if variable.dtype == tf.float64 else tf.float32)
        total = ranks.allreduce(tf.reshape(exact, [-1]), f"{membership.name}.final.{i}")()
        variable.assign(tf.reshape(tf.cast(total / ranks.size, variable.dtype), variable.shape))
