"""Every public name has a docstring, and a place in the API pages."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hvd_periodic

PAGES = sorted((Path(__file__).parents[2] / "docs/api").glob("*.md"))
PACKAGE = Path(hvd_periodic.__file__).parent
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
FRONT_ENDS = {
    "hvd_periodic": None,
    "hvd_periodic.numpy": None,
    "hvd_periodic.torch": "torch",
    "hvd_periodic.keras": "tensorflow",
    "hvd_periodic.tensorflow": "tensorflow",
    "hvd_periodic.tensorflow.contrib_opt": "tensorflow",
}
"""Packages whose names are public, and what has to be there to import them."""

ELSEWHERE = {"__version__", "callbacks"}
"""A number, and a module whose members are documented one by one."""


OF_TRAINERS = tuple(f"hvd_periodic.torch.{name}." for name in ("lightning", "huggingface", "ignite"))
"""What imports trainers, which are in an environment of their own: it is read, not imported."""


def entries() -> list[str]:
    return [entry for page in PAGES for entry in ENTRY.findall(page.read_text())]


def resolved(entry: str) -> Any:
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public(package: str) -> dict[str, Any]:
    """Return the public names of a package."""
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__ if name not in ELSEWHERE}


@pytest.mark.parametrize("package", FRONT_ENDS)
def test_every_public_name_is_documented(package: str) -> None:
    if FRONT_ENDS[package]:
        pytest.importorskip(FRONT_ENDS[package])
    listed = {entry.rpartition(".")[2]: entry for entry in entries() if of_package(entry, package)}
    for name, value in public(package).items():
        assert name in listed, f"{package}.{name} is on no page of docs/api"
        assert resolved(listed[name]) is value, f"{listed[name]} is not {package}.{name}"
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def of_package(entry: str, package: str) -> bool:
    """Say whether an entry is a name of a front end, or of what they share."""
    shared = ("algorithms", "schedules", "sync", "comm", "wires", "journal")
    homes = [*(f"hvd_periodic.{room}." for room in shared), "hvd_periodic.presets."]
    own = "contrib_opt" in entry if package.endswith("contrib_opt") else "contrib_opt" not in entry
    return own and (entry.startswith(tuple(homes)) or (package != "hvd_periodic" and entry.startswith(f"{package}.")))


def test_every_callback_is_documented() -> None:
    pytest.importorskip("tensorflow")
    callbacks = importlib.import_module("hvd_periodic.tensorflow.callbacks")
    own = [name for name, value in vars(callbacks).items() if getattr(value, "__module__", "") == callbacks.__name__]
    public_ones = [name for name in own if not name.startswith("_")]
    assert {f"{callbacks.__name__}.{name}" for name in public_ones} <= set(entries())
    assert all(getattr(callbacks, name).__doc__ for name in public_ones)


@pytest.mark.parametrize("prefix", OF_TRAINERS)
def test_what_trainers_need_is_documented(prefix: str) -> None:
    tree = ast.parse((PACKAGE / prefix.removeprefix("hvd_periodic.").replace(".", "/")).with_suffix(".py").read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    written = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    assert {f"{prefix}{node.name}" for node in written} == {entry for entry in entries() if entry.startswith(prefix)}
    assert all(map(ast.get_docstring, written))


def test_every_entry_is_there() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    pytest.importorskip("horovod")
    here = [entry for entry in entries() if not entry.startswith(OF_TRAINERS)]
    assert all(resolved(entry) is not None for entry in here)
    assert hvd_periodic.__version__


CALLED_BY_FRAMEWORKS = re.compile(
    r"on_\w+|register_\w+_hook|(get|from)_config|setup|teardown|(save|load)_own_variables"
)


def test_pages_show_what_users_call() -> None:
    """Not the methods that only frameworks call, of which a page without a list of members would show all."""
    for page in PAGES:
        for entry, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", page.read_text(), re.MULTILINE):
            listed = re.search(r"^ +members: (?:false|\[(.*)\])$", options, re.MULTILINE)
            shown = (listed[1] or "").split(", ") if listed else own_methods(entry)
            found = [name for name in shown if CALLED_BY_FRAMEWORKS.fullmatch(name)]
            assert not found, f"{page.name} shows {found} of {entry}: list its members"


def own_methods(entry: str) -> list[str]:
    """Return the methods that a class itself has, without importing it."""
    module, _, name = entry.rpartition(".")
    path = (Path(__file__).parents[2] / module.replace(".", "/")).with_suffix(".py")
    body = ast.parse(path.read_text()).body if path.is_file() else []
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return [node.name for each in classes for node in each.body if isinstance(node, ast.FunctionDef)]
