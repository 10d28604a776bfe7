"""Generated programs on in-process ranks: constructions and calls in any order, see ``tests/fuzz``.

Each works or raises a documented error on every rank, none waits for ever, and ranks never disagree.
"""

from __future__ import annotations

import pytest

from tests.fuzz.machine import play
from tests.fuzz.numpy_player import NumpyPlayer
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(("seed", "programs"), [(1, 150), *(thorough(seed, 400) for seed in range(2, 7))])
def test_programs(seed: int, programs: int) -> None:
    pytest.importorskip("torch")
    from tests.fuzz.torch_player import TorchPlayer

    play(TorchPlayer, seed, programs)


@pytest.mark.parametrize(("seed", "programs"), [(1, 300), *(thorough(seed, 800) for seed in range(2, 4))])
def test_programs_of_numpy(seed: int, programs: int) -> None:
    play(NumpyPlayer, seed, programs)
