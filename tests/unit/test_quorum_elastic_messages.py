"""Rounds with a quorum in elastic averaging with compression: messages are of the center as it is at the close."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, Compression
from hvd_periodic.algorithms import EASGD
from hvd_periodic.asynchronous.rounds_in_memory import RoundsInMemory
from hvd_periodic.journal.files import read_run_log
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires import as_wire
from tests.covering import covering
from tests.helpers import TIMEOUT_SECONDS, run_ranks
from tests.parallel.tiers import thorough
from tests.unit.test_quorum import LONG, PERIOD

SIZE, ALPHA, RATE = 40, 0.25, 0.1

WIRES: dict[str, Any] = {
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "int4": Compression.int4,
    "e3m0": Compression.e3m0,
    "int2": Compression.int2,
    "top-k": Compression.topk(0.25),
    "chunked top-k": Compression.topk(chunk=8, keep=2),
}


def initial() -> np.ndarray:
    return np.linspace(-1, 1, SIZE)


def gradient(x: np.ndarray, rank: int) -> np.ndarray:
    return (1 + 0.5 * rank) * (x - np.cos(np.arange(SIZE) + rank))


def local_steps(x: np.ndarray, rank: int) -> np.ndarray:
    for _ in range(PERIOD):
        x = x - RATE * gradient(x, rank)
    return x


class Worker:
    """A worker in rounds of elastic averaging."""

    def __init__(self, communicator: Communicator, sets: Sequence[Sequence[int]], **options: Any) -> None:
        self.communicator, self.rank, self.x = communicator, communicator.rank, initial()
        options = {"quorum": 1, "process_set": communicator, **options}
        self.optimizer = PeriodicOptimizer(SGD(RATE), {"x": self.x}, EASGD(ALPHA), PERIOD, **options)
        self.optimizer.synchronizer.begin()
        self.exchanger: Any = self.optimizer.synchronizer.exchanger
        self.exchanger.replay([sorted(members) for members in sets])
        communicator.allgather_object(None, "replayed")

    def train(self) -> None:
        for _ in range(PERIOD):
            self.optimizer.step([gradient(self.x, self.rank)])

    def center(self) -> Any:
        return self.optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"].copy()


def oracle(
    compression: Any, sets: Sequence[Sequence[int]], bound: float | str | None = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return every x, and c, after rounds of given workers, each of which trains before, from the equations."""
    wire: Any = as_wire(compression)
    x, c = [initial() for _ in range(3)], initial()
    for members in sets:
        d = {}
        for i in sorted(members):
            x[i] = local_steps(x[i], i)
            d[i] = x[i] - c
        norms = {i: float(np.linalg.norm(each)) for i, each in d.items()}
        limit = float(np.median(list(norms.values()))) if bound == "median" else bound
        sent = {i: wire.pack(Coding(), each, 3)[1] for i, each in d.items()}
        if limit is not None:
            sent = {i: min(1.0, float(limit) / norms[i]) * each for i, each in sent.items()}
        c = c + ALPHA * sum(sent.values())
        for i in d:
            x[i] = x[i] - ALPHA * sent[i]
    return x, c


