"""Communicators that plain pytest can run pass the contract; tests/parallel runs it on the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, LocalCommunicator
from hvd_periodic.comm.staging import Staged
from hvd_periodic.comm.subset import Subset
from hvd_periodic.comm.threads import ThreadCommunicator
from tests.conformance.communicator_contract import LAUNCHERS, check_communicator
from tests.conformance.discovery import communicators
from tests.helpers import outcomes, run_ranks

HERE = {"LocalCommunicator", "Subset", "ThreadCommunicator"}


@pytest.mark.parametrize("name", sorted(communicators()))
def test_every_communicator_is_tested_somewhere(name: str) -> None:
    assert name in LAUNCHERS, (
        f"{communicators()[name]} defines {name}, and no test runs it: say in LAUNCHERS of "
        "tests/conformance/communicator_contract.py what starts its ranks, and call check_communicator() there"
    )
    assert (LAUNCHERS[name] == "pytest") == (name in HERE), f"run check_communicator() on {name} in this file"
    if name in HERE:
        assert issubclass(getattr(importlib.import_module(communicators()[name]), name), Communicator)


def test_the_list_of_launchers_is_not_stale() -> None:
    assert LAUNCHERS.keys() == communicators().keys()


def test_local() -> None:
    check_communicator(LocalCommunicator())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(size: int) -> None:
    def work(communicator: Communicator) -> None:
        assert isinstance(communicator, ThreadCommunicator)
        check_communicator(communicator)

    run_ranks(size, work)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 2], [1, 3]], [[0, 1, 4], [2, 3, 5]]])
def test_subsets(groups: list[list[int]]) -> None:
    """Of one size: all do the same at the same time, and the contract has a broadcast from every rank."""

    def work(communicator: Communicator) -> None:
        check_communicator(Subset(communicator, lambda: next(ranks for ranks in groups if communicator.rank in ranks)))

    run_ranks(sum(map(len, groups)), work)


class Faulty(Communicator):
    """Threads with a planted fault."""

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.inner = inner

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        return self.inner.allreduce(buffer, name, op)

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        return self.inner.broadcast(buffer, name, root)

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        return self.inner.reducescatter(buffer, name)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        return self.inner.allgather(buffer, name, out)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        return self.inner.allgather_object(value, name)


class Mean(Faulty):
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        result = self.inner.allreduce(buffer, name, op)()
        return lambda: (result / self.size).astype(result.dtype) if op == "sum" else result


class SumForMax(Faulty):
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        return self.inner.allreduce(buffer, name)


class ThroughFloats(Faulty):
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        result = self.inner.allreduce(np.asarray(buffer, "float64"), name, op)()
        return lambda: result.astype(buffer.dtype)


class NotQuiteIdentical(Faulty):
    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        result = self.inner.allreduce(buffer, name, op)()
        if self.rank == 0 and "bits.float64" in name:
            result = np.nextafter(result, 1e9)
        return lambda: result


class OneBufferForAll(Faulty):
    """The result of the last call in flight, for all that fit."""

    last: Any = None

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        result = self.last = self.inner.allreduce(buffer, name, op)()
        return lambda: self.last if self.last.shape == result.shape else result


class RootIsAlwaysZero(Faulty):
    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        return self.inner.broadcast(buffer, name, 0)


class WrongOrder(Faulty):
    def allgather_object(self, value: object, name: str) -> list[Any]:
        return self.inner.allgather_object(value, name)[::-1]


@pytest.mark.parametrize("fault", Faulty.__subclasses__(), ids=lambda cls: cls.__name__)
def test_the_contract_notices(fault: type[Faulty]) -> None:
    def work(communicator: Communicator) -> None:
        check_communicator(fault(communicator))

    assert any(isinstance(outcome, AssertionError) for outcome in outcomes(2, lambda c: _abort_after(c, work)))


def _abort_after(communicator: Communicator, work: Callable[[Communicator], None]) -> None:
    """Run ``work``; after a failure, let ranks that still wait fail at once instead of after the timeout."""
    try:
        work(communicator)
    except BaseException:
        communicator._group.abort()  # type: ignore[attr-defined]
        raise


def test_a_communicator_without_fault_passes_through_the_same_wrapper() -> None:
    run_ranks(2, lambda communicator: check_communicator(Faulty(communicator)))


class Lists:
    """The memory of a front end whose buffers are lists."""

    def to_host(self, buffer: list[float]) -> np.ndarray:
        return np.array(buffer)

    def from_host(self, array: np.ndarray, like: list[float]) -> list[float]:
        return array.tolist()


class ListCommunicator(Staged, ThreadCommunicator):
    memory = Lists()


def test_buffers_of_another_kind_pass_through_host_memory() -> None:
    def work(communicator: Communicator) -> list[Any]:
        communicator.__class__ = ListCommunicator
        own = [1.0 + communicator.rank, 5.0]
        return [
            communicator.allreduce(own, "sum")(),
            communicator.broadcast(own, "root", 1),
            communicator.reducescatter(own, "parts")(),
            communicator.allgather(own, "gather"),
            communicator.begin_allgather(own, "begin", None)(),
            communicator.alltoall(own, "exchange")(),
            communicator.tile(own, 2),
            communicator.maximum(own, [1.5, 6.0]),
        ]

    both = [1.0, 5.0, 2.0, 5.0]
    for rank, found in enumerate(run_ranks(2, work)):
        own = [1.0 + rank, 5.0]
        parts, exchanged = ([3.0], [10.0])[rank], ([1.0, 2.0], [5.0, 5.0])[rank]
        larger = [max(own[0], 1.5), 6.0]
        assert found == [[3.0, 10.0], [2.0, 5.0], parts, both, both, exchanged, own * 2, larger]


def test_arrays_that_nothing_may_change_are_neither_sent_nor_filled() -> None:
    """They may be the memory of variables."""

    def work(communicator: Communicator) -> list[Any]:
        communicator.__class__ = ListCommunicator
        own, out = np.array([1.0 + communicator.rank]), np.zeros(2)
        own.flags.writeable = out.flags.writeable = False
        sums, values = communicator.allreduce(own, "sum")(), communicator.broadcast(own, "root", 1)
        gathered = [communicator.allgather(own, "all", out), communicator.begin_allgather(own, "begin", out)()]
        return [array.tolist() for array in (sums, values, *gathered, own, out)]

    for rank, found in enumerate(run_ranks(2, work)):
        assert found == [[3.0], [2.0], [1.0, 2.0], [1.0, 2.0], [1.0 + rank], [0.0, 0.0]]
