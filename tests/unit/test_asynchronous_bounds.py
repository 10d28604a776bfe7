"""A bound on messages in asynchronous exchange: whole vectors, what is conserved, and what is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Algorithm, Communicator, read_run_log
from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer, NumpyReplica, PeriodicOptimizer
from tests import bounded_oracle as slow
from tests.covering import covering
from tests.delayed_oracle import followed
from tests.helpers import Array, errors, run_ranks

WAYS = {"window": ("window", "replicated"), "service": ("service", "root"), "sharded": ("service", "sharded")}
"""What the environment variable says, and where the center lives."""

ORDER = (0, 1, 2, 1, 0, 0, 2, 2, 1, 0, 2)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the parameters into buckets of two elements: a norm is over several buckets, in shards too."""
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", partial(NumpyReplica, bucket_bytes=16))


def wait_for_all(communicator: Communicator) -> None:
    communicator.allgather_object(None, "turn")


class Model:
    """The two parameters of the oracle in one memory, with their optimizer."""

    def __init__(self, communicator: Communicator, algorithm: Any, **options: Any) -> None:
        self.x, self.rank = np.array(slow.START), communicator.rank
        self.optimizer = PeriodicOptimizer(
            SGD(slow.RATE),
            {"a": self.x[: slow.OF_FIRST], "b": self.x[slow.OF_FIRST :]},
            algorithm,
            slow.PERIOD,
            process_set=communicator,
            asynchronous=True,
            **options,
        )
        self.optimizer.synchronizer.begin()

    def train(self, own_turn: int) -> None:
        for _ in range(slow.PERIOD):
            g = np.array(slow.gradient(self.rank, self.x.tolist()))
            self.optimizer.step([g[: slow.OF_FIRST], g[slow.OF_FIRST :]])

    def look(self) -> list[list[float]]:
        x = self.x.tolist()
        with self.optimizer.center():
            return [x, self.x.tolist()]


@pytest.mark.parametrize(("name", "way"), covering(slow.ALGORITHMS, WAYS))
def test_agreement_with_whole_vectors(name: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, WAYS[way][0])

    def work(communicator: Communicator) -> list[Any]:
        options = {"center": WAYS[way][1], "max_message_norm": slow.bound_of(name), "run_log": tmp_path}
        model = Model(communicator, slow.ALGORITHMS[name], **options)
        seen = followed(ORDER, communicator.rank, model.train, model.look, partial(wait_for_all, communicator))
        model.optimizer.finalize()
        return seen

    seen = run_ranks(3, work)
    lines = read_run_log(tmp_path)
    norms = [[line["message_norm"] for line in lines[rank] if line["event"] == "exchanged"] for rank in range(3)]
    slow.check(name, ORDER, seen, norms)


@dataclass(frozen=True)
class TakesTheCenter(Algorithm):
    """Forms messages from the center as it is, and takes the one that they have moved."""

    def asynchronous_variant(self, size: int) -> Algorithm:
        return self

    def message(self, space: Any, x: Any, worker: Any, center: Any, exchange: Any, out: Any = None) -> Any:
        return space.sub(x, center, out=out), {}

    def move(self, space: Any, center: Any, total: Any, exchange: Any) -> Any:
        return {"center": space.axpy(0.5, total, center["center"])}

    def pull(self, space: Any, x: Any, worker: Any, center: Any, exchange: Any) -> Any:
        return space.copy(center), {}


@pytest.mark.parametrize("name", [*slow.ALGORITHMS, "a user's"])
def test_a_bound_that_nothing_reaches_changes_nothing(name: str) -> None:
    """To the bit, where the displacement from what was read is the one from what is there."""

    def work(communicator: Communicator, **options: Any) -> list[Any]:
        model = Model(communicator, slow.ALGORITHMS.get(name) or TakesTheCenter(), **options)
        seen = followed(ORDER, communicator.rank, model.train, model.look, partial(wait_for_all, communicator))
        model.optimizer.finalize()
        return seen

    assert run_ranks(3, lambda c: work(c, max_message_norm=1e6)) == run_ranks(3, work)


@pytest.mark.parametrize("way", WAYS)
def test_pushes_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on their own clocks: Σ x_i + c is conserved, and every push moves x_i and c by at most α R_w."""
    monkeypatch.setenv(VARIABLE, WAYS[way][0])
    rate, bound, pushes = 0.25, 0.125, 30

    def work(communicator: Communicator) -> tuple[Array, Array, Array, float]:
        model = Model(communicator, EASGD(rate), center=WAYS[way][1], max_message_norm=bound)
        generator = random.Random(communicator.rank)
        moved, longest = np.zeros_like(model.x), 0.0
        for _ in range(pushes):
            step = np.array([generator.gauss(0, 1) for _ in model.x])
            model.x += step
            moved += step
            before = model.x.copy()
            model.optimizer.synchronizer.sync()
            longest = max(longest, float(np.linalg.norm(model.x - before)))
        model.optimizer.finalize()
        return model.x, moved, np.array(model.look()[1]), longest

    found = run_ranks(3, work)
    center = found[0][2]
    total = sum(x for x, _, _, _ in found) + center - sum(moved for _, moved, _, _ in found)
    np.testing.assert_allclose(total, 4 * np.array(slow.START), rtol=1e-12, atol=1e-12)
    assert all(longest <= rate * bound * (1 + 1e-12) for *_, longest in found)
    assert 0 < np.linalg.norm(center - slow.START) <= 3 * pushes * rate * bound


def test_training_that_goes_on_after_its_end_reads_the_center_as_it_is() -> None:
    """A worker that has finished trains on from the center as it is, not from the final one that it kept."""

    def work(communicator: Communicator) -> tuple[Array, Array]:
        model = Model(communicator, EASGD(0.25), max_message_norm=0.125)
        model.optimizer.finalize()
        if communicator.rank == 0:
            model.x += 1.0
            model.optimizer.synchronizer.sync()
        wait_for_all(communicator)
        if communicator.rank == 1:
            model.optimizer.synchronizer.sync()
        wait_for_all(communicator)
        model.optimizer.finalize()
        return model.x, np.array(model.look()[1])

    (x, c), (y, _) = run_ranks(2, work)
    np.testing.assert_allclose(x + y + c, 3 * np.array(slow.START) + 1.0, rtol=1e-12)
    assert not np.allclose(y, slow.START, atol=1e-3), "it is pulled to where the other one has pushed the center"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "median": (
        {"max_message_norm": "median"},
        "`max_message_norm` must be a number with asynchronous=True.*norms of others",
    ),
    "mean": ({"max_mean_norm": 1.0}, "`max_mean_norm` is for synchronous exchange"),
    "zero": ({"max_message_norm": 0.0}, "`max_message_norm` must be positive"),
    "present": ({"max_message_norm": 1.0, "parameters": {"x": "present"}}, "makes some of it 'present'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, asynchronous=True, **options)


def test_a_rate_with_which_workers_that_read_one_center_diverge() -> None:
    """Alone, each could come as far as the center; all at once, they overshoot it: as synchronously."""
    for kind, message in errors(2, lambda c: Model(c, EASGD(0.75), max_message_norm=1.0)):
        assert kind is ValueError
        assert "must be in (0, 2/(n+1)] = (0, 0.6667] for n=2 workers" in message
    assert len(run_ranks(2, lambda c: Model(c, EASGD(0.75)).x)) == 2


def test_ranks_that_disagree() -> None:
    for kind, message in errors(2, lambda c: Model(c, AGN(), max_message_norm=1.0 + c.rank)):
        assert kind is ValueError
        assert "max_message_norm" in message
