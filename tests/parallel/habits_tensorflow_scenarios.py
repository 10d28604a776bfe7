"""What people do around the exchanges of a Keras script, out of habit; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.habits_tensorflow_scenarios FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.parallel.program import Scenarios, attempt

scenario = Scenarios()
FOLDER: list[Path] = []

MADE: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 2, **k),
}
LOOPS = ("fit", "compiled", "eager")


def make(name: str, period: Any = None, **options: Any) -> Any:
    """Return a compiled model, which differs between ranks, and its optimizer."""
    keras.utils.set_random_seed(5 + hvd.rank())
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    inner = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer = (
        MADE[name](inner, model, **options) if period is None else hvdp.ModelAverageOptimizer(inner, model, period)
    )
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def data(batches: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(hvd.rank()).standard_normal((8 * batches, 3)).astype("float32")


def train(model: Any, batches: int, loop: str = "fit", **options: Any) -> None:
    inputs = data(batches)
    if loop == "fit":
        model.fit(inputs, inputs[:, :2], batch_size=8, verbose=0, shuffle=False, **options)
        return

    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch, training=True) - batch[:, :2]) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step, autograph=False) if loop == "compiled" else step
    for start in range(0, len(inputs), 8):
        run(tf.constant(inputs[start : start + 8]))


def report(model: Any) -> list[Any]:
    """Return steps, rounds, skipped updates, and the center."""
    counters = model.optimizer.synchronizer.counters
    with model.optimizer.center():
        weights = np.concatenate([np.asarray(weight).ravel() for weight in model.trainable_variables]).tolist()
    return [counters.local_steps, counters.rounds, counters.skipped_updates, weights]


@scenario
def weights_of_a_compiled_model_loaded_on_the_root() -> Any:
    """They carry counters and center: all go on from them, whatever the loop or the place; or the error of all."""
    results = {}
    places = {"easgd": ("root",), "average": ("replicated",), "agn": ("replicated", "sharded")}
    for name, place in ((name, place) for name, found in places.items() for place in found):
        model = make(name, center=place)
        train(model, 3)
        path = FOLDER[0] / f"{name}.{place}.{hvd.rank()}.weights.h5"
        model.save_weights(path)
        for loop in LOOPS if name == "easgd" else ("fit",):
            model = make(name, center=place)
            if hvd.rank() == 0:
                model.load_weights(path)
            error = attempt(lambda model=model, loop=loop: train(model, 3, loop))
            results[f"{name} {place} {loop}"] = [error, *([] if error else report(model))]
    return results


@scenario
def weights_of_another_step_on_one_rank() -> Any:
    """The error of every rank."""
    model, paths = make("average"), []
    for _ in range(2):
        train(model, 3)
        paths.append(FOLDER[0] / f"{len(paths)}.{hvd.rank()}.weights.h5")
        model.save_weights(paths[-1])
    model = make("average")
    model.load_weights(paths[hvd.rank() == hvd.size() - 1])
    return attempt(lambda: train(model, 1, "eager"))


@scenario
def models_loaded_from_files() -> Any:
    """Of the same run on all; of different runs; on the root alone, and after attach(): error, steps and center."""
    results, paths = {}, []
    for _ in range(2):
        model = make("average")
        train(model, 3 + len(paths))
        paths.append(FOLDER[0] / f"{len(paths)}.{hvd.rank()}.keras")
        model.save(paths[-1])
    for case in ("together", "apart", "root"):
        if case == "root" and hvd.rank() > 0:
            model = make("average")
        else:
            model = keras.models.load_model(paths[case == "apart" and hvd.rank() == hvd.size() - 1])
            model.optimizer.attach(model)
        error = attempt(lambda model=model: train(model, 2))
        results[case] = [error, *([] if error else report(model))]
    return results


@scenario
def a_state_loaded_after_a_compiled_step() -> Any:
    """Steps of the state that was loaded, and of one that is taken after more training."""
    results = {}
    for place in ("replicated", "root", "sharded"):
        model = make("easgd", center=place)
        train(model, 4)
        synchronizer = model.optimizer.synchronizer
        state = synchronizer.state_dict()
        train(model, 4)
        synchronizer.load_state_dict(state)
        train(model, 6)
        results[place] = [state["counters"]["local_steps"], synchronizer.state_dict()["counters"]["local_steps"]]
    return results


@scenario
def a_state_loaded_into_a_synchronizer_on_the_root() -> Any:
    """AGN, gradient −1 − 2 rank: what prepare_gradients returns at the next step, and the center after it."""

    def begin() -> tuple[Any, Any]:
        w = tf.Variable([float(hvd.rank())])
        return w, hvdp.Synchronizer([w], hvdp.AGN(), 2, outer_optimizer=keras.optimizers.SGD(1.0))

    def stepping(w: Any, synchronizer: Any) -> Callable[[], Any]:
        def step() -> Any:
            (gradient,) = synchronizer.prepare_gradients([tf.constant([-1.0 - 2.0 * hvd.rank()])])
            w.assign_sub(0.5 * gradient)
            synchronizer.step()
            return gradient

        return step

    results, once = {}, begin()
    for _ in range(3):
        stepping(*once)()
    state, weights = once[1].state_dict(), once[0].numpy()
    for loop in LOOPS[1:]:
        w, synchronizer = begin()
        if hvd.rank() == 0:
            w.assign(weights)
            synchronizer.load_state_dict(state)
        step = stepping(w, synchronizer)
        gradient = (tf.function(step, autograph=False) if loop == "compiled" else step)()
        with synchronizer.center():
            results[loop] = [float(gradient[0]), synchronizer.counters.rounds, float(w.numpy()[0])]
    return results


@scenario
def rates_set_per_epoch() -> Any:
    """AGN with a scheduler of Keras, and other numbers of batches on the last rank: steps and center."""
    model = make("agn")
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
    batches = 10 if hvd.rank() == hvd.size() - 1 else 13
    error = attempt(lambda: train(model, batches, epochs=3, callbacks=[schedule, hvdp.callbacks.FinalizeAtEnd()]))
    steps, _, _, center = report(model)
    return [error, steps, center]


@scenario
def two_optimizers() -> Any:
    """Of a GAN in one compiled function, and with an iteration that one rank counts, or does not."""

    def play(counted: bool) -> str:
        models = [make("average", period) for period in (3, 4)]

        def loop() -> None:
            for step in range(12):
                for player, model in enumerate(models):
                    if step == 1 and player == 0 and hvd.rank() == hvd.size() - 1:
                        if counted:
                            model.optimizer.skip()
                        continue
                    train(model, 1, "eager")
            for model in models:
                model.optimizer.finalize()

        return attempt(loop)

    models = [make("average"), make("agn")]

    @tf.function(autograph=False)
    def both(batch: Any) -> None:
        for model in models:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch) - batch[:, :2]) ** 2)
            variables = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for _ in range(5):
        both(tf.constant(data(1)))
    for model in models:
        model.optimizer.finalize()
    rounds = [model.optimizer.synchronizer.rounds for model in models]
    return {"together": rounds, "counted": play(True), "not counted": play(False)}


def main() -> None:
    hvd.init()
    FOLDER.append(Path(sys.argv[1]))
    scenario.run(FOLDER[0], hvd.rank())


if __name__ == "__main__":
    main()
