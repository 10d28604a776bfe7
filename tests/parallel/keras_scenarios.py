"""What every rank does with the Keras optimizers and the synchronizer of TensorFlow; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.keras_scenarios FOLDER
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.comm.local import started_by_mpi
from hvd_periodic.keras.model import NamedVariables
from hvd_periodic.tensorflow.communicator import communicator_of
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.replica import VariableReplica
from tests import oracle
from tests.conformance.communicator_contract import check_communicator
from tests.parallel import keras_adoption
from tests.parallel.program import NotApplicableError, Scenarios, attempt, crossed, repeated, rotated
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m=None, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "easgd_default": lambda o, m=None, **k: hvdp.ElasticAverageOptimizer(o, m, 2, **k),
    "easgd_rho": lambda o, m=None, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5, **k),
    "average": lambda o, m=None, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "post_local": lambda o, m=None, **k: hvdp.ModelAverageOptimizer(o, m, hvdp.PostLocal(2, 3), **k),
    "agn": lambda o, m=None, **k: hvdp.AGNOptimizer(o, m, 4, **k),
    "agn_average": lambda o, m=None, **k: hvdp.AGNOptimizer(o, m, 4, op="average", **k),
    "diloco": lambda o, m=None, **k: hvdp.PeriodicOptimizer(o, m, hvdp.DiLoCo(), 2, **k),
    "slowmo": lambda o, m=None, **k: hvdp.PeriodicOptimizer(o, m, hvdp.SlowMo(), 2, **k),
    "bmuf": lambda o, m=None, **k: hvdp.PeriodicOptimizer(o, m, hvdp.BMUF(), 2, **k),
}

MOMENTUM = 0.5
"""A number of float32, unlike that of the oracle: Keras rounds the momentum."""

LOOPS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "eager": lambda step: step,
    "function": lambda step: tf.function(step),
}


def bits(variables: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in variables)).hexdigest()


def read_center(optimizer: Any, variable: Any) -> list[float]:
    with optimizer.center():
        return [float(value) for value in variable.numpy().ravel()]


def scalar(start: float) -> Any:
    return keras.Variable([start], dtype="float64", name="w")


def constant_step(optimizer: Any, w: Any, gradient: float) -> Callable[[], Any]:
    """Return a step; a closure, because ``tf.function`` makes tensors of default arguments."""
    return lambda: optimizer.apply_gradients([(tf.constant([gradient], tf.float64), w)])


@scenario
def constant_gradients() -> Any:
    """Gradient −1 − 2 rank, from different starts until the root's is broadcast: x and c after each step.

    Of those whose numbers were worked out by hand; the trajectories of all are those of the oracle, see ``quadratics``.
    """
    results = {}
    functions = [("function", name) for name in ("easgd", "agn", *repeated("average", "easgd_default", "agn_average"))]
    for loop, name in [*functions, ("eager", "easgd"), ("eager", "agn")]:
        w = scalar(float(hvd.rank()))
        rate = tf.constant(0.1 if name.startswith("agn") else 1.0, tf.float64)
        optimizer = OPTIMIZERS[name](keras.optimizers.SGD(lambda rate=rate: rate))
        optimizer.build([w])
        step = LOOPS[loop](constant_step(optimizer, w, -1.0 - 2.0 * hvd.rank()))
        trajectory = []
        for _ in range(8):
            step()
            trajectory.append((float(w.numpy()[0]), read_center(optimizer, w)[0]))
        results[f"{name} {loop}"] = trajectory
    return results


@scenario
def constant_gradients_in_fit() -> Any:
    """The same through ``model.fit``: a linear model whose loss is its output; also several steps per execution."""
    results = {}
    data = tf.data.Dataset.from_tensors((tf.fill([1, 1], -1.0 - 2.0 * hvd.rank()), tf.zeros([1, 1]))).repeat(8)
    for name in ("easgd", "average", "agn"):
        for steps in (1, 4):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.set_weights([np.full((1, 1), float(hvd.rank()))])
            optimizer = OPTIMIZERS[name](keras.optimizers.SGD(0.1 if name == "agn" else 1.0), model)
            seen = []

            class Record(keras.callbacks.Callback):
                def __init__(self, seen: Any, optimizer: Any, weight: Any) -> None:
                    super().__init__()
                    self.seen, self.optimizer, self.weight = seen, optimizer, weight

                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    center = read_center(self.optimizer, self.weight)
                    self.seen.append((float(self.weight.numpy()[0, 0]), center[0]))

            record = Record(seen, optimizer, model.weights[0])
            model.compile(
                optimizer, loss=lambda y, output: tf.reduce_sum(output), steps_per_execution=steps, jit_compile=False
            )
            model.fit(data, shuffle=False, verbose=0, callbacks=[record])
            results[f"{name} {steps}"] = seen
    return results


@scenario
def built_by_the_first_batch() -> Any:
    """A model that knows its input shape, and one that does not: what both are after two epochs, and its center."""
    results = {}
    cases: dict[str, Callable[..., Any]] = {
        "easgd": lambda inner, model: hvdp.ElasticAverageOptimizer(inner, model, 2),
        "agn sharded": lambda inner, model: hvdp.AGNOptimizer(inner, model, 2, center="sharded"),
        "averaged": lambda inner, model: hvdp.ModelAverageOptimizer(
            hvd.DistributedOptimizer(inner), model, hvdp.PostLocal(2, 3)
        ),
    }
    inputs = np.random.default_rng(hvd.rank()).standard_normal((20, 3)).astype("float32")
    for name, wrap in cases.items():
        for shape in ([keras.Input((3,))], []):
            keras.utils.set_random_seed(7 + hvd.rank())
            model = keras.Sequential([*shape, keras.layers.Dense(2), keras.layers.BatchNormalization()])
            optimizer = wrap(keras.optimizers.SGD(0.05, momentum=0.5), model)
            model.compile(optimizer, loss="mse", jit_compile=False, steps_per_execution=2 if name == "easgd" else 1)
            callbacks = [hvdp.callbacks.BroadcastAtStart(), hvdp.callbacks.EvaluateCenter((inputs, inputs[:, :2]))]
            model.fit(inputs, inputs[:, :2], batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
            counters = optimizer.synchronizer.counters
            with optimizer.center():
                center = bits(model.weights)
            found = [counters.local_steps, counters.rounds, counters.skipped_updates, center, bits(model.weights)]
            results[f"{name}, {'known' if shape else 'built'}"] = found
    return results


def quadratic_step(optimizer: Any, w: Any, curvature: Any, zero: Any) -> Callable[[], Any]:
    return lambda: optimizer.apply_gradients([(curvature * tf.convert_to_tensor(w) + zero, w)])


def synchronizer_step(synchronizer: Any, w: Any, velocity: Any, curvature: Any, zero: Any) -> Callable[[], Any]:
    def step() -> None:
        (gradient,) = synchronizer.prepare_gradients([curvature * tf.convert_to_tensor(w) + zero])
        velocity.assign(MOMENTUM * velocity + gradient)
        w.assign_sub(oracle.RATE * velocity)
        synchronizer.step()

    return step


@scenario
def quadratics() -> Any:
    """The losses of the oracle, with momentum, by optimizer and by synchronizer; x and c at the end."""
    results = {}
    size = len(oracle.START)
    zero = np.array(oracle.gradient(hvd.rank(), [0.0] * size))
    curvature = np.array(oracle.gradient(hvd.rank(), [1.0] * size)) - zero
    rate = tf.constant(oracle.RATE, tf.float64)
    chosen = ("easgd_rho", "post_local", "agn", "diloco")
    others = repeated(*(name for name in OPTIMIZERS if name not in chosen))
    for name, loop in rotated((*chosen, *others), tuple(LOOPS)):
        w = keras.Variable(oracle.START, dtype="float64", name="w")
        optimizer = OPTIMIZERS[name](keras.optimizers.SGD(lambda: rate, momentum=MOMENTUM))
        optimizer.build([w])
        taken = LOOPS[loop](quadratic_step(optimizer, w, curvature, zero))
        for _ in range(oracle.STEPS):
            taken()
        results[f"{name} {loop}"] = (w.numpy().tolist(), read_center(optimizer, w))
    algorithms = {"easgd_rho": hvdp.EASGD(0.25, rho=0.5), "average": hvdp.Averaging()}
    for name, loop in rotated(tuple(algorithms), tuple(LOOPS)):
        w, velocity = (tf.Variable(value, dtype=tf.float64) for value in (oracle.START, [0.0] * size))
        synchronizer = hvdp.Synchronizer([w], algorithms[name], 2)
        taken = LOOPS[loop](synchronizer_step(synchronizer, w, velocity, curvature, zero))
        for _ in range(oracle.STEPS):
            taken()
        results[f"{name} synchronizer {loop}"] = (w.numpy().tolist(), read_center(synchronizer, w))
    return results


def network(dropout: float = 0.2) -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(20),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(2),
        ]
    )


def train_step(model: Any, optimizer: Any, compiled: bool = True) -> Callable[[Any], None]:
    def step(data: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(data, training=True) - data[:, :2]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(step) if compiled else step


def batches(seed: int, steps: int) -> list[Any]:
    generator = np.random.default_rng(100 * seed + hvd.rank())
    return [generator.standard_normal((8, 6)).astype("float32") for _ in range(steps)]


@scenario
def centers_and_buffers() -> Any:
    """Batch normalization, dropout and Adam, other data on each rank; bits after every exchange."""
    results = {}
    for name in ("agn", *repeated("post_local", "easgd_rho")):
        keras.utils.set_random_seed(hvd.rank())
        model = network()
        optimizer = OPTIMIZERS[name](keras.optimizers.Adam(0.01), model)
        start, rounds, seen = bits(model.weights), 0, []
        step = train_step(model, optimizer)
        for data in batches(0, 9):
            step(data)
            if optimizer.synchronizer.rounds > rounds:
                rounds = optimizer.synchronizer.rounds
                with optimizer.center():
                    seen.append(bits(model.weights))
                statistics = bits(model.non_trainable_weights)
        optimizer.synchronizer.audit()
        seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
        results[name] = {
            "start": start,
            "centers": seen,
            "statistics": statistics,
            "local": bits(model.trainable_weights),
            "seeds": bits(seeds),
        }
    return results


@scenario
def buffer_policies() -> Any:
    """Statistics that differ from rank to rank, averaged, local, and without the model; frozen weights start alike."""
    results = {}
    for policy in ("average", "local", "no model"):
        keras.utils.set_random_seed(hvd.rank())
        model = network()
        model.layers[0].trainable = False
        if policy == "no model":
            optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), None, 1)
            optimizer.build(model.trainable_variables)
        else:
            optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 1, buffers=policy)
        mean = next(v for v in model.weights if v.path.endswith("moving_mean"))
        mean.assign(np.full(20, float(hvd.rank())))
        optimizer.apply([tf.zeros_like(v) for v in model.trainable_variables])
        results[policy] = (float(mean.numpy()[0]), bits(model.layers[0].weights))
    return results


@scenario
def queues_of_features() -> Any:
    """Norms of unit vectors that each rank has pushed, and whether ranks have the same; by default, and the root's."""
    results = {}
    for name, policy in (("default", None), ("root's", {"*queue": "broadcast"})):
        keras.utils.set_random_seed(hvd.rank())
        model = network()
        model.queue = keras.Variable(np.ones((4, 2), "float32"), trainable=False, name="feature_queue")
        optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 2, buffers=policy)
        step = train_step(model, optimizer, compiled=False)
        for data in batches(0, 4):
            pushed = tf.math.l2_normalize(data[:2, :2], 1)
            model.queue.assign(tf.concat([pushed, model.queue.value[:-2]], 0))
            step(data)
        norms = np.linalg.norm(model.queue.numpy(), axis=1)
        results[name] = (float(np.abs(norms - 1).max()), bits([model.queue]))
    return results


