"""Elastic states of Keras whose ranks are threads: what goes with a rank that is lost, wherever it is; and groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic.comm.base import Communicator  # noqa: E402
from hvd_periodic.comm.subset import Subset  # noqa: E402
from hvd_periodic.tensorflow import elastic  # noqa: E402
from hvd_periodic.tensorflow.model import native  # noqa: E402
from tests import losing  # noqa: E402
from tests.conformance.test_front_ends import Delegate  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.losing import EVERYWHERE  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

pytestmark = pytest.mark.timeout(120)

PERIOD = 2

HERE = threading.local()
"""The communicator of each thread, as Horovod knows one of each process."""

CONSTRUCTING = threading.Lock()
"""Keras counts names per process."""


class Elastic(Delegate):
    """Ranks that may change."""

    elastic = True
    process_set = hvd.global_process_set


@dataclass
class Worker:
    """What one process has, which outlives the communicators that it is in."""

    model: Any
    optimizer: Any
    moving: Any
    state: Any

    def train(self, steps: int) -> None:
        """Descend, each rank to another place."""
        for _ in range(steps):
            (x,) = self.model.trainable_variables
            self.optimizer.apply([x - float(HERE.communicator.rank + 1)])
            self.state.batch += 1

    def decay(self) -> None:
        """Halve the learning rate of the center's optimizer."""
        self.moving.learning_rate.assign(self.moving.learning_rate / 2)

    @property
    def rate(self) -> float:
        """The learning rate of the center's optimizer."""
        return float(self.moving.learning_rate)

    def saved(self) -> Any:
        """Return what a file holds; all ranks together."""
        variables = [*self.optimizer.inner.variables, self.moving.learning_rate]
        return (
            self.model.get_weights(),
            [np.array(variable) for variable in variables],
            self.optimizer.synchronizer.state_dict(),
        )

    def load(self, saved: Any, momentum: bool = True) -> None:
        """Load it; ``momentum``: that of the local optimizer as well."""
        weights, values, exchanges = saved
        self.model.set_weights(weights)
        variables = [*self.optimizer.inner.variables, self.moving.learning_rate]
        for variable, value in zip(variables, values, strict=True):
            if momentum or not variable.shape:
                variable.assign(value)
        self.optimizer.synchronizer.load_state_dict(exchanges)

    def center(self) -> list[float]:
        """Return the center; all ranks together."""
        with self.optimizer.center():
            return self.x

    @property
    def x(self) -> list[float]:
        """The replica."""
        found: list[float] = self.model.get_weights()[0].ravel().tolist()
        return found

    def found(self) -> tuple[Any, ...]:
        """Return how far it has come, and where it and the center are."""
        return self.state.batch, self.optimizer.synchronizer.local_steps, self.x, self.center()

    def begin_again(self) -> None:
        """Do what ``hvd.elastic.run`` does after a loss."""
        self.state.restore()
        self.state.on_reset()
        self.state.sync()


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_periodic.tensorflow.elastic.communicator_of", lambda _: HERE.communicator)
    monkeypatch.setattr("hvd_periodic.tensorflow.graph.communicator_of", lambda _: HERE.communicator)
    monkeypatch.setattr(hvdp.elastic.State, "check_host_updates", lambda _: None)


def pair() -> range:
    """Return the ranks of the group of this one: two neighbours."""
    first = HERE.communicator.rank // 2 * 2
    return range(first, min(first + 2, HERE.communicator.size))


def new(
    algorithm: Any = hvdp.DiLoCo, moving: bool = False, batch: int = 0, inside: Any = None, **options: Any
) -> Worker:
    """Return a worker; ``moving`` its center by another optimizer than a copy of the local one.

    Pairs of ranks exchange by an algorithm ``inside`` at every step.
    """
    ranks: Communicator = HERE.communicator
    with CONSTRUCTING:
        dense = keras.layers.Dense(5, use_bias=False, kernel_initializer="zeros", dtype="float64")
        model = keras.Sequential([keras.Input((1,)), dense])
        local = keras.optimizers.SGD(0.125, momentum=0.5)
        outer = keras.optimizers.SGD(0.5, momentum=0.9) if moving else None
        inner: Any = local
        if inside is not None:
            inner = hvdp.PeriodicOptimizer(local, model, inside, 1, process_set=Subset(ranks, pair))
        optimizer = hvdp.PeriodicOptimizer(
            inner, model, algorithm, PERIOD, outer_optimizer=outer, process_set=ranks, **options
        )
        return Worker(model, optimizer, outer or local, hvdp.elastic.State(model, optimizer, batch=batch))


