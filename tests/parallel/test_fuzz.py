"""Generated programs on real ranks: see ``tests/fuzz``, which has more of them, on threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(200)


JOBS = [
    ("mpirun", 2, 20),
    thorough("mpirun", 2, 40),
    thorough("horovodrun --gloo", 3, 100),
    thorough("torchrun", 2, 40),
    thorough("torchrun", 3, 60),
]


@pytest.mark.parametrize(("launcher", "size", "programs"), JOBS)
def test_programs(launcher: str, size: int, programs: int, tmp_path: Path) -> None:
    """None hangs; each call works, or is a documented error, on all ranks."""
    ranks = run_scenarios(launcher, size, "fuzz_program", tmp_path, 150, "1", str(programs), framework="torch")
    for found in ranks:
        assert [wrong for _, wrong in found if wrong] == []
        assert sum(rounds for rounds, _ in found) > 4 * programs, "most calls work"
