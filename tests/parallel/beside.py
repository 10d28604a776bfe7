"""Packages in an environment of their own, beside the project's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MADE_BY = "bash run_scripts/trainers.sh"

QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Nothing is reported to, or loaded from, a hub of models."""


@pytest.fixture(scope="session")
def trainers() -> str:
    """Where Lightning, transformers, accelerate, peft and Ignite are; CI has them."""
    folder = Path(os.environ.get("HVD_PERIODIC_TRAINERS") or Path(sys.prefix) / ".hvd_periodic/trainers")
    packages = next(folder.glob("lib/python3.*/site-packages/lightning"), None)
    if packages is None and os.environ.get("CI") == "true":
        pytest.fail(f"There are no trainers in {folder}: {MADE_BY}")
    if packages is None:
        pytest.skip(f"There are no trainers in {folder}: {MADE_BY}")
    return str(packages.parent)


@pytest.fixture(scope="module")
def with_trainers(trainers: str) -> Iterator[None]:
    """Let the jobs of this file see them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [trainers, os.environ.get("PYTHONPATH")])))
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield
