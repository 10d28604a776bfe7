"""Exchanges that travel during local steps of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import Averaging, Communicator  # noqa: E402
from tests.helpers import errors, run_ranks  # noqa: E402
from tests.unit.test_overlap import Late  # noqa: E402


def test_statistics_go_where_they_go_without_overlap() -> None:
    """They are waited for: taken late, they would lose what local steps have added, with a whole period all of it."""

    def run(communicator: Communicator, overlap: int | str) -> list[list[float]]:
        torch.set_num_threads(1)
        model, seen = torch.nn.BatchNorm1d(2).eval(), []
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, Averaging(), 2, process_set=communicator, overlap=overlap
        )
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            model.running_mean += 1.0 + communicator.rank
            optimizer.step()
            seen.append(model.running_mean.tolist())
        return seen

    expected = run_ranks(2, lambda communicator: run(communicator, 0))
    assert expected[0][5] == [9.0, 9.0], "1.5 at every step"
    for overlap in (1, "period"):
        assert run_ranks(2, lambda communicator, d=overlap: run(communicator, d)) == expected, overlap  # type: ignore[misc]


def test_copies_of_an_optimizer_have_their_exchanges_one_after_the_other() -> None:
    """They have the same names for their collectives, of which only one may be under way."""
    in_flight: set[tuple[int, str]] = set()

    class Strict(Late):
        def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
            assert (self.rank, name) not in in_flight
            in_flight.add((self.rank, name))
            wait = super().allreduce(buffer.numpy(), name, op)

            def finish() -> Any:
                in_flight.discard((self.rank, name))
                wait()
                return buffer

            return finish

    def run(communicator: Any) -> None:
        communicator.__class__ = Strict
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD([parameter], 0.1), [("w", parameter)], Averaging(), 2, process_set=communicator, overlap=1
        )
        pairs = [(parameter, optimizer)]
        for step in range(7):
            if step == 1:
                pairs.append(copy.deepcopy(pairs[0], {id(communicator): communicator}))
            for trained, its_optimizer in pairs:
                trained.grad = torch.full((3,), 1.0 + communicator.rank)
                its_optimizer.step()
        assert torch.equal(pairs[0][0], pairs[1][0])

    run_ranks(2, run)


def test_levels_cannot_overlap() -> None:
    def make(communicator: Communicator, inner: int, outer: int) -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], 0.1)
        for overlap in (inner, outer):
            optimizer = hvdp.ModelAverageOptimizer(
                optimizer, [("w", parameter)], 2, process_set=communicator, overlap=overlap
            )

    for overlaps in ((1, 0), (0, 1)):
        for kind, message in errors(2, lambda communicator, pair=overlaps: make(communicator, *pair)):  # type: ignore[misc]
            assert kind is ValueError
            assert "`overlap` needs a single level" in message
    run_ranks(2, lambda communicator: make(communicator, 0, 0))


class Halfway(Averaging):
    """Replicas go half of the way."""

    def pull(self, space: Any, x: Any, worker: Any, center: Any, exchange: Any) -> Any:
        return space.lerp(x, center, 0.5), {}


def test_a_pull_may_overwrite_the_replica_that_it_is_given() -> None:
    def run(communicator: Any) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD([parameter], 1.0), [("w", parameter)], Halfway(), 2, process_set=communicator, overlap=1
        )
        for _ in range(3):
            parameter.grad = torch.tensor([-1.0 - 2.0 * communicator.rank], dtype=torch.float64)
            optimizer.step()
        return float(parameter.item())

    assert run_ranks(2, run) == [2 + 1 + 0.5 * (4 - 2), 6 + 3 + 0.5 * (4 - 6)]
