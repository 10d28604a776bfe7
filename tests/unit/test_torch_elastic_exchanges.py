"""Elastic states whose ranks are threads: an exchange in which a rank is lost is undone or done, on all ranks alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from tests.losing import LostError  # noqa: E402
from tests.parallel import elastic_scenarios as equations  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402
from tests.unit.test_torch_elastic_ranks import (  # noqa: E402
    HERE,
    PERIOD,
    Worker,
    _ranks_are_threads,  # noqa: F401 - a fixture of every test here.
    new,
    together,
)

OWN = {"run", "exchange_seconds", "bytes_sent"}
"""What ranks count of their own work, and the name of a run."""

INT8, INT4, INT2, TOPK = (getattr(hvdp.Compression, name) for name in ("int8", "int4", "int2", "topk"))


def make(options: dict[str, Any]) -> Worker:
    """Return a worker that commits after every exchange."""
    model = torch.nn.Module()
    model.x, model.y = (torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (2, 3))
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvdp.PeriodicOptimizer(local, model, period=PERIOD, **options)
    return Worker(model, optimizer, local, hvdp.elastic.State(model, optimizer, commit="exchange", batch=0))


def train(worker: Worker, steps: int) -> None:
    """Descend, each rank and each step to another place."""
    for _ in range(steps):
        to = torch.sin((1.0 + HERE.communicator.rank) * torch.arange(1, 6, dtype=torch.float64) + worker.state.batch)
        worker.model.x.grad = worker.model.x.detach() - to[:2]
        worker.model.y.grad = worker.model.y.detach() - to[2:]
        worker.state.batch += 1
        worker.optimizer.step()


def comparable(value: Any) -> Any:
    """Return a state without tensors, which cannot be compared at once."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in OWN}
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value.tolist() if torch.is_tensor(value) else value


def everything(worker: Worker) -> Any:
    """Return all that a worker has: replica, local state, center, what has not been sent or is in flight, counters."""
    return comparable((worker.state.batch, worker.model.state_dict(), worker.optimizer.state_dict()))


def begun(options: dict[str, Any], steps: int) -> list[Worker]:
    """Return three workers that have trained."""

    def work(worker: Worker) -> Worker:
        worker.state.sync()
        train(worker, steps)
        return worker

    return together([lambda: make(options)] * 3, work)


def lost_in(options: dict[str, Any], number: int, ahead: int) -> list[Worker] | None:
    """Return three workers, one of which is lost in a collective of two exchanges; None if there are not so many.

    Args:
        options: of their optimizers.
        number: of the collective, after the first exchange.
        ahead: the rank that has heard what came of it.
    """

    def work(worker: Worker) -> tuple[Worker, bool]:
        worker.state.sync()
        train(worker, PERIOD + 1)
        threads: Any = HERE.communicator._group
        threads.lose(threads.calls + number, [ahead])
        try:
            train(worker, 2 * PERIOD)
        except LostError:
            return worker, True
        return worker, False

    found = together([lambda: make(options)] * 3, work)
    return [worker for worker, _ in found] if any(lost for _, lost in found) else None


def went_on(left: Sequence[Worker], options: dict[str, Any]) -> list[Any]:
    """Let those that are left go on with another one; return what each had at the beginning, and at the end."""

    def work(worker: Worker) -> tuple[Any, Any]:
        worker.begin_again()
        beginning = everything(worker)
        train(worker, 2 * PERIOD + 1)
        worker.optimizer.finalize()
        return beginning, everything(worker)

    return together([left[0], lambda: make(options), left[1]], work)


OPTIONS: list[dict[str, Any]] = [
    {"algorithm": hvdp.DiLoCo, "compression": INT8, "overlap": 1},
    {"algorithm": hvdp.DiLoCo, "compression": INT8, "overlap": "period"},
    {"algorithm": hvdp.DiLoCo, "compression": INT8, "overlap": 1, "fragments": 2},
    {"algorithm": hvdp.DiLoCo, "compression": INT8, "fragments": 2},
    {"algorithm": hvdp.DiLoCo, "compression": INT8},
    {"algorithm": hvdp.DiLoCo, "compression": TOPK(0.4)},
    {"algorithm": hvdp.DiLoCo, "compression": INT4, "overlap": 1, "max_mean_norm": 0.1},
    {"algorithm": hvdp.DiLoCo, "center": "sharded"},
    {"algorithm": hvdp.EASGD, "overlap": 1},
    {"algorithm": hvdp.EASGD, "compression": INT8},
    {"algorithm": hvdp.EASGD, "center": "sharded"},
    {"algorithm": hvdp.AGN, "compression": INT8, "overlap": 1},
    {"algorithm": hvdp.AGN, "compression": INT2},
    {"algorithm": hvdp.AGN, "center": "root"},
    {"algorithm": hvdp.Averaging, "overlap": 1},
]


@pytest.mark.parametrize(
    ("options", "ahead"),
    [(OPTIONS[0], 0), *(thorough(options, ahead) for ahead in (1, 2) for options in OPTIONS)],
    ids=str,
)
def test_an_exchange_in_which_a_rank_is_lost(options: dict[str, Any], ahead: int) -> None:
    """All go on as if it had been lost between two exchanges, before this one or after it: to the bit.

    Only rank ``ahead`` hears what came of the collective in which it is lost.
    """
    between: dict[int, list[Any]] = {}
    for number in itertools.count():
        left = lost_in(options, number, ahead)
        if left is None:
            break
        found = went_on(left[:2], options)
        batch = found[0][0][0]
        if batch not in between:
            between[batch] = went_on(begun(options, batch)[:2], options)
        assert found == between[batch], f"in collective {number}"
    assert len(between) > 1


@pytest.mark.parametrize(
    ("algorithm", "overlap"), [("diloco", 2), thorough("diloco", 0), thorough("easgd", 0), thorough("agn", 2)]
)
def test_the_equations_of_8_bits(algorithm: str, overlap: int) -> None:
    """They tell the same as workers: float32 instead of float64 in a sum makes 1e-8, and 1e-3 after some exchanges."""
    steps = 20 * equations.PERIOD
    kind = {"diloco": hvdp.DiLoCo, "easgd": hvdp.EASGD, "agn": hvdp.AGN}[algorithm]

    def work(worker: Worker) -> Any:
        model = torch.nn.Module()
        model.x = torch.nn.Parameter(torch.zeros(equations.SIZE, dtype=torch.float64))
        local = torch.optim.SGD(model.parameters(), lr=equations.RATE, momentum=equations.MOMENTUM)
        optimizer = hvdp.PeriodicOptimizer(
            local, model, kind, equations.PERIOD, overlap=overlap, compression=hvdp.Compression.int8
        )
        for step in range(steps):
            to = equations.target(HERE.communicator.rank, step)
            model.x.grad = model.x.detach() - torch.tensor(to, dtype=torch.float64)
            optimizer.step()
        optimizer.finalize()
        return model.x.detach().numpy()

    found = together([lambda: new()] * 3, work)
    _, workers = equations.expected(algorithm, [(0, range(3))], overlap=overlap, int8=True, steps=steps)
    np.testing.assert_allclose(found, [worker.x for worker in workers.values()], rtol=0, atol=1e-9)