@pytest.mark.parametrize(("name", "bound"), covering(WIRES, (None, 1.5, "median"), together=1))
def test_whoever_takes_part_messages_are_of_the_center_as_it_is(name: str, bound: float | str | None) -> None:
    def work(communicator: Communicator) -> Any:
        worker = Worker(communicator, LONG, compression=WIRES[name], max_message_norm=bound)
        for members in LONG:
            if worker.rank in members:
                worker.train()
            communicator.allgather_object(None, "closed")
        return worker.x, worker.center()

    expected, center = oracle(WIRES[name], LONG, bound)
    for (x, c), of_rank in zip(run_ranks(3, work), expected, strict=True):
        np.testing.assert_allclose(x, of_rank, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(c, center, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [thorough(name) if name in ("bf16", "int4", "e3m0") else name for name in WIRES])
def test_the_sum_is_conserved_and_without_gradients_all_meet(name: str) -> None:
    sets, start = [*LONG, [2], [0], [1, 2]] * 12, np.random.default_rng(0).normal(size=(3, SIZE))

    def work(communicator: Communicator) -> Any:
        worker = Worker(communicator, sets, compression=WIRES[name])
        worker.x[:] = start[worker.rank]
        communicator.allgather_object(None, "set")
        for members in sets:
            for _ in range(PERIOD if worker.rank in members else 0):
                worker.optimizer.step([np.zeros(SIZE)])
            communicator.allgather_object(None, "closed")
        return worker.x, worker.center()

    results = run_ranks(3, work)
    center = results[0][1]
    total = sum(x for x, _ in results) + center
    np.testing.assert_allclose(total, start.sum(axis=0) + initial(), rtol=0, atol=1e-12)
    for x, c in results:
        np.testing.assert_array_equal(c, center)
        assert np.abs(x - c).max() < 0.05 * np.abs(start - initial()).max()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bound": {"max_message_norm": 0.5},
    "median": {"max_message_norm": "median"},
    "skip": {"nonfinite": "skip", "max_message_norm": "median"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_in_rounds_of_all_sparse_messages_are_as_synchronously(name: str, tmp_path: Path) -> None:
    """To the bit without bounds; what is cut, is here after the wire. With ρ, workers keep the center that they saw."""

    def work(communicator: Communicator, **options: Any) -> list[np.ndarray]:
        x, rank, seen = np.linspace(-1, 1, SIZE, dtype=np.float32), communicator.rank, []
        options |= {"compression": Compression.topk(0.3), "process_set": communicator, **OPTIONS[name]}
        options["run_log"] = tmp_path / ("rounds" if "quorum" in options else "synchronous")
        optimizer = PeriodicOptimizer(SGD(0.1, 0.5), {"x": x}, EASGD(ALPHA, rho=0.1), PERIOD, **options)
        optimizer.synchronizer.begin()
        if "quorum" in options:
            optimizer.synchronizer.exchanger.replay([range(3)] * 6)  # type: ignore[attr-defined]
            communicator.allgather_object(None, "replayed")
        for number in range(5 * PERIOD + 1):
            if (number, rank) == (2 * PERIOD - 1, 1) and name == "skip":
                x[3] = np.nan
            optimizer.step([gradient(x, rank).astype(np.float32)])
            seen.append(x.copy())
        optimizer.finalize()
        return [*seen, x]

    compare: Any = np.testing.assert_array_equal if name == "plain" else np.testing.assert_allclose
    close: dict[str, Any] = {} if name == "plain" else {"rtol": 1e-5, "atol": 1e-6}
    for here, there in zip(run_ranks(3, lambda c: work(c, quorum=2)), run_ranks(3, work), strict=True):
        for one, other in zip(here, there, strict=True):
            compare(one, other, **close)
    rounds, synchronous = (
        [
            [(line.get("message_norm"), line.get("left_out")) for line in lines if line["event"] == "exchanged"]
            for lines in read_run_log(tmp_path / log).values()
        ]
        for log in ("rounds", "synchronous")
    )
    for here, there in zip(rounds, synchronous, strict=True):
        assert [left_out for _, left_out in here] == [left_out for _, left_out in there]
        for (one, _), (other, _) in zip(here, there, strict=True):
            assert one == (other if other is None else pytest.approx(other, rel=1e-4))


def waiting_for_a_close(transport: Any) -> list[int]:
    """Return the workers that wait."""
    if isinstance(transport, RoundsInMemory):
        rounds = transport._agreed().rounds
        return [worker for worker, _ in rounds["_came"]] if rounds else []
    return list(transport.rounds.waiting)


@pytest.mark.parametrize("way", ["window", "service"])
def test_who_comes_before_a_round_that_closes_without_it_forms_its_messages_once_more(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third comes to the second round, and is in the fourth: with what it had, against the center of then."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", way)
    sets, came = [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]], threading.Event()

    def work(communicator: Communicator) -> Any:
        worker = Worker(communicator, sets, compression=Compression.int8)
        transport = worker.exchanger.worker.transport
        see, seen = transport._see, []

        def watched() -> Any:
            seen.append(None)
            return see()

        transport._see = watched
        worker.train()
        if worker.rank == 2:
            worker.train()
        else:
            waiting = threading.Event()
            while worker.rank == 0 and 2 not in waiting_for_a_close(transport):
                assert not waiting.wait(0.01)
            if worker.rank == 0:
                came.set()
            assert came.wait(TIMEOUT_SECONDS)
            for _ in range(3):
                worker.train()
        communicator.allgather_object(None, "closed")
        return worker.x, worker.center(), len(seen)

    expected, center = oracle(Compression.int8, sets)
    for rank, (x, c, asked) in enumerate(run_ranks(3, work)):
        np.testing.assert_allclose(x, expected[rank], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(c, center, rtol=1e-10, atol=1e-12)
        assert asked == (3 if rank == 2 else 4)