@scenario
def small_buckets_equal_one() -> Any:
    """A variable that spans several buckets, in graphs and out of them."""
    values = [np.linspace(0, 1, 37) * (hvd.rank() + 1), np.array(2.0 + hvd.rank()), np.ones((2, 3)) * hvd.rank()]
    found = []
    for bucket_bytes in (24, 2**20):
        for compiled in LOOPS.values():
            variables = [tf.Variable(value, dtype=tf.float64) for value in values]
            named = NamedVariables([(f"v{i}", variable) for i, variable in enumerate(variables)])

            def new(name: str, shape: Any, dtype: Any, value: Any) -> Any:
                return tf.Variable(tf.fill(tuple(shape), tf.cast(value, dtype)))

            replica = VariableReplica(named, new, bucket_bytes=bucket_bytes)
            synchronizer = VariableSynchronizer(new, replica, hvdp.EASGD(0.3), hvdp.Every(1), communicator_of(None), 0)
            synchronizer.check_agreement()
            synchronizer.begin()
            step = compiled(synchronizer.step)
            for _ in range(3):
                variables[0].assign_add(tf.fill([37], 0.1 * (hvd.rank() + 1)).numpy().astype("float64"))
                step()
            found.append([len(replica.parameters.layout.buckets), bits(variables), bits(synchronizer.center_tensors())])
    return found


