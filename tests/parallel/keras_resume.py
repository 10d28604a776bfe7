"""Ways to save what a worker in Keras has, and to go on from it: a file of its model, a set of files, states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

import hvd_periodic.tensorflow as hvdp
from tests.parallel.tensorflow_job import hvd


def saved(
    way: str, worker: Any, folder: Path, fresh: Callable[[], Any], of_model: Callable[[Any], Any]
) -> Callable[[], Any]:
    """Save a worker, on all ranks; return a function that ends it and returns another one, which goes on from there.

    Args:
        way: "model", "set" or "state".
        worker: the worker.
        folder: for files, of this worker alone.
        fresh: returns a worker whose training has not begun.
        of_model: returns a worker that goes on with a loaded model.
    """
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{hvd.rank()}.keras"
    state, weights = None, None
    if way == "model":
        worker.model.save(path)
    elif way == "set":
        hvdp.save(folder, worker.model, worker.optimizer)
    else:
        state, weights = worker.optimizer.synchronizer.state_dict(), worker.model.get_weights()
    hvd.allgather_object(None)

    def resumed() -> Any:
        worker.optimizer.finalize()
        if way == "model":
            return of_model(keras.models.load_model(path))
        other = fresh()
        if way == "set":
            hvdp.load(folder, other.model, other.optimizer)
        else:
            other.optimizer.synchronizer.load_state_dict(state)
            other.model.set_weights(weights)
        other.optimizer.synchronizer.begin()
        return other

    return resumed
