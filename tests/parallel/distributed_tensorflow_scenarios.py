"""What every rank does around Horovod's DistributedOptimizer of Keras; see ``scenarios.py``.

mpirun -np 4 python -m tests.parallel.distributed_tensorflow_scenarios FOLDER '[[0, 1], [2, 3]]'
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests import oracle
from tests.parallel.program import Scenarios, attempt, repeated

scenario = Scenarios()
GROUPS: list[Any] = []

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m=None, p=2, **k: hvdp.ElasticAverageOptimizer(o, m, p, moving_rate=0.25, **k),
    "easgd_rho": lambda o, m=None, p=2, **k: hvdp.ElasticAverageOptimizer(o, m, p, moving_rate=0.25, rho=0.5, **k),
    "average": lambda o, m=None, p=2, **k: hvdp.ModelAverageOptimizer(o, m, p, **k),
    "agn": lambda o, m=None, p=4, **k: hvdp.AGNOptimizer(o, m, p, **k),
}

LOOPS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "eager": lambda step: step,
    "function": lambda step: tf.function(step),
}


def parameter() -> Any:
    """The oracle's start on rank 0, another on the others."""
    return keras.Variable(np.array(oracle.START) + hvd.rank(), dtype="float64", name="w")


def distributed(process_set: Any = None, inner: Any = None, **options: Any) -> Any:
    inner = keras.optimizers.SGD(oracle.RATE, momentum=oracle.MOMENTUM) if inner is None else inner
    return hvd.DistributedOptimizer(inner, process_set=process_set or hvd.global_process_set, **options)


def step_of(optimizer: Any, w: Any, loop: str = "function") -> Callable[[], Any]:
    """Return one step on the oracle's loss."""
    zero = np.array(oracle.gradient(hvd.rank(), [0.0] * len(oracle.START)))
    curvature = np.array(oracle.gradient(hvd.rank(), [1.0] * len(oracle.START))) - zero
    return LOOPS[loop](lambda: optimizer.apply_gradients([(curvature * tf.convert_to_tensor(w) + zero, w)]))


def take(step: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        step()


def center_of(w: Any, optimizer: Any) -> list[float]:
    with optimizer.center():
        return list(w.numpy().tolist())


@scenario
def hierarchical() -> Any:
    """x and c after the oracle's steps."""
    results = {}
    chosen = ("easgd_rho", "average", "agn")
    for name in (*chosen, *repeated(*(name for name in OPTIMIZERS if name not in chosen))):
        make, loop = OPTIMIZERS[name], "eager" if name in ("easgd_rho", "average") else "function"
        w = parameter()
        optimizer = make(distributed(GROUPS[0].local), process_set=GROUPS[0].cross)
        optimizer.build([w])
        take(step_of(optimizer, w, loop), oracle.STEPS)
        results[name] = [w.numpy().tolist(), center_of(w, optimizer), optimizer.synchronizer.rounds]
    return results


@scenario
def post_local() -> Any:
    """Gradients averaged over all ranks until step 4, then exchanges after every third; also resumed at 3 and at 6."""
    results: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        stops = {"easgd_rho": (None, 3), "agn": (None, 6)}.get(name, ())
        for loop, stop in (("function", stop) for stop in stops) if stops else [("eager", None)]:
            w = parameter()
            optimizer = make(distributed(), None, hvdp.PostLocal(4, 3))
            optimizer.build([w])
            take(step_of(optimizer, w, loop), stop or oracle.STEPS)
            if stop is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = tf.train.Checkpoint(w=w.value, optimizer=optimizer).save(f"{folder}/c")
                    w = parameter()
                    optimizer = make(distributed(), None, hvdp.PostLocal(4, 3))
                    optimizer.build([w])
                    tf.train.Checkpoint(w=w.value, optimizer=optimizer).restore(path).assert_consumed()
                take(step_of(optimizer, w, loop), oracle.STEPS - stop)
            found = [w.numpy().tolist(), center_of(w, optimizer), optimizer.synchronizer.rounds]
            results[f"{name} {loop} {stop}"] = found
    w = parameter()
    optimizer = OPTIMIZERS["easgd"](distributed(), None, hvdp.PostLocal(9, 3))
    optimizer.build([w])
    take(step_of(optimizer, w), 4)
    results["center before"] = [center_of(w, optimizer), w.numpy().tolist(), optimizer.synchronizer.distance()]
    optimizer.finalize()
    results["center after"] = [center_of(w, optimizer), w.numpy().tolist(), optimizer.synchronizer.distance()]
    return results


@scenario
def levels() -> Any:
    """Averages inside of groups after every second step, and of all ranks after every sixth."""
    return {"function": averages_of_averages(GROUPS[0].local, "function")}


@scenario
def levels_in_step() -> Any:
    """The same, where a function says who is in a group."""

    def within() -> list[int]:
        return next(group for group in GROUPS[0].ranks if hvd.rank() in group)

    return {loop: averages_of_averages(within, loop) for loop in ("function", *repeated("eager"))}


def averages_of_averages(within: Any, loop: str) -> list[Any]:
    """Return what this rank has after each step, the rounds of both levels, and what a file says of the group."""
    w = keras.Variable(oracle.START, dtype="float64", name="w")
    inner = hvdp.ModelAverageOptimizer(
        keras.optimizers.SGD(oracle.RATE, momentum=oracle.MOMENTUM), None, 2, process_set=within
    )
    optimizer = hvdp.ModelAverageOptimizer(inner, None, 6)
    optimizer.build([w])
    step, seen = step_of(optimizer, w, loop), []
    for _ in range(12):
        step()
        seen.append(w.numpy().tolist())
    optimizer.finalize()
    return [seen, inner.synchronizer.rounds, optimizer.synchronizer.rounds, inner.get_config()["process_set"]]


def network() -> Any:
    """A model with an embedding, whose gradients are sparse, and statistics."""
    keras.utils.set_random_seed(hvd.rank())
    return keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(7, 3),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )


