"""Calls that are for all ranks together, on some of them only: an error on every rank that says who waits where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer
from tests.helpers import errors, run_ranks


def read(optimizer: Any) -> None:
    with optimizer.center():
        pass


CALLS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "center": (read, "root", "reading of the center"),
    "distance": (lambda optimizer: optimizer.synchronizer.distance(), "sharded", "reading of the center"),
    "state": (lambda optimizer: optimizer.synchronizer.state_dict(), "sharded", "reading of the center"),
    "audit": (lambda optimizer: optimizer.synchronizer.audit(), "replicated", "audit()"),
    "broadcast": (lambda optimizer: optimizer.synchronizer.broadcast(), "replicated", "broadcast()"),
}


def make(communicator: Communicator, center: str) -> tuple[Any, np.ndarray]:
    """Return an optimizer that has taken a step of a period of two."""
    x = np.zeros((2, 3))
    optimizer = ElasticAverageOptimizer(SGD(0.1), {"x": x}, 2, process_set=communicator, center=center)
    optimizer.step([np.ones((2, 3))])
    return optimizer, x


@pytest.mark.parametrize("name", CALLS)
def test_one_rank_calls_and_others_exchange(name: str) -> None:
    call, center, place = CALLS[name]

    def work(communicator: Communicator) -> None:
        optimizer, _ = make(communicator, center)
        if communicator.rank == 1:
            call(optimizer)
        optimizer.step([np.ones((2, 3))])

    found = errors(3, work)
    assert len(set(found)) == 1, "the ranks tell different stories"
    kind, text = found[0]
    assert kind is RuntimeError
    assert f"{place} of optimizer 1 at local step 1 on rank 1" in text
    assert "exchange of optimizer 1 at local step 2 on ranks 0 and 2" in text
    assert "all ranks together" in text


@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_call(name: str) -> None:
    call, center, _ = CALLS[name]
    run_ranks(3, lambda communicator: call(make(communicator, center)[0]))


@pytest.mark.parametrize("center", ["replicated", "root"])
@pytest.mark.parametrize("name", ["center", "distance", "state"])
def test_an_array_that_was_resized(name: str, center: str) -> None:
    """What cannot be read any more is named; on all ranks, where all have to read."""
    call = CALLS[name][0]

    def work(communicator: Communicator) -> None:
        optimizer, x = make(communicator, center)
        if communicator.rank == 1 or center == "replicated":
            x.shape = (6,)
        call(optimizer)

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert "Parameter 'x' changed from ((2, 3), dtype('float64'))" in text


@pytest.mark.parametrize("overlap", [0, 1])
def test_finalize_with_an_array_that_was_resized(overlap: int) -> None:
    """At the end of no training, and where an exchange is under way: on all ranks."""

    def work(communicator: Communicator) -> None:
        x = np.zeros((2, 3))
        optimizer = ElasticAverageOptimizer(SGD(0.1), {"x": x}, 2, process_set=communicator, overlap=overlap)
        for _ in range(2 * overlap):
            optimizer.step([np.ones((2, 3))])
        if overlap == 0:
            optimizer.synchronizer.finalize()
        if communicator.rank == 1:
            x.shape = (6,)
        optimizer.synchronizer.finalize()

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert "Parameter 'x' changed from ((2, 3), dtype('float64'))" in text
