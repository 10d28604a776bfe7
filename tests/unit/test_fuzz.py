"""Generated programs on in-process ranks: constructions and calls in any order, see ``tests/fuzz``.

Each works or raises a documented error on every rank, none waits for ever, and ranks never disagree.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.fuzz.machine import TorchMachine, play
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(("seed", "programs"), [(1, 150), *(thorough(seed, 400) for seed in range(2, 7))])
def test_programs(seed: int, programs: int) -> None:
    play(TorchMachine, seed, programs)