def together(workers: Sequence[Worker | Callable[[], Worker]], work: Callable[[Worker], Any], **lost: Any) -> list[Any]:
    """Return what as many ranks find, or that a rank was lost, as :func:`tests.losing.together`.

    Args:
        workers: in the order of ranks; functions make new ones.
        work: what they do together.
        lost: when a rank is.
    """

    def rank(communicator: Communicator) -> Any:
        HERE.communicator = Elastic(communicator)
        worker = workers[communicator.rank]
        return work(worker if isinstance(worker, Worker) else worker())

    return losing.together(len(workers), rank, **lost)


def lost_anywhere(
    prepare: Callable[[], Sequence[Worker]],
    work: Callable[[Worker], Any],
    ahead: int,
    places: tuple[int, int],
) -> list[Sequence[Worker]]:
    """Return what is left of workers, one of which is lost in any collective, as :func:`tests.losing.lost_anywhere`."""
    return losing.lost_anywhere(prepare, lambda workers, **lost: together(workers, work, **lost), ahead, places)


@pytest.mark.parametrize(
    ("center", "ahead", "places"),
    [
        *(("sharded", 0, (0, 6)), thorough("sharded", 0, EVERYWHERE)),
        *(thorough("replicated", 0, (0, 2)), thorough("root", 1, (1, 2))),
    ],
)
def test_a_rank_is_lost_in_sync(center: str, ahead: int, places: tuple[int, int]) -> None:
    """After another one was lost: those that are left go on from what was committed before."""
    committed = {}

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.found()
        worker.train(1)
        return worker

    def prepare() -> list[Worker]:
        zero, one, two, _ = together([lambda: new(center=center)] * 4, first)
        return [zero, one, two]  # Rank 0 has the copy of the share of rank 2.

    def again(worker: Worker) -> Any:
        worker.begin_again()
        return worker.found()

    left = lost_anywhere(prepare, Worker.begin_again, ahead, places)
    assert len(left) > 10 // places[1]
    for zero, one in left:
        found = together([zero, lambda: new(center=center), one], again)
        at_center = committed[0][-1]
        assert found == [committed[0], (3, 3, at_center, at_center), committed[1]]


