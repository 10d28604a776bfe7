"""The callbacks of a ``fit``."""

from __future__ import annotations

import keras

from hvd_periodic.frames import running_methods


def callbacks_of_fit(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Return all callbacks of the ``fit`` that calls this one, in order; only this one outside ``fit``.

    Keras does not tell a callback about the others; the list comes from the ``CallbackList`` among the callers.
    """
    lists = (each for each, *_ in running_methods() if isinstance(each, keras.callbacks.CallbackList))
    found = (list(each.callbacks) for each in lists if any(fellow is callback for fellow in each.callbacks))
    return next(found, [callback])


def swaps(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback leaves moving averages in the model between epochs."""
    return isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch


def restores(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback puts the weights of an earlier epoch into the model when training ends."""
    return isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
