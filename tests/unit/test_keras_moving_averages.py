"""Moving averages of a wrapped optimizer, and the callback of Keras that swaps them in. One process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

pytestmark = pytest.mark.timeout(90)

IMAGES = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")
TARGETS = IMAGES.sum(axis=1, keepdims=True)


def wrap(optimizer: Any, model: Any) -> Any:
    return hvdp.ModelAverageOptimizer(optimizer, model, 2, process_set=LocalCommunicator())


WRAPPED: dict[str, Any] = {
    "scaled": lambda local, model: wrap(keras.optimizers.LossScaleOptimizer(local), model),
    "twice": lambda local, model: wrap(wrap(local, model), model),
    "scaled, twice": lambda local, model: wrap(wrap(keras.optimizers.LossScaleOptimizer(local), model), model),
}


def make_model(make_optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = make_optimizer(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8), model)
    model.compile(optimizer, loss="mse", auto_scale_loss=False, jit_compile=False)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 2) -> dict[str, list[float]]:
    history = model.fit(
        IMAGES,
        TARGETS,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(IMAGES, TARGETS),
        callbacks=list(callbacks),
    )
    return dict(history.history)


@functools.cache
def of_bare_optimizer(callback: Any = None, *arguments: Any) -> list[float]:
    """Return the losses of the validation without a wrapper."""
    callbacks = [] if callback is None else [callback(*arguments)]
    return fit(make_model(lambda local, _: local), *callbacks)["val_loss"]


@pytest.mark.parametrize(
    ("name", "swap_on_epoch"),
    [
        *(("scaled", False), ("twice", True), thorough("scaled, twice", False)),
        *(thorough("scaled", True), thorough("twice", False), thorough("scaled, twice", True)),
    ],
)
def test_averages_are_swapped_in_through_all_wrappers(name: str, swap_on_epoch: bool, tmp_path: Path) -> None:
    """With one rank, losses of the moving averages as under the bare optimizer; a saved model loads."""
    model = make_model(WRAPPED[name])
    found = fit(model, keras.callbacks.SwapEMAWeights(swap_on_epoch))["val_loss"]
    assert found == pytest.approx(of_bare_optimizer(keras.callbacks.SwapEMAWeights, swap_on_epoch), rel=1e-5)
    assert found != pytest.approx(of_bare_optimizer(), rel=1e-3), "losses of the weights"
    if "twice" not in name:
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert all((a == b).all() for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True))
