"""Rounds with a quorum beside other asynchronous optimizers of the same ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hvd_periodic import Communicator, DiLoCo
from hvd_periodic.comm.base import DifferentCallsError
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import TIMEOUT_SECONDS, run_ranks

QUORUM = {"quorum": 2}


@pytest.fixture(params=["window", "service"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rounds in shared memory, and through messages."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", request.param)
    return str(request.param)


def optimizer_of(communicator: Communicator, **options: Any) -> PeriodicOptimizer:
    x = {"x": np.full(3, float(communicator.rank))}
    return PeriodicOptimizer(SGD(0.1), x, DiLoCo(), 1, process_set=communicator, **options)


@pytest.mark.parametrize("first", [QUORUM, {"asynchronous": True}], ids=["quorum", "asynchronous"])
def test_a_rank_in_finalize_of_one_is_not_waited_for_by_rounds_of_another(first: dict[str, Any]) -> None:
    """The last rank has one more step of both: the others wait for it in finalize() of the first."""

    def work(communicator: Communicator) -> list[int]:
        both = [optimizer_of(communicator, **first), optimizer_of(communicator, **QUORUM)]
        for _ in range(3 if communicator.rank == 2 else 2):
            for each in both:
                each.step([np.ones(3)])
        for each in both:
            each.finalize()
        return [each.synchronizer.counters.rounds for each in both]

    assert [rounds for _, rounds in run_ranks(3, work)] == [2, 2, 3]


def finalize(first: PeriodicOptimizer, _: PeriodicOptimizer) -> None:
    first.finalize()


def adopt(_: PeriodicOptimizer, second: PeriodicOptimizer) -> None:
    second.adopt({"x": np.zeros(3)})


@pytest.mark.parametrize("call", [finalize, adopt])
def test_after_different_calls_of_one_those_of_another_are_counted_alike(
    call: Callable[[PeriodicOptimizer, PeriodicOptimizer], None], way: str
) -> None:
    """Ranks that are late in an audit are not taken for ranks in a later call."""
    waits = threading.Event()

    def work(communicator: Communicator) -> str:
        first, second = optimizer_of(communicator, **QUORUM), optimizer_of(communicator, **QUORUM)
        for each in (first, second):
            each.step([np.ones(3)])
            if call is adopt:
                each.finalize()
        with pytest.raises(DifferentCallsError) as raised:
            first.synchronizer.audit() if communicator.rank else call(first, second)
        exchanger: Any = second.synchronizer.exchanger
        transport = exchanger.worker.transport
        tells, closes = transport.apart, getattr(transport, "_close_what_is_due", None)

        def late(starts: bool) -> None:
            if not starts and way == "window":
                assert waits.wait(TIMEOUT_SECONDS)
            tells(starts)

        def waiting(agreed: Any) -> bool:
            found: bool = closes(agreed)
            waits.set()
            return found

        if communicator.rank:
            with patch.object(transport, "apart", late):
                second.synchronizer.audit()
            second.finalize()
        else:
            second.synchronizer.audit()
            with patch.object(transport, "_close_what_is_due", waiting, create=True):
                second.finalize()
        return str(raised.value)

    texts = run_ranks(3, work)
    assert len(set(texts)) == 1
    assert texts[0].startswith("Ranks are in different calls")
