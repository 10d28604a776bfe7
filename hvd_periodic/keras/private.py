"""Private names of Keras on any backend: no other module uses them, except ``tensorflow/private.py``.

Every function says why no public name suffices. ``tests/unit/test_tensorflow_private.py`` checks the purpose of each
function, and fails if an upgrade has changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def all_layers(model: keras.Model) -> list[Any]:
    """Return the model and all its layers at any depth: ``model.layers`` has only the first level."""
    return list(model._flatten_layers())


def made_untrainable(layer: Any) -> Sequence[Any]:
    """Return variables that a layer created as non-trainable: ``non_trainable_variables`` includes frozen weights."""
    found: Sequence[Any] = getattr(layer, "_non_trainable_variables", ())
    return found


def built_on(optimizer: keras.optimizers.Optimizer) -> Sequence[Any]:
    """Return the variables that an optimizer was built on, which give the order of its own variables."""
    found: Sequence[Any] = optimizer._trainable_variables
    return found
