"""Shares of a center of Keras variables while ranks come and go: they go where a center on every rank goes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import Communicator, LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.replica import VariableReplica  # noqa: E402
from tests.conformance.test_front_ends import Delegate  # noqa: E402
from tests.helpers import errors, run_ranks  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

pytestmark = pytest.mark.timeout(120)

CONSTRUCTING = threading.Lock()
"""Keras counts names per process."""

NOW = threading.local()
"""The ranks of a thread, as Horovod would tell."""


class Elastic(Delegate):
    """Ranks that may change."""

    elastic = True
    process_set = hvd.global_process_set

    def changed(self) -> str | None:
        """Return that they have not."""
        return None


@pytest.fixture(autouse=True)
def _ranks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 elements: some parameters are in several buckets."""
    monkeypatch.setattr(VariableReplica, "__init__", partialmethod(VariableReplica.__init__, bucket_bytes=48))
    monkeypatch.setattr("hvd_periodic.tensorflow.elastic.communicator_of", lambda _: NOW.ranks)
    monkeypatch.setattr("hvd_periodic.tensorflow.graph.communicator_of", lambda _: NOW.ranks)
    monkeypatch.setattr(hvdp.elastic.State, "check_host_updates", lambda _: None)


def adam(rate: float = 0.1) -> Any:
    return keras.optimizers.Adam(rate)


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.5)


OPTIMIZERS: dict[str, Any] = {
    "easgd": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.EASGD(), 2, **o),
    "easgd_rho": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.EASGD(rho=0.3), 2, **o),
    "averaging": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.Averaging(), 2, **o),
    "bmuf": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.BMUF(), 2, **o),
    "slowmo": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.SlowMo(), 2, **o),
    "diloco": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.DiLoCo(), 2, **o),
    "diloco_adam": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.DiLoCo(), 2, outer_optimizer=adam(), **o),
    "diloco_adam_in_fragments": lambda **o: hvdp.PeriodicOptimizer(
        momentum(), None, hvdp.DiLoCo(), 2, outer_optimizer=adam(), fragments=2, **o
    ),
    "agn": lambda **o: hvdp.AGNOptimizer(momentum(), None, 2, **o),
    "agn_nadam": lambda **o: hvdp.AGNOptimizer(momentum(), None, 2, outer_optimizer=keras.optimizers.Nadam(0.1), **o),
    "agn_of_adam_in_fragments": lambda **o: hvdp.AGNOptimizer(adam(), None, 2, fragments=2, **o),
}

LOSSES: dict[str, list[tuple[int | None, ...]]] = {
    "one between others": [(None, None, None), (0, 2)],
    "the root": [(None, None, None), (1, 2)],
    "one joins, then the first goes, and the others change places": [(None, None), (0, 1, None), (2, 1)],
    "joins and replaces": [(None,), (0, None), (1, None), (0, None, 1)],
}
"""Who is there in each stretch: who has been which rank in the one before, or is new."""


CASES = [
    thorough("easgd", "the root", "root"),
    ("easgd_rho", "one between others", "sharded"),
    thorough("averaging", "joins and replaces", "root"),
    thorough("bmuf", "one joins, then the first goes, and the others change places", "sharded"),
    ("slowmo", "one joins, then the first goes, and the others change places", "root"),
    thorough("diloco", "joins and replaces", "sharded"),
    ("diloco_adam", "the root", "sharded"),
    ("agn", "joins and replaces", "root"),
    thorough("agn_nadam", "one joins, then the first goes, and the others change places", "sharded"),
    ("agn_of_adam_in_fragments", "one between others", "sharded"),
    thorough("diloco_adam_in_fragments", "the root", "root"),
]
"""Of algorithms that keep the same, and of fragments, every run has one."""


@dataclass
class Process:
    """A worker, which may live longer than its rank."""

    variables: list[Any]
    optimizer: Any
    state: Any
    seen: list[Any] = field(default_factory=list)

    @property
    def synchronizer(self) -> Any:
        """What exchanges."""
        return getattr(self.optimizer, "synchronizer", self.optimizer)


def constructed(ranks: Communicator, make: Any, **options: Any) -> Process:
    NOW.ranks = ranks
    with CONSTRUCTING:
        variables = [
            keras.Variable(np.arange(float(np.prod(shape))).reshape(shape), dtype="float64", name=f"w{i}")
            for i, shape in enumerate(((3, 2), (7,), ()))
        ]
        optimizer = make(variables, process_set=ranks, **options)
        if not isinstance(optimizer, hvdp.Synchronizer):
            optimizer.build(variables)
        named = dict(zip("abc", variables, strict=True))
        return Process(variables, optimizer, hvdp.elastic.State(None, None, commit="exchange", o=optimizer, **named))