def save_and_go_on(name: str, way: str) -> bool:
    """Save in mid-period on every rank, go on; restore, go on: the same to the bit. Keras saves no seeds of dropout."""
    model = network(dropout=0.0)
    optimizer = OPTIMIZERS[name](keras.optimizers.Adam(0.01), model)
    model.compile(optimizer, loss="mse", jit_compile=False)
    step = train_step(model, optimizer)
    for data in batches(1, 5):
        step(data)
    with tempfile.TemporaryDirectory() as folder:
        if way == "keras":
            model.save(f"{folder}/model.keras")
        else:
            path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/checkpoint")
        for data in batches(2, 6):
            step(data)
        if way == "keras":
            other_model = keras.models.load_model(f"{folder}/model.keras")
            other = other_model.optimizer
            other.attach(other_model)
        else:
            other_model = network(dropout=0.0)
            other = OPTIMIZERS[name](keras.optimizers.Adam(0.01), other_model if way == "checkpoint" else None)
            if way == "checkpoint":
                tf.train.Checkpoint(model=other_model, optimizer=other).read(path)
            else:  # restored before it is built
                other.attach(other_model)
                status = tf.train.Checkpoint(model=other_model, optimizer=other).read(path)
                other.build(other_model.trainable_variables)
                status.expect_partial()
        step = train_step(other_model, other)
        for data in batches(2, 6):
            step(data)
    seconds = "exchange_seconds"
    mine, others = (
        {i: v for i, v in enumerate(o.variables) if seconds not in v.path} if hasattr(o.variables[0], "path") else {}
        for o in (optimizer, other)
    )
    with optimizer.center(), other.center():
        centers = bits(model.weights) == bits(other_model.weights)
    return bool(mine) and centers and bits(list(mine.values())) == bits(list(others.values()))


