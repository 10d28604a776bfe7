"""Limits and invariants: what must hold whatever the data are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hvd_periodic import EASGD, Communicator, Every
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from hvd_periodic.numpy.outer import ArrayOuterOptimizer
from hvd_periodic.vectors.layout import Layout, TensorSpec
from hvd_periodic.vectors.store import FlatStore
from tests.covering import covering
from tests.helpers import Array, NumpyTrainer, read_center, run_ranks


def pull(x: Array, rank: int) -> Array:
    """Return the gradient of a quadratic loss of the rank's own."""
    return (1.0 + 0.5 * rank) * (x - np.array([3.0, -1.0]) * (rank + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_averaging_after_every_step_is_synchronous_sgd(n: int) -> None:
    def work(communicator: Communicator) -> list[Array]:
        x = np.array([4.0, 2.0])
        optimizer = ModelAverageOptimizer(SGD(0.1), {"x": x}, interval_steps=1, process_set=communicator)
        trajectory = []
        for _ in range(6):
            optimizer.step([pull(x, communicator.rank)])
            trajectory.append(x.copy())
        return trajectory

    x = np.array([4.0, 2.0])
    expected = []
    for _ in range(6):
        x = x - 0.1 * np.mean([pull(x, rank) for rank in range(n)], axis=0)
        expected.append(x)
    for trajectory in run_ranks(n, work):
        np.testing.assert_allclose(trajectory, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("period", [1, 3])
def test_averaging_of_one_worker_is_plain_training(period: int) -> None:
    x, alone = np.array([4.0, 2.0]), np.array([4.0, 2.0])
    optimizer, plain = ModelAverageOptimizer(SGD(0.1, 0.9), {"x": x}, period), SGD(0.1, 0.9)
    for step in range(1, 10):
        optimizer.step([pull(x, 0)])
        plain.step([alone], [pull(alone, 0)])
        np.testing.assert_allclose(x, alone, rtol=1e-14, atol=1e-14)
        if step % period == 0:
            np.testing.assert_array_equal(read_center(optimizer, [x])[0], x)


@pytest.mark.parametrize("op", ["sum", "average"])
def test_agn_of_one_worker_after_every_step_is_plain_training(op: str) -> None:
    """τ = 1: the center optimizer sees exactly the gradients that the local one sees."""
    x, alone = np.array([4.0, 2.0]), np.array([4.0, 2.0])
    optimizer, plain = AGNOptimizer(SGD(0.1, 0.9), {"x": x}, 1, op=op), SGD(0.1, 0.9)
    for _ in range(8):
        optimizer.step([pull(x, 0)])
        plain.step([alone], [pull(alone, 0)])
        np.testing.assert_allclose(x, alone, rtol=1e-13, atol=1e-13)


def test_elastic_averaging_of_one_worker_at_rate_one_half_meets_in_the_middle() -> None:
    x = np.array([0.0])
    optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 1, moving_rate=0.5)
    optimizer.step([np.array([-8.0])])
    assert x == [4.0]
    assert read_center(optimizer, [x])[0] == [4.0]


def without_gradients(n: int, rate: float, rounds: int) -> tuple[list[list[Array]], list[list[Array]]]:
    """Return replicas, by round and rank, and centers, by round, of elastic averaging from scattered replicas."""

    def work(communicator: Communicator) -> tuple[list[Array], list[Array]]:
        x = np.array([1.0, -2.0, 0.5])
        trainer = NumpyTrainer(communicator, [x], EASGD(rate), Every(1), bucket_bytes=16)
        x += np.random.default_rng(communicator.rank).standard_normal(3)
        replicas, centers = [x.copy()], trainer.center()
        for _ in range(rounds):
            trainer.synchronizer.sync()
            replicas.append(x.copy())
            centers += trainer.center()
        return replicas, centers

    results = run_ranks(n, work)
    return [list(xs) for xs in zip(*(x for x, _ in results), strict=True)], [c for _, c in results]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_elastic_averaging_conserves_the_sum_of_replicas_and_center(n: int) -> None:
    replicas, centers = without_gradients(n, 0.7 / (n + 1), rounds=5)
    before = sum(replicas[0]) + centers[0][0]
    for xs, c in zip(replicas, centers[0], strict=True):
        np.testing.assert_allclose(sum(xs) + c, before, rtol=1e-13, atol=1e-13)
    assert not np.allclose(centers[0][-1], centers[0][0]), "nothing moved"


@pytest.mark.parametrize(("n", "growth"), covering((1, 2, 3, 5), (0.3, 0.9, 1.0), together=1))
def test_mean_displacement_contracts_by_one_minus_rate_times_n_plus_one(n: int, growth: float) -> None:
    replicas, centers = without_gradients(n, growth / (n + 1), rounds=4)
    displacements = [np.mean(xs, axis=0) - c for xs, c in zip(replicas, centers[0], strict=True)]
    for old, new in pairwise(displacements):
        np.testing.assert_allclose(new, (1 - growth) * old, rtol=1e-10, atol=1e-13)


def test_displacements_between_replicas_contract_by_one_minus_rate() -> None:
    """The center cancels: x_i − x_j is multiplied by 1 − α, whatever order the ranks are in."""
    replicas, _ = without_gradients(3, 0.2, rounds=3)
    for old, new in pairwise(replicas):
        np.testing.assert_allclose(new[2] - new[0], 0.8 * (old[2] - old[0]), rtol=1e-12)
        np.testing.assert_allclose(new[1] - new[0], 0.8 * (old[1] - old[0]), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_agn_of_plain_sgd_is_the_displacement_form_of_the_paper(n: int) -> None:
    """c ← c + Σ_i (x_i − c)/τ, with no optimizer on the center."""
    period = 3

    def work(communicator: Communicator) -> tuple[list[Array], list[Array]]:
        x = np.array([4.0, 2.0])
        optimizer = AGNOptimizer(SGD(0.1), {"x": x}, period, process_set=communicator)
        explored, centers = [], []
        for step in range(1, 4 * period + 1):
            g = pull(x, communicator.rank)
            if step % period == 0:
                explored.append(x - 0.1 * g)
            optimizer.step([g])
            if step % period == 0:
                centers.append(x.copy())
        return explored, centers

    results = run_ranks(n, work)
    c = np.array([4.0, 2.0])
    for k in range(4):
        c = c + sum((explored[k] - c) / period for explored, _ in results)
        for _, centers in results:
            np.testing.assert_allclose(centers[k], c, rtol=1e-12, atol=1e-12)


class Adam:
    """Adam with bias correction; its powers of β are the state that must not be shared."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.steps = 0
        self.m: list[Array] = []
        self.v: list[Array] = []

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        if not self.steps:
            self.m, self.v = [np.zeros_like(x) for x in parameters], [np.zeros_like(x) for x in parameters]
        self.steps += 1
        for x, g, m, v in zip(parameters, gradients, self.m, self.v, strict=True):
            assert g is not None
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            x -= self.learning_rate * (m / (1 - 0.9**self.steps)) / (np.sqrt(v / (1 - 0.999**self.steps)) + 1e-12)


def test_the_first_center_step_of_adam_has_the_size_of_the_learning_rate() -> None:
    """With β-powers shared between local and center optimizer, as in contrib, it would be 0.0638."""
    x = np.zeros(1)
    local = Adam(0.1)
    optimizer = AGNOptimizer(local, {"x": x}, communication_period=4)
    for _ in range(4):
        optimizer.step([np.array([-1.0])])
    assert x[0] == pytest.approx(0.1, rel=1e-9)
    assert local.steps == 4


@pytest.mark.parametrize(
    "options", [{"center": "root"}, {"fragments": 2}, {"fragments": 2, "overlap": 1}, {"overlap": 1}], ids=str
)
def test_the_steps_of_adam_are_counted_alike_wherever_the_center_is(options: dict[str, Any]) -> None:
    """As they are without an optimizer of its own for the center: its counter is no setting that ranks agree on."""

    def work(communicator: Communicator, **options: Any) -> list[Array]:
        xs, seen = {"x": np.zeros(2), "y": np.zeros(3)}, []
        optimizer = AGNOptimizer(Adam(0.1), xs, communication_period=2, process_set=communicator, **options)
        for _ in range(8):
            optimizer.step([x - communicator.rank - 1.0 for x in xs.values()])
        with optimizer.center():
            seen += [x.copy() for x in xs.values()]
        counters = optimizer.synchronizer.state_dict()["center_optimizer"]
        assert {part["steps"] for part in counters.get("fragments", [counters])} == {4}
        return seen

    for found in run_ranks(2, lambda communicator: work(communicator, **options)):
        assert all(np.isfinite(x).all() and (x > 0).all() for x in found)


def test_workers_that_step_in_turn_share_the_steps_of_adam() -> None:
    """Two of them move one center as one would that took all steps."""
    layout = Layout([TensorSpec("x", (3,), "float64", 8)])

    def bound() -> tuple[ArrayOuterOptimizer, FlatStore[Array], FlatStore[Array], list[Array]]:
        outer = ArrayOuterOptimizer(Adam(0.1))
        shapes = outer.shapes(layout)
        center, gradient = (FlatStore(layout, lambda kind, size: np.zeros(size, kind)) for _ in range(2))
        outer.bind_host(center, gradient, layout)
        return outer, center, gradient, [np.zeros(shape, dtype) for shape, dtype in shapes]

    alone, workers = bound(), [bound(), bound()]
    for turn, mine in enumerate([0, 1, 1, 0]):
        outer, center, gradient, _ = workers[mine]
        arrays, moved = workers[0][-1], workers[0][1]
        for each in (gradient, alone[2]):
            each.tensors()[0][:] = np.array([1.0, -2.0, 3.0]) * (turn + 1)
        center.tensors()[0][:] = moved.tensors()[0] if mine else center.tensors()[0]
        if turn:
            outer.pull(arrays)
        outer.step()
        outer.push(arrays)
        moved.tensors()[0][:] = center.tensors()[0]
        alone[0].step()
        np.testing.assert_array_equal(center.tensors()[0], alone[1].tensors()[0])


def test_center_momentum_is_not_local_momentum() -> None:
    """One worker, g = −1, η = 1, μ = .5, τ = 2; the center sees a = −1 once per round.

    Local velocities −1, −1.5 | −1.75, −1.875; center velocities −1 | −1.5.
    """
    x = np.zeros(1)
    optimizer = AGNOptimizer(SGD(1.0, momentum=0.5), {"x": x}, communication_period=2)
    trajectory = []
    for _ in range(4):
        optimizer.step([np.array([-1.0])])
        trajectory.append(float(x[0]))
    assert trajectory == [1.0, 1.0, 2.75, 2.5]


def test_the_local_optimizer_as_center_optimizer_still_has_two_states() -> None:
    """One worker, g = −1, η = 1, μ = .5, τ = 2: refused, or the steps of two optimizers; never a shared velocity."""
    x, shared = np.zeros(1), SGD(1.0, momentum=0.5)
    try:
        optimizer = AGNOptimizer(shared, {"x": x}, communication_period=2, outer_optimizer=shared)
    except ValueError:
        return
    for _ in range(4):
        optimizer.step([np.array([-1.0])])
    assert x == [2.5]


def test_asynchronously_the_center_has_no_momentum_of_local_steps() -> None:
    """Gradient −1, rate 1, momentum ½ on worker and center, an exchange after every step."""
    x = np.zeros(1)
    optimizer = AGNOptimizer(SGD(1.0, 0.5), {"x": x}, communication_period=1, asynchronous=True)
    seen = []
    for _ in range(3):
        optimizer.step([np.array([-1.0])])
        seen.append(x.item())
    assert seen == [1.0, 2.5, 4.25]
