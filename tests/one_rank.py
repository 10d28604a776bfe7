"""What it takes to construct the optimizers of every front end, on one rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvd_periodic.numpy


def one_rank(name: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return a front end, a function that makes a local optimizer, and the model that it is for."""
    if name == "numpy":
        return hvd_periodic.numpy, lambda: hvd_periodic.numpy.SGD(0.1), {"x": np.zeros(2)}
    framework = pytest.importorskip(name)
    module = importlib.import_module(f"hvd_periodic.{name}")
    if name == "torch":
        model = framework.nn.Linear(2, 1)
        return module, lambda: framework.optim.SGD(model.parameters(), lr=0.1), model
    import keras

    return module, lambda: keras.optimizers.SGD(0.1), keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
