"""Elastic Horovod without the state that is for it: a job whose ranks change ends with an error."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from tests.parallel.launch import run_elastic
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("change", "framework"),
    [("kill", "torch"), thorough("kill", "keras"), thorough("add", "torch"), thorough("add", "keras")],
)
def test_a_job_whose_ranks_change_ends(framework: str, change: str, tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    condition = "true" if change == "kill" else f"[ -e {tmp_path}/more ]"
    script.write_text(f"#!/bin/sh\necho localhost:1\nif {condition}; then echo 127.0.0.1:1; fi\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    ranks = 2 if change == "kill" else 1
    command = ["-m", "tests.parallel.elastic_program", framework, change, str(tmp_path)]
    code, output = run_elastic(ranks, script, command, 90, "torch" if framework == "torch" else "tensorflow")
    assert code != 0, output
    ended = "".join(re.findall(r"ENDED .*", output))
    before, after = (2, 1) if change == "kill" else (1, 2)
    assert f"of {before} when the optimizer was constructed" in ended, output
    assert re.search(rf"is rank \d of {after} now. Under elastic Horovod, optimizers are kept", ended), output
