"""The end of ``fit`` beside callbacks of Keras that change the model, in every order. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow import fit_end  # noqa: E402
from tests.covering import covering  # noqa: E402

pytestmark = pytest.mark.timeout(120)

IMAGES = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
TARGETS = IMAGES.sum(axis=1, keepdims=True)

Swap, Stop = keras.callbacks.SwapEMAWeights, keras.callbacks.EarlyStopping
Final = hvdp.callbacks.FinalizeAtEnd


class Observe(keras.callbacks.Callback):
    """Replica and moving averages after every batch, the center after every epoch; lets the first epoch be the best."""

    replica: Any = None
    averages: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.centers: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.replica = weights(self.model)
        if self.model.optimizer.use_ema:
            self.averages = [v.numpy() for v in self.model.optimizer.plain_optimizer._model_variables_moving_average]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["worse"] = float(epoch)
        self.centers.append(center(self.model))


def make_model(algorithm: str = "average", eager: bool = False, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    local, alone = keras.optimizers.SGD(0.05, **options), LocalCommunicator()
    if algorithm == "average":
        optimizer = hvdp.ModelAverageOptimizer(local, model, 3, process_set=alone)
    else:
        optimizer = hvdp.ElasticAverageOptimizer(local, model, 3, moving_rate=0.3, process_set=alone)
    model.compile(optimizer, loss="mse", run_eagerly=eager, jit_compile=False)
    return model


def fit(model: Any, *callbacks: Any, batches: int, epochs: int = 1) -> None:
    images, targets = IMAGES[: 4 * batches], TARGETS[: 4 * batches]
    model.fit(images, targets, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def weights(model: Any) -> Any:
    return [variable.numpy() for variable in model.trainable_variables]


def center(model: Any) -> Any:
    with model.optimizer.center():
        return weights(model)


def same(found: Any, expected: Any) -> bool:
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("order", "batches", "eager"),
    covering(["final swap", "swap final", "final", ""], [9, 10], [True, False], together=1),
)
def test_the_last_exchange_is_of_the_trained_weights(order: str, batches: int, eager: bool) -> None:
    """The center is what was trained, and the model holds moving averages; a second end changes nothing."""
    model, seen = make_model(eager=eager, use_ema=True, ema_momentum=0.9), Observe()
    made = {"final": Final, "swap": lambda: Swap(swap_on_epoch=True)}
    fit(model, seen, *(made[name]() for name in order.split()), batches=batches)
    assert same(center(model), seen.replica)
    assert same(weights(model), seen.averages)
    assert not same(seen.replica, seen.averages)
    model.optimizer.finalize()
    assert same(center(model), seen.replica)


@pytest.mark.parametrize(
    ("order", "batches", "eager"),
    covering(["seen final stop", "seen stop final", "final seen stop"], [3, 4], [True, False], together=1),
)
def test_the_best_center_is_restored(batches: int, order: str, eager: bool) -> None:
    """Of elastic averaging, where it is not the best replica."""
    model, seen = make_model("elastic", eager), Observe()
    made: dict[str, Any] = {"seen": seen, "final": Final()}
    made["stop"] = Stop("worse", mode="min", patience=1, restore_best_weights=True)
    fit(model, *(made[name] for name in order.split()), batches=batches, epochs=3)
    assert len(seen.centers) == 2
    assert same(weights(model), seen.centers[0])
    assert not same(seen.centers[0], seen.centers[1])


@pytest.mark.parametrize("batches", [3, 4])
def test_the_model_holds_the_center(batches: int) -> None:
    """Elastic averaging, whose replica is elsewhere. The next ``fit`` goes on from there."""
    model = make_model("elastic")
    for _ in range(2):
        fit(model, Final(), batches=batches)
        assert same(weights(model), center(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "bool", "uint8", "uint32", "int64"])
def test_weights_of_every_dtype_travel_as_horovod_carries_them(dtype: str) -> None:
    array, carried = np.asarray(keras.ops.cast([[0, 1], [1, 0]], dtype)), []

    def send(vector: Any) -> Any:
        carried.append(vector.dtype.name)
        return vector

    found = fit_end._sent([send, send], array)
    assert found.dtype == array.dtype
    assert (found == array).all()
    assert set(carried) <= {"float32", "float64", "int32", "int64"}


REFUSED: dict[str, Any] = {
    "leave out one of the two arguments": lambda _: [
        Final(),
        Swap(swap_on_epoch=True),
        Stop("loss", restore_best_weights=True),
    ],
    "BackupAndRestore comes after SwapEMAWeights": lambda path: [
        Swap(swap_on_epoch=True),
        keras.callbacks.BackupAndRestore(path / "backup"),
        Final(),
    ],
    "Checkpoint comes after SwapEMAWeights": lambda path: [
        Swap(swap_on_epoch=True),
        hvdp.callbacks.Checkpoint(path / "run"),
    ],
    "ReportExchanges comes after SwapEMAWeights": lambda _: [
        Swap(swap_on_epoch=True),
        hvdp.callbacks.ReportExchanges(),
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_callbacks_that_contradict_each_other_are_refused(message: str, tmp_path: Path) -> None:
    model = make_model(use_ema=True)
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        fit(model, *REFUSED[message](tmp_path), batches=3)
    assert same(weights(model), before)


def test_orders_that_are_possible_are_not_refused(tmp_path: Path) -> None:
    model = make_model(use_ema=True)
    before = [hvdp.callbacks.Checkpoint(tmp_path / "run"), hvdp.callbacks.ReportExchanges()]
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    fit(model, Final(), *before, backup, Swap(swap_on_epoch=True), batches=3)
    fit(make_model(use_ema=True), Final(), Swap(), Stop("loss", restore_best_weights=True), batches=3)
