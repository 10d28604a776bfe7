"""What a package index, a citation and an issue tell of the project is what is there."""

from __future__ import annotations

import configparser
import re
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import hvd_periodic
from tests.unit.test_imports import SOURCES, external, imports, room

ROOT = Path(__file__).parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")

IMPORTED_AS = {
    "ignite": "pytorch-ignite",
    "keras": "tensorflow",
    "pytorch_lightning": "lightning",
    "sklearn": "scikit-learn",
}
"""Packages whose distributions have other names; `tensorflow` brings Keras."""


def requirements(lines: str) -> dict[str, Requirement]:
    found = [Requirement(line.partition("#")[0]) for line in lines.splitlines() if line.partition("#")[0].strip()]
    return {requirement.name: requirement for requirement in found}


EXTRAS = {name: requirements(lines) for name, lines in CONFIG["options.extras_require"].items()}
OFFERED = {name for extra in EXTRAS.values() for name in extra}
PINNED = sorted((ROOT / "run_scripts").glob("requirements*.txt"))


def distributions(tops: set[str]) -> set[str]:
    return {IMPORTED_AS.get(top, top) for top in tops}


def example_sources() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.py"))


def test_numpy_is_the_only_hard_dependency() -> None:
    assert list(requirements(CONFIG["options"]["install_requires"])) == ["numpy"]


def test_every_import_is_in_an_extra() -> None:
    missing = {str(path): distributions(external(path) - {"numpy"}) - OFFERED for path in SOURCES}
    assert not {path: names for path, names in missing.items() if names}, "name them in an extra of setup.cfg"


def test_what_examples_import_is_in_their_extra() -> None:
    """Or in that of a framework."""
    own = {path.stem for path in example_sources()}
    tops = {name.partition(".")[0] for path in example_sources() for name in imports(path)}
    wanted = distributions(tops - own - {"numpy", "hvd_periodic", "__future__"} - set(sys.stdlib_module_names))
    frameworks = ("torch", "tensorflow", "horovod", "mpi", "lightning", "huggingface", "ignite")
    assert wanted <= {*EXTRAS["examples"], *(package for name in frameworks for package in EXTRAS[name])}


def test_no_framework_needs_horovod() -> None:
    for name in ("torch", "lightning", "huggingface", "ignite", "tensorflow"):
        assert "torch" in EXTRAS[name] or name == "tensorflow"
        assert "horovod" not in EXTRAS[name]


def test_the_project_has_extras_of_these_names() -> None:
    """Users have them in requirements of their own."""
    assert EXTRAS.keys() >= {
        *("torch", "horovod", "tensorflow", "mpi", "lightning", "huggingface", "ignite"),
        *("cli", "costs", "examples", "test", "docs", "dev"),
    }


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.name)
def test_what_is_tested_with_is_what_extras_allow(path: Path) -> None:
    for name, pinned in requirements(path.read_text()).items():
        (version,) = (specifier.version for specifier in pinned.specifier)
        for extra in EXTRAS.values():
            assert name not in extra or extra[name].specifier.contains(version), f"{path.name}: {pinned}"


def test_front_ends_alone_are_in_no_layer() -> None:
    """A file that `lint-imports` has no layer for is a front end: what has one does not import it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    listed = {name for layer in layers for name in re.split(r" [|:] ", layer)} - {"__main__", "cli"}
    unlisted = {room(path).removesuffix(".py") for path in SOURCES} - listed - {"__main__", "cli", "__init__"}
    for path in SOURCES:
        if room(path).removesuffix(".py") in listed:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("hvd_periodic.")}
            assert not used & unlisted, f"{path}: give {used & unlisted} a layer in pyproject.toml"


def pythons() -> list[tuple[int, int]]:
    lines = CONFIG["metadata"]["classifiers"].splitlines()
    found = [re.fullmatch(r"Programming Language :: Python :: (\d+)\.(\d+)", line) for line in lines]
    return [(int(match[1]), int(match[2])) for match in found if match]


def test_versions_of_python_agree() -> None:
    lowest = ".".join(map(str, pythons()[0]))
    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert CONFIG["options"]["python_requires"] == f">={lowest}"
    assert tools["mypy"]["python_version"] == lowest
    assert tools["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert f"sys.version_info < {pythons()[0]}" in (ROOT / "run_scripts/setup.sh").read_text()


def test_every_python_that_is_named_was_tried() -> None:
    page = (ROOT / "docs/start/install.md").read_text()
    rows = re.findall(r"^\| (\d+)\.(\d+)\.\d+ \|", page, re.MULTILINE)
    assert [(int(major), int(minor)) for major, minor in rows] == pythons()


def releases() -> list[tuple[str, str | None]]:
    text = (ROOT / "CHANGELOG.md").read_text()
    return re.findall(r"^## \[(.+)\](?: - (\S+))?$", text, re.MULTILINE)


def test_the_changelog_has_this_version() -> None:
    headings = releases()
    assert len(headings) == (ROOT / "CHANGELOG.md").read_text().count("\n## "), "## [VERSION] - YYYY-MM-DD"
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == hvd_periodic.__version__
    days = [date.fromisoformat(str(day)) for _, day in headings[1:]]
    assert days == sorted(days, reverse=True)


def test_the_citation_is_of_this_version() -> None:
    """With all that the Citation File Format 1.2.0 asks for."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert all(isinstance(citation[key], str) for key in ("message", "title", "abstract"))
    assert citation["authors"]
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert all(isinstance(keyword, str) for keyword in citation["keywords"])
    assert citation["license"] == CONFIG["metadata"]["license"]
    assert (citation["version"], citation["date-released"].isoformat()) == releases()[1]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_forms_of_issues(path: Path) -> None:
    """As their format has it; the files of the project that they name are there."""
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert all(isinstance(form[key], str) for key in ("name", "description"))
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({item["id"] for item in fields}) == len(fields) > 0
    assert all(item["attributes"]["label"] for item in fields)
    named = re.findall(r"docs/[\w./-]*\w", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
