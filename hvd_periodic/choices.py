"""Choices that users make by name: to add one, add a file to its package, which is searched."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any


def choices(room: str, kind: Any) -> dict[str, Any]:
    """Return the concrete classes of a kind that the modules of a package define, by the names that users give.

    Args:
        room: the package.
        kind: their base class; each has a ``name``.

    Example:
        >>> from hvd_periodic.local_state import LocalState
        >>> sorted(choices("hvd_periodic.local_state", LocalState))
        ['average', 'local', 'reset']
    """
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(importlib.import_module(room).__path__):
        module = importlib.import_module(f"{room}.{info.name}")
        for value in vars(module).values():
            defined_here = inspect.isclass(value) and value.__module__ == module.__name__
            if defined_here and issubclass(value, kind) and not inspect.isabstract(value):
                found[value.name] = value
    return found