RESUMED = [
    ("easgd_rho", "keras"),
    ("agn", "keras"),
    ("post_local", "keras"),
    ("average", "checkpoint"),
    ("agn", "before it is built"),
]


@scenario
def resume() -> Any:
    return {f"{name} {way}": save_and_go_on(name, way) for name, way in RESUMED}


@scenario
def resume_of_a_synchronizer() -> Any:
    """``variables`` in a checkpoint, and ``state_dict``."""
    w = tf.Variable([0.0, 1.0])
    synchronizer = hvdp.Synchronizer([w], hvdp.EASGD(0.25, rho=0.5), 3)

    def train(w: Any, synchronizer: Any, steps: int) -> None:
        for _ in range(steps):
            (gradient,) = synchronizer.prepare_gradients([w - 1.0 - hvd.rank()])
            w.assign_sub(0.1 * gradient)
            synchronizer.step()

    train(w, synchronizer, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(w=w, exchange=synchronizer.variables).write(f"{folder}/checkpoint")
        state, value = synchronizer.state_dict(), w.numpy()
        train(w, synchronizer, 4)
        found = []
        for way in ("checkpoint", "state_dict"):
            other_w = tf.Variable([5.0, 5.0])
            other = hvdp.Synchronizer([other_w], hvdp.EASGD(0.25, rho=0.5), 3)
            if way == "checkpoint":
                tf.train.Checkpoint(w=other_w, exchange=other.variables).read(path)
            else:
                other.load_state_dict(state)
                other_w.assign(value)
            train(other_w, other, 4)
            found.append(bits([other_w, *other.center_tensors()]) == bits([w, *synchronizer.center_tensors()]))
    return found


@scenario
def restore_on_root_only() -> Any:
    """Only the root loads a checkpoint: all start from it."""
    w = scalar(0.0)
    optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0))
    optimizer.build([w])
    for _ in range(3):
        optimizer.apply([tf.constant([-1.0 - hvd.rank()], tf.float64)])
    expected = hvd.broadcast_object((w.numpy()[0], read_center(optimizer, w)[0]), 0, name="expected")
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(w=w, optimizer=optimizer).write(f"{folder}/checkpoint")
        again_w, again = scalar(0.0), OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0))
        if hvd.rank() == 0:
            tf.train.Checkpoint(w=again_w, optimizer=again).read(path)
        again.build([again_w])
    found = (again_w.numpy()[0], read_center(again, again_w)[0])
    return [bool(np.allclose(found, expected, rtol=0, atol=0)), again.synchronizer.local_steps]


