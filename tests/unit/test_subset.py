"""Groups that exchange in step: what a function as ``process_set`` makes of all ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.comm.subset import Subset, require_possible
from tests.helpers import errors, run_ranks

GROUPS = [[0, 1], [2, 4, 5], [3]]


def of(rank: int) -> list[int]:
    """Return the group of a rank."""
    return next(group for group in GROUPS if rank in group)


def group_of(communicator: Communicator) -> Subset:
    """Return the group of this thread."""
    return Subset(communicator, partial(of, communicator.rank))


def values(rank: int, size: int = 7) -> np.ndarray[Any, Any]:
    """Return what a rank brings."""
    return np.sin(np.arange(size) + 10.0 * rank)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_collectives_of_all_groups_at_the_same_time(size: int) -> None:
    def work(communicator: Communicator) -> list[Any]:
        group = group_of(communicator)
        mine = values(communicator.rank, size)
        group.check()
        return [
            group.allreduce(mine.copy(), "sum")(),
            group.allreduce(mine.copy(), "largest", "max")(),
            group.reducescatter(mine.copy(), "part")(),
            group.broadcast(mine.copy(), "last", group.size - 1),
            group.allgather(mine[: group.rank].copy(), "all"),
            group.alltoall(np.repeat(mine[:1], group.size), "parts")(),
            group.allgather_object(communicator.rank, "objects"),
            group.gather_integers(np.array([communicator.rank] * group.rank), "integers").tolist(),
            copy.deepcopy(group.global_ranks),
        ]

    for rank, found in enumerate(run_ranks(6, work)):
        group = of(rank)
        place, brought = group.index(rank), [values(member, size) for member in group]
        total, parts = sum(brought), np.array_split(np.arange(size), len(group))
        expected = [
            total,
            np.max(brought, axis=0),
            np.asarray(total)[parts[place]],
            brought[-1],
            np.concatenate([each[:k] for k, each in enumerate(brought)]),
            np.array([each[0] for each in brought]),
        ]
        for one, other in zip(found, expected, strict=False):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-15)
        assert found[len(expected) :] == [group, [member for k, member in enumerate(group) for _ in range(k)], group]


def test_functions_that_divide_nothing() -> None:
    def ask(chosen: list[list[int]], communicator: Communicator) -> None:
        Subset(communicator, lambda: chosen[communicator.rank]).check()

    text = r"must divide the ranks into groups. Received: \[0, 1\] on rank 0, and \[1\] on rank 1"
    for _, message in errors(2, partial(ask, [[0, 1], [1]])):
        assert message.endswith(text.replace("\\", ""))
    with pytest.raises(ValueError, match=r"the ranks of the group of this rank \(0\), out of 1. Received: \[0, 1\]"):
        run_ranks(1, partial(ask, [[0, 1]]))


def test_what_groups_do_not_do() -> None:
    def ask(communicator: Communicator) -> None:
        group = group_of(communicator)
        possible = {"center": "replicated", "nonfinite": "raise", "overlap": 0, "asynchronous": False}
        require_possible(group, **possible)  # type: ignore[arg-type]
        for refused in ({"center": "root"}, {"nonfinite": "skip"}, {"overlap": 2}, {"asynchronous": True}):
            require_possible(communicator, **(possible | refused))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="groups exchange in lockstep"):
                require_possible(group, **(possible | refused))  # type: ignore[arg-type]
        assert group.rank_of(None) == 0
        with pytest.raises(ValueError, match=r"every group starts from its first rank\. Received: 1"):
            group.rank_of(1)

    run_ranks(6, ask)
