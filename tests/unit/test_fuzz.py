"""Generated programs on in-process ranks: constructions and calls in any order, see ``tests/fuzz``.

Each works or raises a documented error on every rank, none waits for ever, and ranks never disagree.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.machine import play
from tests.fuzz.numpy_player import NumpyPlayer
from tests.fuzz.player import Setup
from tests.fuzz.ranks import Ranks
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("seed", "programs"), [(1, 20), thorough(1, 150), *(thorough(seed, 400) for seed in range(2, 4))]
)
def test_programs(seed: int, programs: int) -> None:
    pytest.importorskip("torch")
    from tests.fuzz.torch_player import TorchPlayer

    play(TorchPlayer, seed, programs)


@pytest.mark.parametrize(("seed", "programs"), [(1, 50), thorough(1, 300), thorough(2, 800)])
def test_programs_of_numpy(seed: int, programs: int) -> None:
    play(NumpyPlayer, seed, programs)


@pytest.mark.parametrize(("seed", "programs"), [(1, 6), thorough(2, 100)])
def test_programs_of_keras(seed: int, programs: int) -> None:
    play(keras_player(), seed, programs)


@pytest.mark.parametrize("center", ["root", "sharded"])
@pytest.mark.parametrize("name", ["audit", "enter"])
def test_a_keras_rank_that_looks_at_the_center_while_the_others_begin(name: str, center: str) -> None:
    """Found by a generated program: it waited for ever."""
    ranks = Ranks(2, keras_player())
    try:
        ranks.play("call", "construct", "plain", 0, Setup(center=center))
        ranks.play("call", name, "plain", 0, on=(0,))
        found = ranks.play("call", "finalize", "plain", 0, on=(1,))
        assert not ranks.waiting
    finally:
        ranks.end()
    for [outcome] in found.values():
        assert "Ranks wait for each other in different places" in str(outcome.error)


def keras_player() -> Any:
    pytest.importorskip("horovod.tensorflow")
    from tests.fuzz.keras_player import KerasPlayer

    return KerasPlayer