def scaled_step(optimizer: Any, w: Any) -> Callable[[Any], Any]:
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.cast(optimizer.scale_loss(-tf.reduce_sum(tf.cast(w, tf.float32)) * factor), tf.float64)
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])

    return step


@scenario
def overflow_on_one_rank() -> Any:
    """The last rank overflows at step 2; counts and averages after four steps, eagerly and compiled."""
    results = []
    for compiled in LOOPS.values():
        w = scalar(0.0)
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        optimizer = OPTIMIZERS["average"](inner)
        optimizer.build([w])
        taken = compiled(scaled_step(optimizer, w))
        for i in range(1, 5):
            overflow = hvd.rank() == hvd.size() - 1 and i == 2
            taken(tf.constant(np.inf if overflow else 1.0))
        counters = optimizer.synchronizer.counters
        results.append([counters.local_steps, counters.rounds, counters.skipped_updates, float(w.numpy()[0])])
    return results


@scenario
def uneven_data() -> Any:
    """Ranks take 5, 8, ... steps, then finalize; or 0, 3, ..."""
    results = {}
    for fewest, name in ((5, "easgd"), (5, "agn"), (0, "average"), *repeated((5, "average"))):
        w = scalar(0.0)
        optimizer = OPTIMIZERS[name](keras.optimizers.SGD(1.0))
        optimizer.build([w])
        step = tf.function(constant_step(optimizer, w, -1.0))
        for _ in range(fewest + 3 * hvd.rank()):
            step()
        optimizer.synchronizer.finalize()
        results[f"{name} from {fewest}"] = (
            read_center(optimizer, w)[0],
            optimizer.synchronizer.counters.rounds,
            float(w.numpy()[0]),
        )
    return results


@scenario
def disagreements() -> Any:
    """Arguments and models that differ on the last rank only."""
    last = hvd.rank() == hvd.size() - 1

    def make(**options: Any) -> None:
        shape, dtype = options.pop("shape", [2]), options.pop("dtype", "float32")
        cls = options.pop("cls", hvdp.ElasticAverageOptimizer)
        period = options.pop("period", 2)
        optimizer = cls(keras.optimizers.SGD(0.1), None, period, **options)
        optimizer.build([keras.Variable(np.zeros(shape), dtype=dtype, name="w")])

    cases: dict[str, dict[str, Any]] = {
        "none": {},
        "period": {"period": 3},
        "rate": {"moving_rate": 0.05},
        "shape": {"shape": [3]},
        "dtype": {"dtype": "float64"},
        "algorithm": {"cls": hvdp.ModelAverageOptimizer},
        "refused": {"moving_rate": 7.0},
        "center": {"center": "nowhere"},
        "integer": {"dtype": "int32"},
    }
    return {name: attempt(lambda case=case: make(**(dict(case) if last else {}))) for name, case in cases.items()}


