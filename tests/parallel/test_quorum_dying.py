"""Rounds go on without a rank that is killed, or stopped for good, under an MPI that lets the others go on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hvd_periodic.ranks import named
from tests.conftest import PATIENCE
from tests.parallel.launch import MPIRUN, ROOT, environment, python
from tests.parallel.tiers import thorough

pytest.importorskip("mpi4py")

pytestmark = pytest.mark.timeout(120)

ROUNDS = 8


@pytest.mark.parametrize(
    ("where", "transport", "victim"),
    [
        ("closing", "window", 0),
        ("between", "window", 0),
        ("adopting", "window", 2),
        ("pushing", "service", 2),
        ("stopped", "service", 2),
        thorough("pushing", "window", 0),
        thorough("waiting", "window", 0),
        thorough("stopped", "window", 0),
        thorough("between", "service", 2),
        thorough("waiting", "service", 2),
        thorough("adopting", "service", 2),
        thorough("ten", "window", 0),
        thorough("ten", "window", 2),
    ],
)
def test_the_others_end_with_the_center(where: str, transport: str, victim: int, tmp_path: Path) -> None:
    """A rank that is killed as it pushes, or closes a round, or between rounds, or as it waits; or never comes again.

    Or after the last round, when the others adopt, which is an error on all of them.

    Or ten ranks, one of which is slow, one stopped until others have closed three rounds, and one killed. In shared
    memory, the root may be the one that is killed or stopped.
    """
    size = 10 if where == "ten" else 3
    words = [*MPIRUN, "--enable-recovery", "-np", str(size), *python(None), "-m", "tests.parallel.quorum_dying_program"]
    done = subprocess.run(
        [*words, str(tmp_path), where, str(ROUNDS), str(victim)],
        env=environment() | {"HVD_PERIODIC_TRANSPORT": transport},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    assert done.stdout.count("is at its end") == size - 1, done.stdout
    if where == "adopting":
        for rank in {0, 1, 2} - {victim}:
            assert "adopt() is not available after ranks have died" in (tmp_path / f"{rank}.error").read_text()
    else:
        assert f"Rank {victim} has died or been given up: rounds close without it" in done.stdout
    first, *others = sorted({*range(size)} - (set() if where == "adopting" else {victim}))
    text = f"Weight 'frozen', which no exchange touches, differs between ranks: {named(others)} from rank {first}. "
    assert done.stdout.count(text) == done.stdout.count("differs between ranks: ") == 1, done.stdout
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size) if rank != victim]
    for own, center, rounds in reports:
        assert own == center == reports[0][1]
        assert center[0] == center[1], "no bucket of a message that was cut off"
        assert rounds == ROUNDS