def fit(model: Any, optimizer: Any, seed: int, steps: int, **options: Any) -> None:
    random = np.random.default_rng(100 * seed + hvd.rank())
    words, targets = random.integers(0, 7, (4 * steps, 2)), random.standard_normal((4 * steps, 2))
    model.compile(optimizer, loss="mse", jit_compile=False, auto_scale_loss=False, **options)
    model.fit(words, targets, batch_size=4, shuffle=False, verbose=0)


def weights(model: Any) -> list[float]:
    return [float(value) for weight in model.trainable_variables for value in weight.numpy().ravel()]


VARIANTS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: distributed(GROUPS[0].local),
    "compressed": lambda: distributed(GROUPS[0].local, compression=hvd.Compression.fp16),
    "dense": lambda: distributed(GROUPS[0].local, sparse_as_dense=True),
    "clipped": lambda: distributed(GROUPS[0].local, keras.optimizers.SGD(0.15, momentum=0.6, global_clipnorm=0.1)),
    "accumulated": lambda: distributed(GROUPS[0].local, keras.optimizers.SGD(0.15, gradient_accumulation_steps=2)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(distributed(GROUPS[0].local)),
}


@scenario
def in_fit() -> Any:
    """Weights after eight steps of ``fit``, by variant; what the same run without averaging gives."""
    results = {}
    for variant, inside in VARIANTS.items():
        model = network()
        optimizer = OPTIMIZERS["average"](inside(), model, process_set=GROUPS[0].cross)
        fit(model, optimizer, 1, 8)
        results[variant] = weights(model)
    model = network()
    optimizer = OPTIMIZERS["average"](keras.optimizers.SGD(oracle.RATE, momentum=oracle.MOMENTUM), model, 100)
    fit(model, optimizer, 1, 8)
    results["apart"] = weights(model)
    return results


@scenario
def post_local_in_fit() -> Any:
    """Sparse gradients on both sides of the switch: weights at step 4 and at the end."""
    model = network()
    optimizer = OPTIMIZERS["agn"](distributed(), model, hvdp.PostLocal(4, 2))
    fit(model, optimizer, 2, 4)
    before = weights(model)
    fit(model, optimizer, 3, 3)
    return [before, weights(model), optimizer.synchronizer.rounds]


@scenario
def saved_and_loaded() -> Any:
    """A model that was saved with its optimizer goes on to the bit, once it is given what no file holds."""
    model = network()
    fit(model, OPTIMIZERS["easgd"](distributed(GROUPS[0].local), model, process_set=GROUPS[0].cross), 4, 5)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
        incomplete = keras.models.load_model(f"{folder}/model.keras")
    incomplete.optimizer.attach(incomplete, process_set=GROUPS[0].cross)
    error = attempt(lambda: fit(incomplete, incomplete.optimizer, 5, 5))
    loaded.optimizer.attach(loaded, process_set=GROUPS[0].cross, distributed=distributed(GROUPS[0].local))
    fit(model, model.optimizer, 5, 5)
    fit(loaded, loaded.optimizer, 5, 5)
    return [weights(model), weights(loaded), error]


@scenario
def refused() -> Any:
    """Arguments that are wrong, on all ranks."""
    used = distributed(GROUPS[0].local)
    used.build([parameter()])
    average = OPTIMIZERS["average"]
    size = hvd.size()
    return {
        "over all": attempt(lambda: average(distributed())),
        "inside the group": attempt(lambda: average(distributed(GROUPS[0].local), process_set=GROUPS[0].local)),
        "asynchronous": attempt(lambda: hvdp.AGNOptimizer(distributed(GROUPS[0].local), None, 2, asynchronous=True)),
        "passes": attempt(lambda: average(distributed(GROUPS[0].local, backward_passes_per_step=2))),
        "around": attempt(lambda: distributed(inner=average(keras.optimizers.SGD(0.1)))),
        "used": attempt(lambda: average(used, process_set=GROUPS[0].cross)),
        "overlap": attempt(lambda: hvdp.rank_groups([range(size), [0]])),
        "size": attempt(lambda: hvdp.node_groups(0)),
    }


def main(folder: Path, groups: str) -> None:
    """Run all scenarios in these groups."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    GROUPS.append(hvdp.rank_groups(json.loads(groups)))
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
