"""Checkpoints of Keras jobs, saved and loaded by ranks of the same number and of others.

mpirun -np 2 python -m tests.parallel.checkpoint_tensorflow_scenarios FOLDER SHARED
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.centers import saved_states
from hvd_periodic.checkpoints import saving as checkpoint_saving
from tests.conftest import PATIENCE
from tests.parallel.program import Scenarios, attempt, repeated
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()

SHARED = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
"""What jobs leave for others."""

SAVED, END = 5, 9
"""Steps at the save, which is in the middle of a period of 3, and at the end."""


def network(kind: str = "float32") -> Any:
    """Return a model that differs between ranks, with statistics and random numbers."""
    keras.utils.set_random_seed(17 + hvd.rank())
    layers = [keras.Input((3,)), keras.layers.Dense(5, dtype=kind), keras.layers.BatchNormalization(dtype=kind)]
    return keras.Sequential([*layers, keras.layers.Dropout(0.3), keras.layers.Dense(2, dtype=kind)])


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5))


CASES: dict[str, Callable[[Any], Any]] = {
    "easgd": lambda m: hvdp.ElasticAverageOptimizer(sgd(), m, 3, rho=0.01),
    "average sharded": lambda m: hvdp.ModelAverageOptimizer(adam(), m, 3, center="sharded"),
    "agn": lambda m: hvdp.AGNOptimizer(adam(), m, 3),
    "agn sharded": lambda m: hvdp.AGNOptimizer(adam(), m, 3, center="sharded"),
    "diloco": lambda m: hvdp.PeriodicOptimizer(sgd(), m, hvdp.DiLoCo(), 3, compression=hvdp.Compression.int8),
    "levels": lambda m: hvdp.ModelAverageOptimizer(hvdp.ElasticAverageOptimizer(sgd(), m, 2), m, 4),
}

CHOSEN = ("agn", "agn sharded", "diloco", "levels", *repeated("easgd", "average sharded"))
"""Cases that are saved, and found by jobs of other numbers of ranks."""


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = tf.constant(np.random.default_rng(100 * step + hvd.rank()).standard_normal((8, 3)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(inputs, training=True), tf.float32) - inputs[:, :2]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def bits(values: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(keras.ops.convert_to_numpy(v)).tobytes() for v in values)).hexdigest()


def center_of(model: Any, optimizer: Any) -> str:
    with optimizer.center():
        return bits(model.trainable_variables)


def everything(model: Any, optimizer: Any) -> list[str]:
    """Return digests of the replica with its random generators, the local optimizer and the center."""
    local = optimizer
    while isinstance(local, hvdp.PeriodicOptimizer):
        local = local.inner
    return [bits(model.variables), bits(local.variables), center_of(model, optimizer)]


def made(name: str, kind: str = "float32") -> tuple[Any, Any]:
    model = network(kind)
    return model, CASES[name](model)


def folder(name: str) -> Path:
    return SHARED.with_name(f"{SHARED.name}-{hvd.size()}-{name}")


@scenario
def exact() -> Any:
    """Of every case: the steps and values that are loaded; everything at the end, of training that was not
    interrupted and of training that was; and the center when it was saved.
    """
    results = {}
    for number, name in enumerate(CHOSEN):
        kind = "bfloat16" if name == "agn" else "float32"
        path = SHARED / f"{hvd.size()}" / name
        model, optimizer = made(name, kind)
        train(model, optimizer, 0, SAVED)
        center = center_of(model, optimizer)
        saving = hvdp.save(path, model, optimizer, epoch=number, seen=(tf.constant([1, 2]), None), background=True)
        train(model, optimizer, SAVED, END)
        uninterrupted = everything(model, optimizer)
        saving.wait()
        model, optimizer = made(name, kind)
        values = hvdp.load(path, model, optimizer, epoch=-1, new="default")
        steps = optimizer.synchronizer.local_steps
        train(model, optimizer, SAVED, END)
        results[name] = {
            "values": [values["epoch"], values["new"], values["seen"][0].numpy().tolist(), steps],
            "ends": [uninterrupted, everything(model, optimizer)],
            "center": center,
        }
        optimizer.finalize()
    return results


@scenario
def among_others() -> Any:
    """Of what jobs of other numbers of ranks have saved: what is loaded, at which step, and how training goes on."""
    results = {}
    for saved in sorted(SHARED.iterdir()):
        for name in [] if saved.name == str(hvd.size()) else CHOSEN:
            model, optimizer = made(name, "bfloat16" if name == "agn" else "float32")
            hvdp.load(saved / name, model, optimizer)
            loaded = [bits(model.trainable_variables), optimizer.synchronizer.local_steps]
            error = attempt(lambda: train(model, optimizer, SAVED, END))  # noqa: B023
            optimizer.finalize()
            results[f"{saved.name} {name}"] = [*loaded, error, center_of(model, optimizer)]
    return results


@scenario
def the_file_of_the_root_alone() -> Any:
    """Visible to all ranks, and loaded on the root alone, without the broadcasts of a script and with them."""
    path, results = folder("root"), {}
    for name in ("agn sharded",):
        model, optimizer = made(name)
        train(model, optimizer, 0, SAVED)
        hvdp.save(path / name, model, optimizer, epoch=7)
        optimizer.finalize()
        if hvd.rank() == 0:
            for file in (path / name).glob("*/rank-*.npz"):
                if file.name != "rank-0.npz":
                    file.unlink()
        hvd.allgather_object(None)
        for case in ("visible", "on the root", "broadcasts"):
            model, optimizer = made(name)
            values = {}
            if case == "visible" or hvd.rank() == 0:
                values = hvdp.load(path / name, model, optimizer, epoch=-1)
            if case == "broadcasts":
                hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
            train(model, optimizer, SAVED, SAVED + 1)
            counters = optimizer.synchronizer.counters
            results[f"{name} {case}"] = [values.get("epoch"), counters.local_steps, center_of(model, optimizer)]
            optimizer.finalize()
    return results


@scenario
def damage() -> Any:
    """The file of the last rank was altered; and a file of another model: what load() and the first step raise."""
    path, results = folder("damage"), []
    model, optimizer = made("easgd")
    train(model, optimizer, 0, SAVED)
    hvdp.save(path, model, optimizer)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = CASES["easgd"](other)
    results.append(attempt(lambda: hvdp.load(path, other, optimizer)))
    results.append(attempt(lambda: train(other, optimizer, 0, 1)))
    last = path / f"000001-step{SAVED}" / f"rank-{hvd.size() - 1}.npz"
    hvd.allgather_object(None)
    if hvd.rank() == 0:
        data = bytearray(last.read_bytes())
        data[len(data) // 2] ^= 4
        last.write_bytes(data)
    hvd.allgather_object(None)
    model, optimizer = made("easgd")
    results.append(attempt(lambda: hvdp.load(path, model, optimizer)))
    results.append(attempt(lambda: train(model, optimizer, 0, 1), tf.errors.OpError))
    return results


@scenario
def fit() -> Any:
    """Epochs of four batches, saved by the callback: sets that are there; and both ends, after two epochs of four."""
    data = np.random.default_rng(hvd.rank()).standard_normal((32, 3)).astype("float32")
    ends: list[Any] = []
    for resumed in (False, True):
        model, optimizer = made("agn")
        model.compile(optimizer, loss="mse", jit_compile=False)
        first = 0
        if resumed:
            first = hvdp.load(folder("fit"), model, optimizer, at_step=8, epoch=0)["epoch"]
        callbacks = [] if resumed else [hvdp.callbacks.Checkpoint(folder("fit"), keep=3, background=True)]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(data, data[:, :2], epochs=4, initial_epoch=first, callbacks=callbacks, **options)
        ends.append([first, everything(model, optimizer)])
        optimizer.finalize()
    model, optimizer = made("easgd")
    model.compile(optimizer, loss="mse", jit_compile=False, steps_per_execution=2)
    callbacks = [hvdp.callbacks.Checkpoint(folder("steps"), every=3, tag="mine")]
    model.fit(data, data[:, :2], epochs=2, callbacks=callbacks, **options)
    sets = [sorted(file.name for file in folder(name).iterdir()) for name in ("fit", "steps")]
    model, optimizer = made("easgd")
    values = hvdp.load(folder("steps"), model, optimizer, at_step=4)
    return [sets, ends, [values["epoch"], values["tag"]]]


@scenario
def beside_collectives_of_the_user() -> Any:
    """Wrong values that the user's own collectives return beside saves in the background; sets after finalize()."""
    model, optimizer = made("easgd")
    wrong = []
    for step in range(30):
        train(model, optimizer, step, step + 1)
        if step % 10 == 9:
            hvdp.save(folder("beside"), model, optimizer, background=True)
        for number in range(20):
            gathered = hvd.allgather_object(1000 * hvd.rank() + number, name="mine")
            wrong += [] if gathered == [1000 * rank + number for rank in range(hvd.size())] else [gathered]
    optimizer.finalize()
    return [wrong, len(list(folder("beside").glob("*/manifest.json")))]


