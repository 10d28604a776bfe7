"""Shares of a center, with copies on other ranks: what is left of it when ranks are lost."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, DiLoCo
from hvd_periodic.elastic.backups import ShardBackup, back_up, backup_ranks, restore_center
from hvd_periodic.elastic.shards import FullCenter, full_center, own_share
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import errors, read_center, run_ranks

SHAPES = ((3, 2), (7,), ())

MAKE: dict[str, Any] = {
    "elastic": lambda x, **options: ElasticAverageOptimizer(SGD(0.1), x, 2, **options),
    "diloco": lambda x, **options: PeriodicOptimizer(SGD(0.1), x, DiLoCo(), 2, **options),
    "agn": lambda x, **options: AGNOptimizer(SGD(0.1, 0.5), x, 2, **options),
}


def make(name: str, communicator: Communicator, center: str) -> tuple[Any, list[np.ndarray]]:
    values = [np.arange(float(np.prod(shape))).reshape(shape) for shape in SHAPES]
    named = {str(i): value for i, value in enumerate(values)}
    return MAKE[name](named, process_set=communicator, center=center), values


@functools.cache
def train(name: str, size: int, center: str) -> list[tuple[ShardBackup, dict[str, Any], list[np.ndarray]]]:
    """Return what every rank has kept after five steps, the state that all have together, and the center."""

    def work(communicator: Communicator) -> Any:
        optimizer, values = make(name, communicator, center)
        for step in range(5):
            optimizer.step([np.full_like(value, communicator.rank + step % 3) for value in values])
        mirror = back_up(optimizer.synchronizer, own_share(optimizer.synchronizer))
        return mirror, optimizer.synchronizer.state_dict(), read_center(optimizer, values)

    return run_ranks(size, work)


def recover(name: str, center: str, mirrors: Sequence[ShardBackup | None]) -> list[FullCenter]:
    """Return the center as each of as many ranks finds it."""

    def work(communicator: Communicator) -> FullCenter:
        optimizer, _ = make(name, communicator, center)
        return restore_center(communicator, optimizer.synchronizer, mirrors[communicator.rank], None)

    return run_ranks(len(mirrors), work)


LEFT = [(3, [0, 2]), (3, [1, 2]), (2, [1]), (4, [3, 2]), (3, [2, 0, 1]), (1, [0])]
"""Numbers of ranks, and those that are left."""


@pytest.mark.parametrize(("name", "of", "center"), covering(("elastic", "diloco"), LEFT, ("root", "sharded")), ids=str)
def test_the_center_of_those_that_are_left(name: str, of: tuple[int, list[int]], center: str) -> None:
    """In whatever order, and with ranks that join before and after."""
    size, left = of
    found = train(name, size, center)
    _, state, values = found[0]
    for mirrors in ([found[rank][0] for rank in left], [None, *(found[rank][0] for rank in left), None]):
        for whole in recover(name, center, mirrors):
            vectors = whole.vectors["parameters"]
            assert vectors.keys() == ({"center", "momentum"} if name == "diloco" else {"center"})
            for key, tensors in vectors.items():
                for tensor, array in tensors.items():
                    np.testing.assert_array_equal(array, state["vectors"]["parameters"][key][tensor], strict=True)
            for array, value in zip(vectors["center"].values(), values, strict=True):
                np.testing.assert_array_equal(array, value)


def test_the_optimizer_of_the_roots_center() -> None:
    found = train("agn", 2, "root")
    (whole,) = recover("agn", "root", [found[1][0]])
    expected = found[0][1]["center_optimizer"]
    assert expected is not None
    assert repr(whole.optimizer_state) == repr(expected)


def elements(mirror: ShardBackup) -> list[int]:
    """Return how many elements of the center each share has that a rank keeps."""
    of_shares = [share.vectors["parameters"]["center"] for share in mirror.shares.values()]
    return sorted(sum(stop - start for _, start, stop, _ in stretches) for stretches in of_shares)


def test_what_a_rank_keeps() -> None:
    """No more of the center than its own share and another."""
    assert [elements(mirror) for mirror, _, _ in train("elastic", 4, "sharded")] == [[3, 4], [3, 4], [3, 4], [3, 4]]
    assert [elements(mirror) for mirror, _, _ in train("elastic", 3, "root")] == [[0, 14], [0, 14], [0, 0]]


def test_a_share_that_was_lost_with_its_copy() -> None:
    kept = [mirror for mirror, _, _ in train("elastic", 4, "sharded")]

    def work(communicator: Communicator) -> None:
        optimizer, _ = make("elastic", communicator, "sharded")
        restore_center(communicator, optimizer.synchronizer, [kept[0], None, kept[2]][communicator.rank], None)

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert text == (
            "Shards of the center were lost together with their backups: the shards of ranks 1 and 3, with backups on "
            "ranks 1 and 3. Start the job again from a checkpoint"
        )


def test_who_had_a_share_does_not_matter_where_the_root_has_all() -> None:
    kept = [mirror for mirror, _, _ in train("elastic", 4, "root")]
    recover("elastic", "root", [kept[0]])
    with pytest.raises(RuntimeError, match="the shards of rank 0, with backups on rank 2"):
        recover("elastic", "root", [kept[1], kept[3]])


def test_copies_are_on_other_hosts() -> None:
    """Horovod gives up a host of which a rank was lost."""
    for hosts in ([0, 0, 0, 3, 3, 3], [0, 0, 2, 3, 3, 3], [0, 1], [0, 0, 2], [0, 1, 1, 1, 4, 4]):
        for rank, keeper in enumerate(backup_ranks(hosts)):
            assert hosts[rank] != hosts[keeper]
    for hosts in ([0, 1, 2, 3], [0, 0, 2, 3, 3, 5], [0, 1, 2, 3, 4], list(range(9))):
        order = list(dict.fromkeys(hosts))
        for rank, keeper in enumerate(backup_ranks(hosts)):
            apart = abs(order.index(hosts[rank]) - order.index(hosts[keeper]))
            assert 2 <= apart <= len(order) - 2, "neither the same host nor a neighbour"
    assert sorted(backup_ranks([0, 0, 0, 3, 3, 3])) == list(range(6)), "every rank keeps one"
    assert backup_ranks([0]) == [0]


def test_some_have_all_of_it() -> None:
    """Where a rank was lost while others had put the center back already: each still has the whole, or a mirror."""
    found = train("diloco", 3, "sharded")
    mirror, state, _ = found[1]

    def work(communicator: Communicator) -> FullCenter:
        optimizer, _ = make("diloco", communicator, "sharded")
        whole = full_center(optimizer.synchronizer, state)
        mirrors, wholes = [mirror, None, None], [None, whole, None]
        rank = communicator.rank
        return restore_center(communicator, optimizer.synchronizer, mirrors[rank], wholes[rank])

    for whole in run_ranks(3, work):
        for key, tensors in whole.vectors["parameters"].items():
            for tensor, array in tensors.items():
                np.testing.assert_array_equal(array, state["vectors"]["parameters"][key][tensor], strict=True)


def test_the_log_says_where_a_share_came_from(caplog: pytest.LogCaptureFixture) -> None:
    kept = [mirror for mirror, _, _ in train("elastic", 3, "sharded")]
    with caplog.at_level(logging.WARNING, "hvd_periodic"):
        recover("elastic", "sharded", [kept[0], kept[2]])
    assert [record.getMessage() for record in caplog.records] == [
        "Rank 1 was lost: its shard of the center is restored from the backup on rank 2, now rank 1"
    ]


def test_some_commit_and_others_exchange() -> None:
    def work(communicator: Communicator) -> None:
        optimizer, values = make("elastic", communicator, "sharded")
        optimizer.step([np.ones_like(value) for value in values])
        if communicator.rank == 1:
            back_up(optimizer.synchronizer, own_share(optimizer.synchronizer))
        optimizer.step([np.ones_like(value) for value in values])

    for kind, text in errors(2, work):
        assert kind is RuntimeError
        assert "commit() of optimizer 1 at local step 1 on rank 1" in text
        assert "all ranks commit together, at the same local step" in text