def trained(process: Process, ranks: Communicator, steps: int) -> None:
    for _ in range(steps):
        step = process.synchronizer.local_steps
        gradients = [v * 0.5 + np.sin(step + ranks.rank) for v in process.variables]
        if process.optimizer is process.synchronizer:
            for variable, gradient in zip(
                process.variables, process.optimizer.prepare_gradients(gradients), strict=True
            ):
                variable.assign(variable - 0.1 * gradient)
            process.optimizer.step()
        else:
            process.optimizer.apply(gradients)


def joined(arrays: Communicator, before: Sequence[Process], was: int | None, make: Any, **options: Any) -> Process:
    """Return the process of a rank, which was another one or is new, once it has met the others."""
    ranks = Elastic(arrays)
    process = constructed(ranks, make, **options) if was is None else before[was]
    NOW.ranks = ranks
    if was is not None:
        process.state.on_reset()
    process.state.sync()
    return process


def values_of(process: Process) -> list[Any]:
    """Return copies of replica and center."""
    replica = [v.numpy() for v in process.variables]
    with process.synchronizer.center():
        return [*replica, *(v.numpy() for v in process.variables)]


def lived(make: Any, stretches: Sequence[Sequence[int | None]], **options: Any) -> list[list[Process]]:
    """Return by stretch and rank who has trained, each with what it has seen at the end."""
    lives: list[list[Process]] = [[]]
    for stretch in stretches:

        def live(arrays: Communicator, stretch: Any = stretch, before: Any = lives[-1]) -> Process:
            process = joined(arrays, before, stretch[arrays.rank], make, **options)
            trained(process, NOW.ranks, 3)  # The last step is lost with whoever goes.
            process.seen.append((values_of(process), process.synchronizer.counters))
            return process

        lives.append(run_ranks(len(stretch), live))
    return lives[1:]


