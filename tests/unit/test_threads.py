"""Ranks as threads: what happens when one fails, or meets another call than the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvd_periodic import Communicator
from tests.helpers import errors, run_ranks


def test_results_come_in_rank_order() -> None:
    assert run_ranks(4, lambda communicator: (communicator.rank, communicator.size)) == [(i, 4) for i in range(4)]


def test_an_error_ends_the_collectives_of_the_others() -> None:
    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise KeyError("mine")
        communicator.allgather_object(None, "name")

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, work)


def test_the_first_error_is_raised() -> None:
    """What rank 1 raises is a consequence of what rank 0 raised."""

    def work(communicator: Communicator) -> None:
        if communicator.rank == 0:
            raise KeyError("cause")
        try:
            communicator.allgather_object(None, "name")
        except threading.BrokenBarrierError:
            raise ValueError("consequence") from None

    with pytest.raises(KeyError, match="cause"):
        run_ranks(2, work)


def test_different_calls_are_an_error_on_all_ranks() -> None:
    found = errors(2, lambda communicator: communicator.allgather_object(None, f"call {communicator.rank}"))
    assert all(kind is RuntimeError and "call 0" in text and "call 1" in text for kind, text in found)
    found = errors(2, lambda c: c.allreduce(np.zeros(1), "name", "max" if c.rank else "sum"))
    assert all(kind is RuntimeError for kind, _ in found)
    found = errors(2, lambda c: c.broadcast(np.zeros(1), "name", c.rank))
    assert all(kind is RuntimeError for kind, _ in found)


def test_sums_run_in_rank_order() -> None:
    """1e16 + 1 − 1e16 is 0 from the left and 1 in the order 0, 2, 1: reproducible to the bit."""
    values = [1e16, 1.0, -1e16]
    found = run_ranks(
        3, lambda communicator: communicator.allreduce(np.array([values[communicator.rank]]), "s")().item()
    )
    assert found == [0.0] * 3
