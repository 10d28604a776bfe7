"""Spellings of version 0.1 work, and warn with what to write; names of front ends are found in front ends."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_periodic
import hvd_periodic.numpy
from hvd_periodic import logs
from tests.conftest import PATIENCE


@pytest.mark.parametrize("name", sorted(hvd_periodic._WAS_HERE))
def test_numpy_optimizers_were_in_the_package_itself(name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"`hvd_periodic\.{name}`.*: write `hvd_periodic\.numpy\.{name}`$"
    ) as w:
        found = getattr(hvd_periodic, name)
    assert found is getattr(hvd_periodic.numpy, name)
    assert w[0].filename == __file__
    assert name not in hvd_periodic.__all__


def test_names_of_front_ends_are_named_with_their_homes() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = hvd_periodic.Synchronizer
    where = "it is in hvd_periodic.torch and hvd_periodic.tensorflow"
    assert str(caught.value) == f"module 'hvd_periodic' has no attribute 'Synchronizer': {where}"
    with pytest.raises(AttributeError, match=r"has no attribute 'Synchroniser'$"):
        _ = hvd_periodic.Synchroniser


@pytest.mark.parametrize("front_end", hvd_periodic._FRONT_ENDS)
def test_every_name_that_only_front_ends_have_is_known(front_end: str) -> None:
    if front_end != "numpy":
        pytest.importorskip(front_end)
    module = importlib.import_module(f"hvd_periodic.{front_end}")
    known = hvd_periodic._FRONT_ENDS[front_end]
    modules = {name for name in known - {*module.__all__} if (Path(module.__file__ or "").parent / name).exists()}
    modules |= {name for name in known if (Path(module.__file__ or "").parent / f"{name}.py").exists()}
    assert known - modules == {*module.__all__} - {*hvd_periodic.__all__} - hvd_periodic._WAS_HERE - modules


def test_importing_the_package_leaves_logging_alone() -> None:
    program = (
        "import logging, hvd_periodic.numpy; log = logging.getLogger('hvd_periodic'); print(log.handlers, log.level)"
    )
    environment = os.environ | {logs.VARIABLE: "info"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE * 60, check=True)
    assert done.stdout == "[] 0\n"
    assert not done.stderr