def check_alike(here: Sequence[Sequence[Process]], there: Sequence[Sequence[Process]]) -> None:
    for processes, others in zip(here, there, strict=True):
        for process, other in zip(processes, others, strict=True):
            for (values, counters), (expected, counted) in zip(process.seen, other.seen, strict=True):
                for a, b in zip(values, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
                assert (counters.local_steps, counters.rounds) == (counted.local_steps, counted.rounds)


@pytest.mark.parametrize(("name", "losses", "center"), CASES)
def test_they_go_where_a_center_on_every_rank_goes(name: str, losses: str, center: str) -> None:
    def make(variables: Any, **options: Any) -> Any:
        return OPTIMIZERS[name](**options)

    check_alike(*(lived(make, LOSSES[losses], center=place) for place in (center, "replicated")))


SYNCHRONIZERS: dict[str, Any] = {
    "slowmo": lambda v, **o: hvdp.Synchronizer(v, hvdp.SlowMo(), 2, optimizer=momentum(), **o),
    "agn": lambda v, **o: hvdp.Synchronizer(v, hvdp.AGN(), 2, outer_optimizer=adam(), **o),
}


@pytest.mark.parametrize(
    ("name", "center"),
    [("slowmo", "root"), ("agn", "sharded"), thorough("slowmo", "sharded"), thorough("agn", "root")],
)
def test_synchronizers(name: str, center: str) -> None:
    make, stretches = SYNCHRONIZERS[name], [(None,), (0, None), (1, None, 0)]
    lives = lived(make, stretches, center=center)
    check_alike(lives, lived(make, stretches, center="replicated"))
    for process in lives[-1]:
        ranks = process.synchronizer.membership.communicator
        fresh = constructed(ranks, make, center=center).optimizer
        assert [v.shape for v in process.optimizer.variables] == [v.shape for v in fresh.variables], "in the same order"
        assert [v.dtype for v in process.optimizer.variables] == [v.dtype for v in fresh.variables]


def saved(optimizer: Any) -> dict[str, Any]:
    """Return what a file of the model would hold of the exchanges."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return store


@pytest.mark.parametrize(
    ("name", "center"),
    [("agn", "root"), ("diloco_adam", "sharded"), thorough("agn", "sharded"), thorough("diloco_adam", "root")],
)
def test_files_hold_what_a_rank_holds_now(name: str, center: str, tmp_path: Any) -> None:
    """By name and by order, as if there had never been other ranks."""

    def make(variables: Any, **options: Any) -> Any:
        return OPTIMIZERS[name](**options)

    for stretch in lived(make, [(None, None), (1, 0, None), (2, 1), (1,), (0, None)], center=center)[-2:]:
        for process in stretch:
            ranks, held = process.synchronizer.membership.communicator, process.synchronizer.center_tensors()
            by_name, by_order = (constructed(ranks, make, center=center) for _ in range(2))
            stored = saved(process.optimizer)
            assert stored.keys() == saved(by_name.optimizer).keys()
            by_name.optimizer.load_own_variables(stored)
            path = tf.train.Checkpoint(optimizer=process.optimizer).write(str(tmp_path / f"checkpoint.{ranks.rank}"))
            tf.train.Checkpoint(optimizer=by_order.optimizer).read(path).assert_consumed()
            for fresh in (by_name, by_order):
                assert fresh.synchronizer.local_steps == process.synchronizer.local_steps
                assert [v.shape for v in fresh.optimizer.variables] == [v.shape for v in process.optimizer.variables]
                for a, b in zip(held, fresh.synchronizer.center_tensors(), strict=True):
                    np.testing.assert_array_equal(a.numpy(), b.numpy(), strict=True)


def easgd(variables: Any, **options: Any) -> Any:
    return OPTIMIZERS["easgd"](**options)


def test_a_share_that_was_lost_with_its_copy() -> None:
    (processes,) = lived(easgd, [(None, None, None)], center="sharded")

    for kind, text in errors(
        2, lambda arrays: joined(arrays, processes, [2, None][arrays.rank], easgd, center="sharded")
    ):
        assert kind is RuntimeError
        assert "Shards of the center were lost together with their backups" in text
        assert "the shards of rank 0, with backups on rank 1" in text


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_before_training_begins_a_commit_holds_the_whole(center: str) -> None:
    """Rank 0 of two is lost before the first step, and what all had loaded is of another number of ranks still."""

    def construct(arrays: Communicator) -> Process:
        process = constructed(Elastic(arrays), SYNCHRONIZERS["agn"], center=center)
        if state is not None:
            process.synchronizer.load_state_dict(state)
            for variable, value in zip(process.variables, weights, strict=True):
                variable.assign(value)
        process.state.commit()
        assert not process.synchronizer.begun
        assert not next(iter(process.state.commits.held.values())).mirrors
        return process

    def state_of(arrays: Communicator) -> Any:
        process = joined(arrays, [], None, SYNCHRONIZERS["agn"], center=center)
        trained(process, NOW.ranks, 2)
        return process.synchronizer.state_dict(), values_of(process)

    state: Any = None
    weights: Any = None
    alone = run_ranks(2, construct)
    for process in run_ranks(1, lambda arrays: joined(arrays, alone, 1, SYNCHRONIZERS["agn"], center=center)):
        assert process.synchronizer.local_steps == 0
    state, values = run_ranks(2, state_of)[0]
    weights = values[:3]
    alone = run_ranks(2, construct)

    def survive(arrays: Communicator) -> Any:
        process = joined(arrays, alone, 1, SYNCHRONIZERS["agn"], center=center)
        return process.synchronizer.local_steps, values_of(process)[3:]

    ((steps, found),) = run_ranks(1, survive)
    assert steps == 2
    for a, b in zip(found, values[3:], strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_a_share_from_a_file_belongs_to_its_rank() -> None:
    (processes,) = lived(easgd, [(None, None, None)], center="sharded")
    stores = [saved(process.optimizer) for process in processes]

    def construct(arrays: Communicator, commits: bool = False) -> Process:
        process = constructed(Elastic(arrays), easgd, center="sharded")
        process.optimizer.load_own_variables(stores[arrays.rank])
        if commits:
            process.state.commit()
        return process

    def go_on(arrays: Communicator) -> list[Any]:
        process = joined(arrays, loaded, arrays.rank, easgd, center="sharded")
        assert process.synchronizer.local_steps == 3
        return values_of(process)[3:]

    loaded = run_ranks(3, construct)
    for a, b in zip(run_ranks(3, go_on)[0], processes[0].seen[-1][0][3:], strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    loaded = run_ranks(3, construct)
    for _, text in errors(2, go_on):
        assert "was saved by rank 0 of 3" in text or "was saved by rank 1 of 3" in text
    loaded = run_ranks(3, lambda arrays: construct(arrays, commits=True))
    for a, b in zip(run_ranks(2, go_on)[0], processes[0].seen[-1][0][3:], strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize(
    "options", [{"center": "replicated"}, {"center": "sharded"}, {"center": "root", "fragments": 2}]
)
def test_the_rate_of_a_given_optimizer_is_set_where_it_was_given(options: Any) -> None:
    """Also after the center had another one made in its place; and ranks that join take it over."""
    given: dict[int, Any] = {}

    def make(variables: Any, **arguments: Any) -> Any:
        given[id(variables)] = keras.optimizers.SGD(0.5)
        return hvdp.AGNOptimizer(momentum(), None, 2, outer_optimizer=given[id(variables)], **arguments)

    (processes,) = lived(make, [(None, None, None)], **options)

    def freeze(arrays: Communicator) -> tuple[Process, list[Any]]:
        process = joined(arrays, processes, arrays.rank, make, **options)
        given[id(process.variables)].learning_rate = 0.0
        trained(process, NOW.ranks, 3)
        return process, values_of(process)[3:]

    frozen = run_ranks(2, freeze)

    def go_on(arrays: Communicator) -> bool:
        process = joined(arrays, [process for process, _ in frozen], [1, None][arrays.rank], make, **options)
        trained(process, NOW.ranks, 4)
        return float(given[id(process.variables)].learning_rate) == 0.0 and all(
            map(np.array_equal, frozen[0][1], values_of(process)[3:])
        )

    assert run_ranks(2, go_on) == [True, True]


def test_a_checkpoint_of_variables_that_are_no_more(tmp_path: Any) -> None:
    (processes,) = lived(SYNCHRONIZERS["agn"], [(None, None)], center="sharded")
    process = processes[1]
    checkpoint = tf.train.Checkpoint(exchange=process.optimizer.variables)
    checkpoint.write(str(tmp_path / "before"))
    run_ranks(1, lambda arrays: joined(arrays, processes, 1, SYNCHRONIZERS["agn"], center="sharded"))
    with pytest.raises(ValueError, match="modified outside the wrapper"):
        checkpoint.write(str(tmp_path / "after"))
    tf.train.Checkpoint(exchange=process.optimizer.variables).write(str(tmp_path / "anew"))


class Counting(keras.optimizers.SGD):
    """Keeps a number for each variable."""

    def build(self, variables: Any) -> None:
        """Make them."""
        if not self.built:
            for _ in variables:
                self.add_variable(())
        super().build(variables)


def test_an_optimizer_that_could_not_be_cut_anew() -> None:
    def make(variables: Any, **options: Any) -> Any:
        return hvdp.AGNOptimizer(momentum(), None, 2, outer_optimizer=Counting(0.1), **options)

    constructed(Elastic(LocalCommunicator()), make, center="root")
    message = "Counting keeps state per tensor that differs from it in shape: use center='root'"
    with pytest.raises(ValueError, match=message):
        constructed(Elastic(LocalCommunicator()), make, center="sharded")


def test_a_constraint_needs_whole_tensors_on_more_ranks() -> None:
    def make(variables: Any, **options: Any) -> Any:
        variables[0].constraint = keras.constraints.NonNeg()
        return OPTIMIZERS["easgd"](**options)

    (processes,) = lived(make, [(None,)], center="sharded")

    def go_on(arrays: Communicator) -> None:
        joined(arrays, processes, [0, None][arrays.rank], make, center="sharded")

    for kind, text in errors(2, go_on):
        assert kind is ValueError
        assert "has a constraint, which needs the whole of it" in text


def test_the_state_of_a_given_optimizer_in_fragments_can_be_loaded() -> None:
    """The rate of the first was taken for a variable of the others."""
    make = OPTIMIZERS["diloco_adam_in_fragments"]
    (process,) = lived(lambda v, **o: make(**o), [(None,)])[0]
    fresh = constructed(Elastic(LocalCommunicator()), lambda v, **o: make(**o))
    fresh.synchronizer.load_state_dict(process.synchronizer.state_dict())
    assert fresh.synchronizer.local_steps == 3


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1)])
def test_a_center_of_another_number_of_fragments_is_refused(saved: int, now: int, tmp_path: Path) -> None:
    """Before it is cut into shares."""

    def made(fragments: int, center: str) -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        ranks = Delegate(LocalCommunicator())
        return model, hvdp.AGNOptimizer(adam(), model, 2, process_set=ranks, fragments=fragments, center=center)

    model, optimizer = made(saved, "root")
    for _ in range(2):
        optimizer.apply([tf.ones_like(variable.value) for variable in model.trainable_variables])
    hvdp.save(tmp_path / "saved", model, optimizer)
    with pytest.raises(ValueError, match=f"saved with fragments={saved}, and this optimizer has fragments={now}"):
        hvdp.load(tmp_path / "saved", *made(now, "sharded"))