@scenario
def late_start() -> Any:
    """A first step without build(): errors, from equal and from different weights, and what a compiled one makes."""
    errors = []
    for start in (1.0, float(hvd.rank())):
        w = scalar(start)
        optimizer = OPTIMIZERS["average"](keras.optimizers.SGD(1.0))
        errors.append(attempt(lambda w=w, o=optimizer: o.apply_gradients([(tf.ones([1], tf.float64), w)])))
    w = scalar(float(hvd.rank()))
    optimizer = OPTIMIZERS["average"](keras.optimizers.SGD(1.0))
    tf.function(constant_step(optimizer, w, 1.0))()
    return [*errors, float(w.numpy()[0])]


@scenario
def different_steps() -> Any:
    """Every rank exchanges at a step of its own."""
    results = {}
    for loop, compiled in LOOPS.items():
        synchronizer = hvdp.Synchronizer([tf.Variable([0.0])], hvdp.Averaging(), 100)
        step, sync = compiled(synchronizer.step), compiled(synchronizer.sync)
        for _ in range(3 + hvd.rank()):
            step()
        results[loop] = attempt(sync, tf.errors.OpError)
    return results


@scenario
def different_loops() -> Any:
    """Only the last rank compiles its steps: x and c."""
    w = scalar(0.0)
    optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0))
    optimizer.build([w])
    step = constant_step(optimizer, w, -1.0 - 2.0 * hvd.rank())
    taken = tf.function(step) if hvd.rank() == hvd.size() - 1 else step
    trajectory = []
    for _ in range(6):
        taken()
        trajectory.append((float(w.numpy()[0]), read_center(optimizer, w)[0]))
    return trajectory


SCHEDULES: dict[str, Any] = {
    "piecewise": hvdp.Piecewise({0: 2, 5: 4}),
    "doubling": hvdp.Doubling(1, 2, 5),
    "qsr": hvdp.QSR(2, 0.2),
    "adacomm": hvdp.AdaComm(4, 1),
    "seconds": hvdp.Seconds(0.15),
}


class Exchanges(keras.callbacks.Callback):
    """Collects the steps of exchanges; on rank 0, which is slow, waits before each batch."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.waits = waits

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.waits:
            time.sleep(0.03 if hvd.rank() == 0 else 0.005)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        counters = self.model.optimizer.synchronizer.counters
        if counters.last_exchange == counters.local_steps:
            self.steps.append(counters.local_steps)


@keras.saving.register_keras_serializable("tests")
class Reporting(keras.Sequential):
    """A model whose steps report the target as the loss, in the loop that ``fit`` makes."""

    def train_step(self, data: Any) -> Any:
        self.optimizer.synchronizer.report(data[1][0, 0])
        return super().train_step(data)


def scheduled(schedule: Any, eager: bool = False) -> list[int]:
    """Exchange steps of 16 in ``fit``, resumed after 7; rates, losses and speeds differ between ranks."""
    model = Reporting([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.1 * (1 + hvd.rank()), 0.01 * (1 + hvd.rank())])
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(rate), model, schedule)
    model.compile(optimizer, loss="mse", run_eagerly=eager, jit_compile=False)
    losses = np.array([4.0] * 4 + [1.0] * 4 + [0.25] * 8)[:, None] * 2 * (1 + hvd.rank()) / (1 + hvd.size())
    callback = Exchanges(isinstance(schedule, hvdp.Seconds))

    def fit(begin: int, end: int) -> None:
        data = np.zeros((end - begin, 1)), losses[begin:end]
        model.fit(*data, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])

    fit(0, 7)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        model = keras.saving.load_model(f"{folder}/model.keras")
    model.optimizer.attach(model)
    fit(7, 16)
    return callback.steps


@scenario
def states_of_local_optimizers() -> Any:
    """Adam's moments after every step, averaged at every exchange or every second one; and begun anew."""
    results = {}
    policies = {"periods": {"momentum": 1, "velocity": 2}, "average": "average", "reset": "reset"}
    for case, loop in crossed(tuple(policies), tuple(LOOPS)):
        w, inner = scalar(1.0), keras.optimizers.Adam(0.1)
        optimizer = OPTIMIZERS["average"](inner, optimizer_state=policies[case])
        optimizer.build([w])
        step = LOOPS[loop](constant_step(optimizer, w, -1.0 - 2.0 * hvd.rank()))
        seen = []
        for _ in range(8):
            step()
            seen.append([inner._momentums[0].numpy().tolist(), inner._velocities[0].numpy().tolist()])
        results[f"{case}, {loop}"] = seen
    return results


