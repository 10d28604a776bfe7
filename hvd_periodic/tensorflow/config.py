"""Encodes algorithms and schedules as plain values for the configuration of a saved optimizer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras

from hvd_periodic import algorithms, local_state, schedules, wires
from hvd_periodic.schedules import Schedule

_HOMES: tuple[ModuleType, ...] = (algorithms, schedules, local_state, wires)


def encode(value: Any) -> Any:
    """Return an algorithm or schedule as JSON-like values; a constant period as an int.

    ``keras.saving.serialize_keras_object`` encodes objects that are not from this package, so a function must be
    registered with ``keras.saving.register_keras_serializable``.
    """
    if isinstance(value, Schedule):
        value = value.argument
    if isinstance(value, int):
        return value
    if any(getattr(home, type(value).__name__, None) is type(value) for home in _HOMES):
        return {"hvd_periodic": type(value).__name__, "arguments": vars(value)}
    return keras.saving.serialize_keras_object(value)


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` was given."""
    if not isinstance(value, dict):
        return value
    if "hvd_periodic" not in value:
        return keras.saving.deserialize_keras_object(value)
    home = next(home for home in _HOMES if hasattr(home, value["hvd_periodic"]))
    return getattr(home, value["hvd_periodic"])(**value["arguments"])
