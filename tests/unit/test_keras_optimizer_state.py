"""The state of Keras optimizers at an exchange; on several ranks in ``tests/parallel``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
pytest.importorskip("horovod.tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.optimizer_state import KerasOptimizerState  # noqa: E402
from tests.covering import covering  # noqa: E402

OPTIMIZERS: dict[str, tuple[Any, set[str]]] = {
    "SGD": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"momentum"}),
    "Adam": (lambda: keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True), {"momentum", "velocity", "velocity_hat"}),
    "Adagrad": (lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25), {"accumulator"}),
    "loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
        {"momentum"},
    ),
}


def network() -> Any:
    layers = [keras.Input((3,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(1, name="a_b")]
    return keras.Sequential(layers)


def steps(model: Any, optimizer: Any, compiled: bool, count: int) -> None:
    def step() -> None:
        optimizer.apply([tf.ones_like(v.value) for v in model.trainable_variables], model.trainable_variables)

    run = tf.function(step) if compiled else step
    for _ in range(count):
        run()


def values(inner: Any, synchronizer: Any) -> dict[str, list[Any]]:
    state = KerasOptimizerState(inner, synchronizer.replica)
    return {entry: [v.numpy() for _, v in pairs] for entry, pairs in state.entries().items()}


@pytest.mark.parametrize(("kind", "compiled"), covering(OPTIMIZERS, [False, True], together=1))
def test_reset(kind: str, compiled: bool) -> None:
    make, entries = OPTIMIZERS[kind]
    model, inner = network(), make()
    optimizer = hvdp.ModelAverageOptimizer(inner, model, 2, process_set=LocalCommunicator(), optimizer_state="reset")
    steps(model, optimizer, compiled, 1)
    before = values(inner, optimizer.synchronizer)
    assert set(before) == entries
    assert all(len(kept) == 4 for kept in before.values()), "one per variable"
    steps(model, optimizer, compiled, 1)
    start = 0.25 if kind == "Adagrad" else 0.0
    for entry, kept in values(inner, optimizer.synchronizer).items():
        assert any((value != start).any() for value in before[entry]), entry
        assert all((value == start).all() for value in kept), entry


@pytest.mark.parametrize(
    ("policy", "compiled"), covering(["average", {"momentum": 1, "velocity": 2}], [False, True], together=1)
)
def test_the_mean_of_one_worker_is_its_own(policy: Any, compiled: bool) -> None:
    results = []
    for chosen in ("local", policy):
        keras.utils.set_random_seed(1)
        model, inner = network(), keras.optimizers.Adam(0.1)
        optimizer = hvdp.ModelAverageOptimizer(inner, model, 2, process_set=LocalCommunicator(), optimizer_state=chosen)
        steps(model, optimizer, compiled, 5)
        kept = values(inner, optimizer.synchronizer)
        sent = optimizer.synchronizer.counters.bytes_sent
        results.append(([v.numpy() for v in model.trainable_variables], kept, sent))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    for entry, kept in results[0][1].items():
        for one, other in zip(kept, results[1][1][entry], strict=True):
            np.testing.assert_array_equal(one, other)
    size = 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert results[1][2] - results[0][2] == size * (4 if policy == "average" else 3)


def test_it_is_saved_with_the_model(tmp_path: Any) -> None:
    model = network()
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.Adam(0.1),
        model,
        hvdp.DiLoCo(0.5),
        2,
        process_set=LocalCommunicator(),
        optimizer_state={"momentum": 3},
    )
    model.compile(optimizer, loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert loaded.get_config()["optimizer_state"] == {"momentum": 3}
    assert loaded.get_config()["algorithm"] == optimizer.get_config()["algorithm"]


def test_an_entry_that_the_optimizer_does_not_keep() -> None:
    model = network()
    optimizer = hvdp.ModelAverageOptimizer(
        keras.optimizers.SGD(0.1), model, 1, process_set=LocalCommunicator(), optimizer_state={"momentum": 1}
    )
    with pytest.raises(
        RuntimeError, match=r"names 'momentum', which is not in the state of the local optimizer. That has noth"
    ):
        steps(model, optimizer, False, 1)


def test_reset_of_a_copy_of_the_variables() -> None:
    """Schedule-free optimizers keep one: it becomes what the variables are."""
    model, inner = network(), keras.optimizers.ScheduleFreeAdamW(0.01)
    optimizer = hvdp.ModelAverageOptimizer(inner, model, 2, process_set=LocalCommunicator(), optimizer_state="reset")
    steps(model, optimizer, True, 2)
    weights = [v.numpy() for v in model.trainable_variables]
    kept = values(inner, optimizer.synchronizer)
    assert any(all(map(np.array_equal, of_entry, weights)) for of_entry in kept.values())


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_several_optimizers_in_one_are_refused(policy: str) -> None:
    model = network()
    local = keras.optimizers.SGD(0.1, momentum=0.9)
    inner = keras.optimizers.MultiOptimizer(lambda variable: local)
    with pytest.raises(
        (RuntimeError, TypeError), match=r"optimizer_state.*MultiOptimizer|MultiOptimizer.*optimizer_state"
    ):
        optimizer = hvdp.ModelAverageOptimizer(inner, model, 1, process_set=LocalCommunicator(), optimizer_state=policy)
        steps(model, optimizer, False, 1)