@scenario
def schedules_of_the_clock() -> Any:
    found = {name: scheduled(schedule) for name, schedule in SCHEDULES.items()}
    return found | {"adacomm eager": scheduled(SCHEDULES["adacomm"], eager=True)}


class Breakable:
    """A schedule that fails when told to."""

    broken = False

    def __call__(self, clock: hvdp.Clock) -> int:
        if self.broken:
            raise KeyError("no such step")
        return 2

    def __repr__(self) -> str:
        return "Breakable()"


@scenario
def failures_on_the_last_rank() -> Any:
    """A schedule that fails, and another learning rate of the center: at the second step."""
    results = {}
    last = hvd.rank() == hvd.size() - 1
    cases = [("schedule", "eager"), ("schedule", "function"), ("rate", "function"), *repeated(("rate", "eager"))]
    for failure, loop in cases:
        w, schedule = scalar(0.0), Breakable()
        optimizer = hvdp.AGNOptimizer(keras.optimizers.SGD(0.5), None, schedule)
        optimizer.build([w])
        step = LOOPS[loop](constant_step(optimizer, w, -1.0))
        step()
        schedule.broken = last and failure == "schedule"
        optimizer.learning_rate = 0.25 if last and failure == "rate" else 0.5
        results[f"{failure} {loop}"] = attempt(step, tf.errors.OpError)
    return results


class Count(keras.layers.Layer):
    """Statistics of types that Horovod does not know, or that have no mean."""

    TYPES = ("bool", "int8", "uint32", "uint64", "int64")

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=())
        self.counts = [self.add_weight(shape=(2,), dtype=d, trainable=False, initializer="zeros") for d in self.TYPES]

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


@scenario
def statistics_of_integers() -> Any:
    """By type, after an exchange of [rank, 0]."""
    model = keras.Sequential([keras.Input((1,)), Count()])
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 1)
    for count in model.layers[0].counts:
        count.assign(tf.cast([hvd.rank(), 0], count.dtype))
    tf.function(lambda: optimizer.apply([tf.zeros([])], model.trainable_variables))()
    return {count.dtype: [int(value) for value in count.numpy()] for count in model.layers[0].counts}


@scenario
def process_set() -> Any:
    """Ranks 0 and the last exchange; one between them trains alone and is told that it is not in the set."""
    if not PROCESS_SETS:
        raise NotApplicableError("needs three ranks")
    chosen, w = PROCESS_SETS[0], scalar(float(hvd.rank()))
    if hvd.rank() not in (0, hvd.size() - 1):
        return attempt(lambda: OPTIMIZERS["average"](keras.optimizers.SGD(1.0), process_set=chosen))
    optimizer = OPTIMIZERS["average"](keras.optimizers.SGD(1.0), process_set=chosen, root_rank=hvd.size() - 1)
    optimizer.build([w])
    started = float(w.numpy()[0])
    step = tf.function(constant_step(optimizer, w, -1.0 - hvd.rank()))
    step()
    step()
    return [started, float(w.numpy()[0]), optimizer.get_config()["process_set"]]


@scenario
def contract() -> Any:
    check_communicator(communicator_of(None), tf.convert_to_tensor)
    return "kept"


@scenario
def torch_is_not_loaded() -> Any:
    return "torch" not in sys.modules


PROCESS_SETS: list[Any] = []

# Last: where a rank alone fails to adopt variables, Keras has numbered other variables than on the others.
scenario.include(keras_adoption.scenario)


def main(folder: Path) -> None:
    """Run all scenarios."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    before = attempt(lambda: OPTIMIZERS["average"](keras.optimizers.SGD(1.0)))
    size = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    if size > 2:
        PROCESS_SETS.append(hvd.ProcessSet([0, size - 1]))
    hvd.init(process_sets=PROCESS_SETS or None)
    scenario.run(folder, hvd.rank(), not_initialized=before, by_mpi=started_by_mpi())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
