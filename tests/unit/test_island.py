"""The agreement of the ranks of an island."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AdaComm, Averaging
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.comm.island import Island
from hvd_periodic.comm.local import LocalCommunicator
from hvd_periodic.elastic.backups import back_up
from hvd_periodic.elastic.shards import own_share
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import errors, run_ranks

pytestmark = pytest.mark.timeout(60)


def test_all_give_up_what_one_has_lost() -> None:
    """Each of them once; after the next round of the rendezvous, they go on together."""

    def train(ranks: Communicator) -> list[object]:
        island = Island(ranks)
        found: list[object] = [
            island.of_first(lambda: ranks.rank),
            island.settle(),
            island.settle(asks=ranks.rank == 2),
        ]
        for lost in ([1], [0, 2], [0, 1, 2]):
            if ranks.rank in lost:
                error: Exception = RanksLostError(f"by {ranks.rank}")
            else:
                with pytest.raises(RanksLostError, match="of this island has lost a rank of another") as caught:
                    island.settle()
                error = caught.value
            island.give_up(error)
            found.append(str(error).partition(": ")[::2])
            assert island.of_first(lambda: "together") == "together"
        return found

    def told(rank: int) -> tuple[str, str]:
        return f"Rank {rank} of this island has lost a rank of another island", f"by {rank}"

    found = run_ranks(3, train)
    assert [each[:3] for each in found] == [[0, False, True]] * 3
    assert [each[3] for each in found] == [told(1), ("by 1", ""), told(1)]
    assert [each[4] for each in found] == [("by 0", ""), told(0), ("by 2", "")]


def test_ranks_that_differ() -> None:
    def train(ranks: Communicator) -> None:
        island = Island(ranks)
        island.of_first(lambda: None)
        island.settle("commits [0]")
        island.settle(f"commits {[0, 1][: 1 + ranks.rank]}")

    message = (
        r"The ranks of an island differ: commits \[0\] on rank 0; commits \[0, 1\] on rank 1\. All of them have to load"
    )
    for kind, text in errors(2, train):
        assert kind is RuntimeError
        assert re.match(message, text)


def test_an_error_of_the_first_rank_is_one_of_all() -> None:
    """After it, nobody tells the others about it."""

    def train(ranks: Communicator) -> None:
        island = Island(ranks)
        with pytest.raises(TimeoutError) as caught:
            island.of_first(lambda: fail(ranks.rank))
        island.give_up(caught.value)
        assert island.is_first == (ranks.rank == 0)
        raise caught.value

    def fail(rank: int) -> None:
        raise TimeoutError(f"on rank {rank}")

    assert errors(2, train) == [(TimeoutError, "on rank 0")] * 2


class Settled(LocalCommunicator):
    """A rank that notes what its island compares."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def settle(self, alike: str = "") -> None:
        self.texts.append(alike)


@pytest.mark.parametrize(
    ("options", "read", "times"),
    [
        ({"overlap": 1}, lambda synchronizer: synchronizer.state_dict(), 1),
        ({"center": "sharded"}, lambda synchronizer: synchronizer.state_dict(), 1),
        ({"center": "root"}, lambda synchronizer: synchronizer.distance(), 1),
        ({"center": "sharded"}, lambda synchronizer: back_up(synchronizer, own_share(synchronizer)), 1),
        ({}, lambda synchronizer: synchronizer.state_dict(), 0),
    ],
)
def test_ranks_of_an_island_agree_after_what_others_take_part_in(
    options: dict[str, Any], read: Callable[[Any], object], times: int
) -> None:
    """Completing an exchange in flight, reading a center that is not on every rank, sending it to another island."""
    ranks, x = Settled(), np.zeros(2)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 1, process_set=ranks, **options)
    optimizer.step([np.ones(2)])
    before = len(ranks.texts)
    read(optimizer.synchronizer)
    assert len(ranks.texts) - before == times
    read(optimizer.synchronizer)
    assert len(ranks.texts) - before == (times if "overlap" in options else 2 * times)


@pytest.mark.parametrize("loaded", [False, True])
def test_before_training_a_rank_of_an_island_reads_its_state_alone(loaded: bool) -> None:
    """If an island is lost at the first step, some ranks of another one may have begun, and others have not."""
    ranks, x = Settled(), np.zeros(2)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 1, process_set=ranks, center="sharded")
    saved = optimizer.synchronizer.state_dict()
    if loaded:
        optimizer.synchronizer.load_state_dict(saved)
        optimizer.synchronizer.state_dict()
    assert ranks.texts == []


def test_next_exchanges_that_a_loss_decides_on_are_compared() -> None:
    """So that ranks of an island that report different losses raise an error, instead of exchanging at other steps."""
    ranks, x = Settled(), np.zeros(2)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), AdaComm(4, 1), process_set=ranks)
    for step in range(12):
        optimizer.synchronizer.report(10.0 * 0.5**step)
        optimizer.step([np.ones(2)])
    assert optimizer.synchronizer.rounds == 6, "at steps 4 and 8 to 12"
    assert [text for text in ranks.texts if text] == [f"the next exchange at step {step}" for step in range(9, 14)]