@pytest.mark.parametrize(
    ("center", "everywhere", "ahead", "places"),
    [
        thorough("replicated", False, 0, (0, 3)),
        ("sharded", True, 1, (1, 3)),
        thorough("replicated", True, 0, EVERYWHERE),
        thorough("replicated", True, 2, (0, 2)),
        thorough("sharded", False, 0, EVERYWHERE),
        thorough("sharded", False, 2, (1, 2)),
    ],
)
def test_a_rank_is_lost_in_the_first_sync(center: str, everywhere: bool, ahead: int, places: tuple[int, int]) -> None:
    """What was loaded before it is loaded still, on the root alone or on every rank.

    Also where only one rank has heard that all were there, one that is left or the one that is lost.
    """
    saved: dict[int, Any] = {}

    def first(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(3)
        saved[HERE.communicator.rank] = worker.saved()
        return worker.found()

    expected = together([lambda: new(center=center)] * 3, first)

    def prepared(rank: int) -> Worker:
        worker = new(center=center, batch=3)
        if everywhere or rank == 0:
            worker.load(saved[rank])
        return worker

    def prepare() -> list[Worker]:
        return together([lambda: prepared(HERE.communicator.rank)] * 3, lambda worker: worker)

    def again(worker: Worker) -> Any:
        worker.begin_again()
        found = worker.found()
        worker.train(2 * PERIOD)
        worker.optimizer.finalize()
        return found, worker.center()

    left = lost_anywhere(prepare, lambda worker: worker.state.sync(), ahead, places)
    assert len(left) > 5 // places[1]
    for workers in left:
        (zero, end), (one, other_end) = together(workers, again)
        assert ([zero, one], end) == ([expected[0], expected[everywhere]], other_end)


def test_the_state_of_local_parameters_stays_beside_a_synchronizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local optimizer is then kept by itself."""
    head, body = (keras.Variable(np.zeros(size), name=name) for size, name in ((3, "head"), (2, "body")))
    local = keras.optimizers.SGD(0.125, momentum=0.5)
    local.build([head, body])
    (kept,) = elastic._kept(local, lambda: {id(native(head))})
    monkeypatch.setattr(elastic, "_of_rank", lambda values, _: [value + value.dtype.type(7) for value in values])
    kept.broadcast_from(1)
    assert [variable.numpy().tolist() for variable in local.variables[2:]] == [[0] * 3, [7] * 2]


@pytest.mark.parametrize("center", ["sharded", thorough("replicated"), thorough("root")])
def test_local_parameters_stay_with_their_worker(center: str) -> None:
    """Of any shape, with their momentum: commits hold them, and a worker that joins has those it was made with."""

    def head_of(value: float) -> Callable[[], Worker]:
        def make() -> Worker:
            with CONSTRUCTING:
                head = keras.layers.Dense(HERE.communicator.rank + 1, dtype="float64", name="head", use_bias=False)
                body = keras.layers.Dense(5, dtype="float64", name="body", use_bias=False, kernel_initializer="zeros")
                x = keras.Input((1,))
                model = keras.Model(x, [head(x), body(x)], name="model")
                head.kernel.assign(np.full(head.kernel.shape, value))
                local = keras.optimizers.SGD(0.125, momentum=0.5)
                optimizer = hvdp.PeriodicOptimizer(
                    *(local, model, hvdp.DiLoCo, PERIOD),
                    process_set=HERE.communicator,
                    center=center,
                    parameters={"*head*": "local"},
                )
                return Worker(model, optimizer, local, hvdp.elastic.State(model, optimizer, batch=0))

        return make

    def train(worker: Worker, steps: int) -> None:
        head, body = worker.model.trainable_variables
        for _ in range(steps):
            worker.optimizer.apply([tf.ones(head.shape, "float64"), body - float(HERE.communicator.rank + 1)])
            worker.state.batch += 1

    def found(worker: Worker) -> Any:
        with worker.optimizer.center():
            center = worker.model.get_weights()[1].ravel().tolist()
        momentum = worker.optimizer.inner.variables[2].numpy().ravel().tolist()
        head, x = (weights.ravel().tolist() for weights in worker.model.get_weights())
        return worker.state.batch, head, momentum, x, center

    def first(worker: Worker) -> Any:
        worker.state.sync()
        train(worker, 3)
        worker.state.commit()
        committed = found(worker)
        train(worker, 1)
        return worker, committed

    def again(worker: Worker) -> Any:
        worker.begin_again()
        at_once = found(worker)
        train(worker, 1)
        return at_once, worker.model.get_weights()

    (zero, committed), _, (two, of_last) = together([head_of(1.0), head_of(2.0), head_of(3.0)], first)
    moved = 0.125 * (1 + 1.5 + 1.75)
    assert (committed[1:3], of_last[1:3]) == (([1 - moved], [-0.21875]), ([3 - moved] * 3, [-0.21875] * 3))
    joined, at_center = head_of(4.0), committed[-1]
    results = together([zero, joined, two], again)
    assert [at_once for at_once, _ in results] == [
        committed,
        (3, [4.0] * 2, [0.0] * 2, at_center, at_center),
        of_last,
    ]
    assert [weights[0].ravel().tolist() for _, weights in results] == [
        [1 - moved - 0.234375],
        [3.875] * 2,
        [3 - moved - 0.234375] * 3,
    ]
    assert len({str(weights[1]) for _, weights in results}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [hvdp.EASGD, hvdp.DiLoCo])
def test_a_rank_is_lost_in_sync_by_groups(inside: Any) -> None:
    """Those that are left are in other groups, of which each has one center, and replicas are what was committed."""
    committed = {}

    def inner(worker: Worker) -> Any:
        return worker.optimizer.inner.synchronizer

    def center_of(worker: Worker) -> Any:
        return [c.numpy().ravel().tolist() for c in inner(worker).center_tensors()]

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(3)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.found(), center_of(worker)
        worker.train(1)
        return worker

    def prepare() -> list[Worker]:
        return together([lambda: new(inside=inside)] * 4, first)[:3]

    def again(worker: Worker) -> Any:
        worker.begin_again()
        found = worker.found(), center_of(worker)
        worker.train(2 * PERIOD)
        inner(worker).audit()
        worker.optimizer.finalize()
        return *found, worker.center()

    left = lost_anywhere(prepare, Worker.begin_again, 0, EVERYWHERE)
    assert len(left) > 20
    for workers in left:
        found = together([*workers, *[lambda: new(inside=inside)] * 2], again)
        at_center = committed[0][0][-1]
        joined = (3, 3, at_center, at_center)
        assert [each for each, *_ in found] == [committed[0][0], committed[1][0], joined, joined]
        assert [each for _, each, _ in found] == [committed[0][1]] * 2 + [[at_center]] * 2
        assert len({str(end) for *_, end in found}) == 1


@pytest.mark.parametrize(("everywhere", "inside"), covering([False, True], [hvdp.EASGD, None], together=1))
def test_groups_that_are_loaded_before_the_first_sync(everywhere: bool, inside: Any) -> None:
    """On the root alone, all go on from what that has; on every rank, each from its own."""
    saved: dict[int, Any] = {}

    def first(worker: Worker) -> Any:
        worker.state.sync()
        worker.train(3)
        saved[HERE.communicator.rank] = worker.saved()
        return worker.found()

    def resumed() -> Worker:
        worker = new(inside=inside, batch=3)
        if everywhere or HERE.communicator.rank == 0:
            worker.load(saved[HERE.communicator.rank])
        return worker

    def again(worker: Worker) -> Any:
        worker.state.sync()
        found = worker.found()
        worker.train(PERIOD)
        return found

    expected = together([lambda: new(inside=inside)] * 4, first)
    assert together([resumed] * 4, again) == [expected[rank if everywhere else 0] for rank in range(4)]


@pytest.mark.parametrize(
    ("center", "inside", "moving"),
    covering(("replicated", "root", "sharded"), (None, hvdp.EASGD), (False, True), together=1),
)
def test_a_rate_that_has_decayed_is_loaded_on_the_root(center: str, inside: Any, moving: bool) -> None:
    """With the checkpoint that it is in, before ``sync()``: of the local optimizer or of the center's."""
    saved = {}

    def first(worker: Worker) -> None:
        worker.state.sync()
        worker.train(PERIOD)
        worker.decay()
        saved[HERE.communicator.rank] = worker.saved()

    def resumed(everywhere: bool) -> Callable[[Worker], Any]:
        def work(worker: Worker) -> Any:
            rank = HERE.communicator.rank
            if everywhere or rank == 0:
                worker.load(saved[0], momentum=rank == 0)  # That of the local optimizer stays on the root.
            worker.state.sync()
            worker.train(PERIOD)
            return worker.rate, worker.found()

        return work

    def make() -> Worker:
        return new(hvdp.AGN, moving, center=center, batch=PERIOD, inside=inside)

    together([make] * 2, first)
    found = together([make] * 2, resumed(everywhere=False))
    assert found == together([make] * 2, resumed(everywhere=True))
    assert [rate for rate, _ in found] == [0.25 if moving else 0.0625] * 2


@pytest.mark.parametrize("inside", [None, hvdp.EASGD])
@pytest.mark.parametrize("moving", [False, True])
def test_a_rank_joins_after_the_rate_of_the_center_has_decayed(moving: bool, inside: Any) -> None:
    def first(worker: Worker) -> Worker:
        worker.state.sync()
        worker.train(PERIOD)
        worker.decay()
        worker.state.commit()
        worker.decay()
        return worker

    def again(worker: Worker) -> Any:
        worker.begin_again()
        worker.train(PERIOD)
        return worker.rate, worker.center()

    def make() -> Worker:
        return new(hvdp.AGN, moving, inside=inside)

    one, joined = together([together([make], first)[0], make], again)
    assert one == joined
    assert one[0] == (0.25 if moving else 0.0625)


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_presence_is_committed(center: str) -> None:
    """Of the ranks that are left, one had a gradient in the period that was committed: all take its replica."""
    committed = {}

    def step(worker: Worker, ranks: Sequence[int]) -> None:
        if HERE.communicator.rank in ranks:
            worker.train(1)
        else:
            worker.optimizer.synchronizer.step(updated=False)

    def first(worker: Worker) -> Worker:
        worker.state.sync()
        for ranks in ([0, 1, 2, 3], [], [1, 2]):
            step(worker, ranks)
        worker.state.commit()
        committed[HERE.communicator.rank] = worker.x
        step(worker, [0, 3])
        return worker

    def again(worker: Worker) -> list[float]:
        worker.begin_again()
        step(worker, [])
        return worker.x

    def make() -> Worker:
        return new(hvdp.Averaging, center=center, parameters={"*": "present"})

    zero, one, _, _ = together([make] * 4, first)  # They have the copies of the shares of ranks 2 and 3.
    assert together([zero, make, one], again) == [pytest.approx(committed[1])] * 3


def test_another_set_of_variables_is_refused_and_changes_nothing() -> None:
    """A rank that joins then has the set of the others."""

    def job(worker: Worker, tries: bool) -> tuple[Worker, Any]:
        worker.state.sync()
        worker.train(3)
        if tries:
            with pytest.raises(RuntimeError, match=r"in elastic jobs of PyTorch only: .* start another job"):
                worker.optimizer.adopt([*worker.model.trainable_variables, keras.Variable([1.0])])
        worker.train(2)
        worker.state.commit()
        return worker, worker.found()

    def again(worker: Worker) -> Any:
        worker.begin_again()
        worker.train(2 * PERIOD)
        return worker.found()

    plain, tried = (together([new] * 3, partial(job, tries=tries)) for tries in (False, True))
    assert [found for _, found in tried] == [found for _, found in plain]
    ends = [
        together([job[0][0], job[1][0], new], again)  # Rank 2 is lost, and another one joins.
        for job in (plain, tried)
    ]
    assert ends[0] == ends[1]