@scenario
def in_the_background_of_fit() -> Any:
    """How many sets are complete at each batch, of a save whose writer one rank holds back for some batches."""
    model, optimizer = made("easgd")
    model.compile(optimizer, loss="mse", jit_compile=False)
    path, go, write, seen = folder("beside-fit"), threading.Event(), checkpoint_saving.write_content, []

    def held(*arguments: Any) -> Any:
        assert go.wait(100 * PATIENCE)
        return write(*arguments)

    class Save(keras.callbacks.Callback):
        begun: Any = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.begun = hvdp.save(path, model, optimizer, background=True)
            if batch == 7:
                go.set()
                self.begun.join()
                hvd.allgather_object(None)
            seen.append(len(list(path.glob("*/manifest.json"))))

    data = np.random.default_rng(hvd.rank()).standard_normal((96, 3)).astype("float32")
    if hvd.rank() == 0:
        checkpoint_saving.write_content = held
    try:
        model.fit(data, data[:, :2], batch_size=8, epochs=1, verbose=0, callbacks=[Save()])
    finally:
        checkpoint_saving.write_content = write
    optimizer.finalize()
    return seen


@scenario
def a_loop_of_its_own() -> Any:
    """A synchronizer around any loop, with the local optimizer among what is saved besides: both ends."""
    ends = []
    for resumed in (False, True):
        model, local = network(), adam()
        local.build(model.trainable_variables)
        synchronizer = hvdp.Synchronizer(model, hvdp.EASGD(0.25), 3)
        first = hvdp.load(folder("loop"), model, synchronizer, local=local, step=0)["step"] if resumed else 0
        for step in range(first, END):
            if step == SAVED and not resumed:
                hvdp.save(folder("loop"), model, synchronizer, local=local, step=step)
            inputs = tf.constant(np.random.default_rng(100 * step + hvd.rank()).standard_normal((8, 3)), tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            local.apply_gradients(
                zip(synchronizer.prepare_gradients(gradients), model.trainable_variables, strict=True)
            )
            synchronizer.step()
        ends.append([bits(model.variables), first])
        synchronizer.finalize()
    return ends


def main() -> None:
    hvd.init()
    saved_states._SMALL_BYTES = 16  # So that also the states of these models are not gathered as a whole.
    scenario.run(Path(sys.argv[1]), hvd.rank(), mpi=hvd.mpi_enabled())


if __name__ == "__main__":
    main()
