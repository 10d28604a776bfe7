"""Finds what the package contains by walking it, so that a new file is tested without an edit here."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hvd_periodic.algorithms
import hvd_periodic.comm
import hvd_periodic.schedules
from hvd_periodic import Algorithm


def modules(package: ModuleType) -> Iterator[ModuleType]:
    """Import and yield all modules of a package."""
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


def own_classes(module: ModuleType) -> Iterator[type]:
    """Yield the concrete public classes that a module defines."""
    for name, value in inspect.getmembers(module, inspect.isclass):
        if value.__module__ == module.__name__ and not name.startswith("_") and not inspect.isabstract(value):
            yield value


def algorithms() -> list[type[Algorithm]]:
    """Return all algorithms."""
    return [
        cls for module in modules(hvd_periodic.algorithms) for cls in own_classes(module) if issubclass(cls, Algorithm)
    ]


def schedules() -> list[type]:
    """Return all schedules: classes whose objects are called."""
    return [cls for module in modules(hvd_periodic.schedules) for cls in own_classes(module) if "__call__" in vars(cls)]


def communicators() -> dict[str, str]:
    """Return the module of each communicator, by class name; nothing is imported, for that may start MPI."""
    found: dict[str, str] = {}
    for info in pkgutil.walk_packages(hvd_periodic.comm.__path__, "hvd_periodic.comm."):
        path = Path(hvd_periodic.comm.__path__[0], *info.name.split(".")[2:])
        source = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
        for node in ast.parse(source.read_text()).body:
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.endswith("Communicator") for base in bases) and "@abstractmethod" not in ast.unparse(node):
                found[node.name] = info.name  # type: ignore[attr-defined]
    return found
