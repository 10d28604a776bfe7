"""Callbacks of the Keras front end, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

pytestmark = pytest.mark.timeout(60)

IMAGES = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")
TARGETS = IMAGES.sum(axis=1, keepdims=True)


def make_model(eager: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(0.05), model, 5, moving_rate=0.3, process_set=LocalCommunicator()
    )
    model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=eager, jit_compile=False)
    return model


@pytest.fixture(params=[True, thorough(False)], ids=["eager", "compiled"])
def model(request: pytest.FixtureRequest) -> Any:
    """A model whose steps are eager: callbacks run between steps, and most see nothing of how these run."""
    return make_model(request.param)


in_compiled_steps = pytest.mark.parametrize("model", [thorough(True), False], ids=["eager", "compiled"], indirect=True)
"""Every run has these tests with compiled steps."""


def fit(model: Any, *callbacks: Any, epochs: int = 3) -> dict[str, list[float]]:
    history = model.fit(IMAGES, TARGETS, batch_size=6, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return dict(history.history)


@in_compiled_steps
def test_metrics_of_the_center_appear_in_the_logs(model: Any) -> None:
    seen: list[tuple[float, float]] = []

    class Check(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with model.optimizer.center():
                error = model.predict(IMAGES, verbose=0) - TARGETS
            seen.append((float((error**2).mean()), float(abs(error).mean())))

    history = fit(model, hvdp.callbacks.EvaluateCenter((IMAGES, TARGETS), batch_size=24), Check())
    assert history["val_center_loss"] == pytest.approx([loss for loss, _ in seen], rel=1e-4)
    assert history["val_center_mae"] == pytest.approx([error for _, error in seen], rel=1e-4)
    assert len(set(history["val_center_loss"])) == 3
    assert history["val_center_loss"] != history["loss"]


def test_evaluation_leaves_the_training_as_it_is(model: Any) -> None:
    other = make_model(model.run_eagerly)
    for trained, callbacks in ((model, [hvdp.callbacks.EvaluateCenter((IMAGES, TARGETS))]), (other, [])):
        trained.fit(IMAGES, TARGETS, batch_size=6, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    assert all((a == b).all() for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


def test_evaluation_every_other_epoch(model: Any) -> None:
    history = fit(model, hvdp.callbacks.EvaluateCenter((IMAGES, TARGETS), every=2), epochs=5)
    assert len(history["val_center_loss"]) == 2


def test_a_dataset_does_for_validation(model: Any) -> None:
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((IMAGES, TARGETS)).batch(24)
    assert len(fit(model, hvdp.callbacks.EvaluateCenter(data))["val_center_loss"]) == 3


def test_the_best_center_is_saved(model: Any, tmp_path: Path) -> None:
    centers: list[Any] = []

    class Record(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with model.optimizer.center():
                centers.append(model.get_weights())
            logs["val_center_loss"] = [2.0, 1.0, 3.0][epoch]

    file = tmp_path / "best.keras"
    fit(model, Record(), hvdp.callbacks.SaveBestCenter(file))
    saved = keras.models.load_model(file).get_weights()
    assert all((a == b).all() for a, b in zip(saved, centers[1], strict=True))
    assert not (saved[0] == model.get_weights()[0]).all()


def test_every_center_can_be_saved_too(model: Any, tmp_path: Path) -> None:
    save = hvdp.callbacks.SaveBestCenter(tmp_path / "{epoch}.weights.h5", save_best_only=False, save_weights_only=True)
    fit(model, save)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{i}.weights.h5" for i in (1, 2, 3)]
    by_batch = hvdp.callbacks.SaveBestCenter(
        tmp_path / "batch{batch}.weights.h5", save_best_only=False, save_weights_only=True, save_freq=4
    )
    fit(model, by_batch, epochs=1)
    with model.optimizer.center():
        center = model.get_weights()
    model.load_weights(tmp_path / "batch4.weights.h5")
    assert (model.get_weights()[0] == center[0]).all()


def test_what_is_best_has_to_be_known() -> None:
    assert hvdp.callbacks.SaveBestCenter("x.keras", monitor="val_center_accuracy").mode == "max"
    with pytest.raises(ValueError, match="must be 'min' or 'max' for monitor='val_center_mae'"):
        hvdp.callbacks.SaveBestCenter("x.keras", monitor="val_center_mae")


@in_compiled_steps
def test_exchanges_are_reported(model: Any) -> None:
    history = fit(model, hvdp.callbacks.ReportExchanges())
    assert history["rounds"] == [0, 1, 2]
    assert history["skipped_updates"] == [0, 0, 0]
    assert history["bytes_sent"] == [0, 16 + 136, 2 * (16 + 136)]
    assert history["center_distance"][-1] == pytest.approx(model.optimizer.synchronizer.distance())
    assert history["exchange_seconds"][2] > history["exchange_seconds"][0] == 0


def test_tensorboard_shows_the_center_and_the_exchanges(model: Any, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(
        model,
        hvdp.callbacks.EvaluateCenter((IMAGES, TARGETS)),
        hvdp.callbacks.ReportExchanges(),
        keras.callbacks.TensorBoard(str(tmp_path)),
    )
    found = {}
    for folder in ("train", "validation"):
        events = event_accumulator.EventAccumulator(str(tmp_path / folder), size_guidance={"tensors": 0})
        events.Reload()
        found.update({tag: len(events.Tensors(tag)) for tag in events.Tags()["tensors"]})
    for tag in ("epoch_rounds", "epoch_center_distance", "epoch_center_loss"):
        assert found.get(tag) == 3, found


def test_finalize_at_the_end(model: Any) -> None:
    fit(model, hvdp.callbacks.FinalizeAtEnd(), epochs=2)
    counters = model.optimizer.synchronizer.counters
    assert (counters.local_steps, counters.rounds, counters.last_exchange) == (8, 2, 8)


def test_broadcast_at_the_start_of_a_loaded_model(model: Any, tmp_path: Path) -> None:
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, process_set=LocalCommunicator())
    fit(loaded, hvdp.callbacks.BroadcastAtStart(), epochs=1)
    assert loaded.optimizer.synchronizer.local_steps == 16


@pytest.mark.parametrize("name", ["BroadcastAtStart", "FinalizeAtEnd", "ReportExchanges"])
def test_another_optimizer_is_refused(name: str) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match=f"{name} needs a model that is compiled with an optimizer of hvd_periodic"):
        fit(model, getattr(hvdp.callbacks, name)())


@pytest.mark.parametrize("at_once", [thorough(1), 2])
def test_the_loss_of_every_batch_is_reported(at_once: int) -> None:
    """Losses 0, 1, 4, 9 and so on; the batch that ends a round counts for the next, and epochs begin anew."""
    heard: list[float | None] = []

    def every_third(clock: hvdp.Clock) -> int:
        if clock.round:
            heard.append(clock.loss)
        return 3

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.0), model, hvdp.Averaging(), every_third, process_set=LocalCommunicator()
    )
    model.compile(optimizer, loss="mse", steps_per_execution=at_once)
    x = np.arange(6.0, dtype="float32")[:, None]
    model.fit(x, 0 * x, 1, epochs=2, shuffle=False, verbose=0, callbacks=[hvdp.callbacks.ReportLoss()])
    if at_once == 1:
        expected = [np.mean(losses) for losses in ([0, 1], [4, 9, 16], [25, 0, 1], [4, 9, 16])]
    else:  # Keras calls back after two batches.
        means = [0.5, 6.5, 20.5]
        expected = [means[0], means[1], np.mean([means[2], means[0]]), means[1]]
    assert [loss for loss in heard if loss is not None] == pytest.approx(expected, rel=1e-4)


def test_only_finite_losses_are_reported(model: Any) -> None:
    with pytest.raises(ValueError, match="A loss of nan was reported at step 1"):
        model.fit(IMAGES * np.nan, TARGETS, batch_size=6, verbose=0, callbacks=[hvdp.callbacks.ReportLoss()])


@pytest.mark.parametrize(
    ("every", "kind"), [("batch", ValueError), (0, ValueError), (2.5, TypeError), (None, TypeError)]
)
def test_when_to_save_a_checkpoint(tmp_path: Path, every: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"`Checkpoint\(every=\.\.\.\)` must be"):
        hvdp.callbacks.Checkpoint(tmp_path, every=every)


@in_compiled_steps
def test_checkpoints_of_epochs_and_steps(model: Any, tmp_path: Path) -> None:
    epochs, steps = tmp_path / "epochs", tmp_path / "steps"
    fit(model, hvdp.callbacks.Checkpoint(epochs, keep=2, background=True), hvdp.callbacks.Checkpoint(steps, every=7))
    done = model.optimizer.synchronizer.local_steps
    assert [int(folder.name.partition("step")[2]) for folder in sorted(steps.iterdir())] == list(range(7, done + 1, 7))
    assert [int(folder.name.partition("step")[2]) for folder in sorted(epochs.iterdir())] == [done * 2 // 3, done]
    weights = model.get_weights()
    other = make_model()
    assert hvdp.load(epochs, other, other.optimizer, epoch=0) == {"epoch": 3}
    for found, expected in zip(other.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, expected)
