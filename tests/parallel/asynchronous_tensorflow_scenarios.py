"""What every rank does in asynchronous exchange with the Keras optimizers and the synchronizer; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.asynchronous_tensorflow_scenarios FOLDER
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import read_run_log
from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from tests import bounded_oracle as bounded
from tests.delayed_oracle import followed
from tests.parallel import left_out_in_turn as in_turn_of
from tests.parallel.keras_scenarios import (
    LOOPS,
    OPTIMIZERS,
    Count,
    batches,
    bits,
    constant_step,
    network,
    read_center,
    scalar,
    scaled_step,
    train_step,
)
from tests.parallel.program import NotApplicableError, Scenarios, attempt, crossed, repeated, rotated
from tests.parallel.stopped_inside import pushes
from tests.parallel.tensorflow_job import hvd

MODES: dict[str, tuple[str, str]] = {
    "window": ("window", "replicated"),
    "service": ("service", "replicated"),
    "sharded": ("service", "sharded"),
}
"""What the environment variable says, and where the center lives."""

V = TypeVar("V")

scenario = Scenarios()
PROCESS_SETS: list[Any] = []
FOLDER: list[Path] = []

LOCAL: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.25),
    "momentum": lambda: keras.optimizers.SGD(0.125, momentum=0.5, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.125),
    "scheduled": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.125), initial_scale=8.0),
}


def on_all(*modes: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function of where the center lives; one rank alone has its center in its memory."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        def run() -> Any:
            results = {}
            for mode in modes[:1] if hvd.size() == 1 else modes:
                with patch.dict(os.environ, {VARIABLE: MODES[mode][0]}):
                    results[mode] = function(MODES[mode][1])
            return results

        run.__name__ = function.__name__
        scenario(run)
        return function

    return register


def place(center: str) -> int:
    """Return the number of the place where the center is now: other loops and algorithms are tested in every one."""
    return list(MODES.values()).index((os.environ[VARIABLE], center))


def loop_of(number: int) -> tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return one loop after the other."""
    return list(LOOPS.items())[number % len(LOOPS)]


def one_each(values: Sequence[V], first: int, center: str) -> list[tuple[int, V]]:
    """Return, with its number, one value for each place of the center; in thorough runs, all values in every place."""
    numbered = list(enumerate(values))
    number = (first + place(center)) % len(values)
    return [numbered[number], *repeated(*numbered[:number], *numbered[number + 1 :])]


def gather(value: Any) -> list[Any]:
    return list(hvd.allgather_object(value))


def barrier() -> None:
    """Wait for all ranks."""
    hvd.allreduce(tf.zeros([]), op=hvd.Sum, name="barrier")


def flat(variables: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(v.numpy(), np.float64).ravel() for v in variables])


def center_of(optimizer: Any, variables: list[Any]) -> np.ndarray:
    with optimizer.center():
        return flat(variables)


def quadratic(optimizer: Any, w: Any) -> Callable[[], None]:
    """Return a step on ½ ‖h w − 1 − rank‖², through the loss scale of the optimizer."""

    def step() -> None:
        with tf.GradientTape() as tape:
            error = tf.constant([1.0, 0.5], tf.float64) * tf.convert_to_tensor(w) - 1.0 - hvd.rank()
            loss = optimizer.scale_loss(0.5 * tf.reduce_sum(tf.square(error)))
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])

    return step


@scenario
def one_worker() -> Any:
    """Alone: x and c after each step, synchronously and not, of several local optimizers."""
    if hvd.size() > 1:
        raise NotApplicableError("needs one rank")
    results = {}
    cases = [("agn", "scheduled"), ("agn", "scaled"), ("easgd", "momentum")]
    cases += repeated(("agn", "adam"), ("agn", "sgd"), ("agn", "momentum"), ("easgd_rho", "scaled"))
    for i, (name, local) in enumerate(cases):
        loop, compiled = loop_of(i)
        trajectories = []
        for asynchronous in (False, True):
            w = keras.Variable([0.0, 1.0], dtype="float64", name="w")
            optimizer = OPTIMIZERS[name](LOCAL[local](), asynchronous=asynchronous)
            optimizer.build([w])
            step = compiled(quadratic(optimizer, w))
            trajectory: list[list[float]] = []
            for _ in range(9):
                step()
                trajectory.append([*w.numpy().tolist(), *read_center(optimizer, w)])
            optimizer.synchronizer.finalize()
            trajectory.append([*w.numpy().tolist(), *read_center(optimizer, w)])
            trajectories.append(trajectory)
        results[f"{name} {local} {loop}"] = trajectories
    return results


class Record(keras.callbacks.Callback):
    """Keeps x and c after each batch."""

    def __init__(self, optimizer: Any, weight: Any) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []
        self._optimizer, self._weight = optimizer, weight

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((float(self._weight.numpy()[0, 0]), read_center(self._optimizer, self._weight)[0]))


@scenario
def one_worker_in_fit() -> Any:
    """Gradient −1 through ``model.fit``, in one and in several steps per execution, and in the other loops."""
    if hvd.size() > 1:
        raise NotApplicableError("needs one rank")
    data = tf.data.Dataset.from_tensors((tf.fill([1, 1], -1.0), tf.zeros([1, 1]))).repeat(8)
    results: dict[str, Any] = {}
    for name in ("easgd", "agn"):
        rate = 0.1 if name == "agn" else 1.0
        for steps in (1, 4) if name == "easgd" else (1, *repeated(4)):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model.set_weights([np.zeros((1, 1))])
            optimizer = OPTIMIZERS[name](keras.optimizers.SGD(rate), model, asynchronous=True)
            record = Record(optimizer, model.weights[0])
            model.compile(
                optimizer, loss=lambda y, output: tf.reduce_sum(output), steps_per_execution=steps, jit_compile=False
            )
            model.fit(data, shuffle=False, verbose=0, callbacks=[record])
            results[f"{name} {steps}"] = record.seen
        for loop in ("function", *repeated("eager")) if name == "easgd" else ("eager", *repeated("function")):
            w = scalar(0.0)
            optimizer = OPTIMIZERS[name](keras.optimizers.SGD(rate), asynchronous=True)
            optimizer.build([w])
            step, seen = LOOPS[loop](constant_step(optimizer, w, -1.0)), []
            for _ in range(8):
                step()
                seen.append((float(w.numpy()[0]), read_center(optimizer, w)[0]))
            results[f"{name} {loop}"] = seen
    return results


def turns(count: int) -> list[int]:
    """An order of the ranks; some come several times in a row."""
    generator = random.Random(3)
    return [*range(hvd.size()), *(generator.randrange(hvd.size()) for _ in range(count - hvd.size()))]


@on_all("window", "service", "sharded")
def in_turn(center: str) -> Any:
    """A period and an exchange of one rank at a time, gradient −1 − 2 rank: x, c and counters."""
    results = {}
    for i, (name, period) in one_each((("easgd", 2), ("easgd_default", 2), ("agn", 4)), 1, center):
        loop, compiled = loop_of(i + place(center))
        w = keras.Variable([0.0, 0.0, 0.0], dtype="float64", name="w")
        rate = tf.constant(0.1 if name == "agn" else 1.0, tf.float64)
        optimizer = OPTIMIZERS[name](keras.optimizers.SGD(lambda rate=rate: rate), asynchronous=True, center=center)
        optimizer.build([w])
        barrier()
        step = compiled(vector_step(optimizer, w))
        order, seen = turns(7), []
        first = True
        for turn in order:
            for _ in range(period):
                if first or turn == hvd.rank():  # All ranks take the first step together.
                    step()
                first = False
            barrier()
            seen.append([w.numpy().tolist(), read_center(optimizer, w)])
            barrier()
        counters = optimizer.synchronizer.counters
        barrier()
        optimizer.synchronizer.finalize()
        results[name] = {
            "loop": loop,
            "order": order,
            "seen": seen,
            "rounds": counters.rounds,
            "missed": counters.pushes_missed,
            "staleness": counters.staleness_max,
            "final": read_center(optimizer, w),
        }
    return results


@on_all("window", "service", "sharded")
def bounded_in_turn(center: str) -> Any:
    """Messages are cut to a norm, over variables and shards: x and c after every turn, and the norms in the run log."""
    results: dict[str, Any] = {}
    for i, name in one_each(("easgd", "diloco", "agn, average", "easgd_rho"), 0, center):
        _, compiled = loop_of(i + place(center))
        start, folder = np.array(bounded.START), FOLDER[0] / f"bounded {place(center)} {name}"
        variables = [keras.Variable(part, dtype="float64") for part in np.split(start, [bounded.OF_FIRST])]
        optimizer = hvdp.PeriodicOptimizer(
            *(keras.optimizers.SGD(bounded.RATE), None, bounded.ALGORITHMS[name], bounded.PERIOD),
            **{"asynchronous": True, "center": center, "max_message_norm": bounded.bound_of(name), "run_log": folder},
        )
        optimizer.build(variables)
        optimizer.synchronizer.begin()
        step = compiled(step_of_two(optimizer, variables))

        def train(own_turn: int, step: Any = step, variables: Any = variables) -> None:
            for _ in range(bounded.PERIOD):
                g = bounded.gradient(hvd.rank(), flat(variables).tolist())
                step(*(tf.constant(part) for part in np.split(np.array(g), [bounded.OF_FIRST])))

        def look(optimizer: Any = optimizer, variables: Any = variables) -> Any:
            x = flat(variables).tolist()
            with optimizer.center():
                return x, flat(variables).tolist()

        order = turns(9)
        seen = followed(order, hvd.rank(), train, look, barrier)
        optimizer.synchronizer.finalize()
        lines = read_run_log(folder)[hvd.rank()]
        results[name] = [order, seen, [line["message_norm"] for line in lines if line["event"] == "exchanged"]]
    return results


@on_all("window", "service", "sharded")
def left_out_in_turn(center: str) -> Any:
    """The last rank's third gradient is NaN: it starts again from the center; compiled and not."""
    results: dict[str, Any] = {}
    for name, loop in crossed(tuple(in_turn_of.ALGORITHMS), ("eager", "function")):
        w = keras.Variable([0.0, 0.0, 0.0], dtype="float64", name="w")
        inner = keras.optimizers.SGD(in_turn_of.RATE, momentum=in_turn_of.MOMENTUM)
        optimizer = LEFT_OUT[name](inner, asynchronous=True, center=center, nonfinite="skip")
        optimizer.build([w])
        step = LOOPS[loop](given_step(optimizer, w))
        seen = in_turn_of.taken(
            lambda g, step=step: step(tf.constant(g, tf.float64)),
            lambda w=w, optimizer=optimizer: (w.numpy().tolist(), read_center(optimizer, w)),
            (hvd.rank(), hvd.size()),
            barrier,
        )
        counters = optimizer.synchronizer.counters
        barrier()
        optimizer.synchronizer.finalize()
        results[f"{name} {loop}"] = [seen, counters.rounds, counters.left_out, counters.bytes_sent]
    return results


LEFT_OUT: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, **k: hvdp.ElasticAverageOptimizer(o, None, in_turn_of.PERIOD, in_turn_of.MOVING_RATE, **k),
    "easgd_rho": lambda o, **k: hvdp.ElasticAverageOptimizer(
        o, None, in_turn_of.PERIOD, in_turn_of.MOVING_RATE, rho=in_turn_of.RHO, **k
    ),
    "agn": lambda o, **k: hvdp.AGNOptimizer(o, None, in_turn_of.PERIOD, **k),
}


def given_step(optimizer: Any, w: Any) -> Callable[[Any], None]:
    return lambda gradient: optimizer.apply_gradients([(tf.fill([3], gradient), w)])


def vector_step(optimizer: Any, w: Any) -> Callable[[], None]:
    return lambda: optimizer.apply_gradients([(tf.fill([3], tf.constant(-1.0 - 2 * hvd.rank(), tf.float64)), w)])


def applied(optimizer: Any, gradients: list[Any], variables: list[Any]) -> Callable[[], None]:
    return lambda: optimizer.apply(gradients, variables)


def step_of_two(optimizer: Any, variables: list[Any]) -> Callable[[Any, Any], None]:
    return lambda one, other: optimizer.apply([one, other], variables)


class OwnPeriod:
    """A schedule that is the same on all ranks until they agree."""

    period = 2

    def __call__(self, clock: hvdp.Clock) -> int:
        return self.period

    def __repr__(self) -> str:
        return "OwnPeriod()"


@on_all("window", "service", "sharded")
def conservation(center: str) -> Any:
    """Ranks at their own pace: the sum of all replicas and the center, and how far the center went."""
    loop, compiled = loop_of(place(center))
    shapes = [(3, 2), (), (7,), (0,), (2, 1, 2)]
    variables = [keras.Variable(np.ones(shape), dtype="float64", name=f"w{i}") for i, shape in enumerate(shapes)]
    schedule, generator = OwnPeriod(), random.Random(hvd.rank())
    optimizer = hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(0.0), None, schedule, moving_rate=0.3, asynchronous=True, center=center
    )
    optimizer.build(variables)
    gradients = [tf.ones(shape, tf.float64) for shape in shapes]
    step = compiled(applied(optimizer, gradients, variables))
    step()
    schedule.period = 1 + hvd.rank()
    random_values = np.random.default_rng(hvd.rank())
    for variable in variables:
        variable.assign(random_values.standard_normal(variable.shape))
    total = sum(gather(flat(variables))) + 1.0
    for _ in range(20 + 9 * hvd.rank()):
        time.sleep(generator.choice([0, 0, 1e-3, 4e-3]))
        step()
    optimizer.synchronizer.finalize()
    center_found = center_of(optimizer, variables)
    error = np.abs(sum(gather(flat(variables))) + center_found - total)
    return {loop: [float(error.max()), float(np.abs(center_found - 1.0).max())]}


STEPS = {0: (3, 0, 1), 1: (0, 5, 0), 2: (9, 1, 0)}
"""Of each rank, in three epochs, in periods of 2."""


@on_all("window", "service", "sharded")
def uneven_data(center: str) -> Any:
    """Ranks with more, fewer and no steps; center and counters after each epoch."""
    results = {}
    wraps = {
        "easgd": OPTIMIZERS["easgd"],
        "easgd_rho": OPTIMIZERS["easgd_rho"],
        "agn": lambda o, m=None, **k: hvdp.AGNOptimizer(o, m, 2, **k),
    }
    for i, (name, wrap) in one_each(list(wraps.items()), 2, center):
        loop, compiled = loop_of(i + place(center))
        w = scalar(float(hvd.rank()))
        path = None if center == "sharded" else hvd.broadcast_object(str(Path(tempfile.mkdtemp()) / "center"))
        optimizer = wrap(keras.optimizers.SGD(0.5, momentum=0.5), asynchronous=True, center=center, center_file=path)
        optimizer.build([w])
        step = compiled(constant_step(optimizer, w, -1.0 - 2.0 * hvd.rank()))
        centers = []
        for steps in STEPS[hvd.rank()]:
            for _ in range(steps):
                time.sleep(0.01 * (hvd.rank() == 2))
                step()
            optimizer.synchronizer.finalize()
            centers.append(read_center(optimizer, w)[0])
            optimizer.synchronizer.finalize()
            centers.append(read_center(optimizer, w)[0])
            barrier()  # The next epoch moves the center.
        counters = optimizer.synchronizer.counters
        results[f"{name} {loop}"] = {
            "centers": centers,
            "steps": counters.local_steps,
            "rounds": counters.rounds,
            "missed": counters.pushes_missed,
            "staleness": counters.staleness_max,
            "mean": counters.staleness_mean,
            "x": float(w.numpy()[0]),
            "in the file": centers[-1] if path is None else float(load_file(path)[w.path][0]),
        }
        barrier()  # All have read it.
    return results


RESUMED: dict[str, Callable[..., Any]] = {
    "easgd_rho": lambda m: OPTIMIZERS["easgd_rho"](keras.optimizers.Adam(0.01), m, asynchronous=True),
    "agn": lambda m: OPTIMIZERS["agn"](keras.optimizers.Adam(0.01), m, asynchronous=True),
    "agn of its own": lambda m: hvdp.AGNOptimizer(
        keras.optimizers.SGD(0.01), m, 3, keras.optimizers.Adam(0.02), asynchronous=True
    ),
}


def take_turns(step: Callable[[Any], None], seed: int, steps: int) -> None:
    """Let one rank after the other train."""
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            for data in batches(seed, steps):
                step(data)
        barrier()


def optimizer_state(synchronizer: Any) -> list[Any]:
    state = synchronizer.state_dict()["center_optimizer"]
    return [] if state is None else [np.asarray(value).tolist() for value in state]


def all_bits(model: Any, optimizer: Any) -> list[Any]:
    with optimizer.center():
        center = bits(model.weights)
    return [center, bits(model.trainable_weights), optimizer_state(optimizer.synchronizer)]


@on_all("window", "service")
def resume(center: str) -> Any:
    """A model per rank, saved in mid-period or at the end; loaded, it goes on like the other, one rank at a time."""
    results: dict[str, Any] = {}
    for name in ("easgd_rho", *repeated("agn")) if place(center) == 0 else ("agn of its own",):
        wrap, finalized, compiled = RESUMED[name], name == "agn", place(center) == 0
        keras.utils.set_random_seed(hvd.rank())
        model = network(dropout=0.0)
        optimizer = wrap(model)
        model.compile(optimizer, loss="mse", jit_compile=False)
        step = train_step(model, optimizer, compiled)
        step(batches(0, 1)[0])
        barrier()
        take_turns(step, 1, 6 + hvd.rank())
        if finalized:
            optimizer.synchronizer.finalize()
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            before = all_bits(model, optimizer)
            barrier()
            other_model = keras.models.load_model(f"{folder}/model.keras")
        other = other_model.optimizer
        other.attach(other_model)
        other.start()
        found = {"restored": before == all_bits(other_model, other)}
        other.synchronizer.on_arrival()  # The first step would do it, and all ranks together.
        for taken in (step, train_step(other_model, other, compiled)):
            take_turns(taken, 2, 7)
        found["went on"] = all_bits(model, optimizer) == all_bits(other_model, other)
        found["counted"] = other.synchronizer.counters.rounds == optimizer.synchronizer.counters.rounds
        found["finite"] = bool(np.isfinite(flat(other_model.weights)).all())
        barrier()  # The end moves the center.
        other.synchronizer.finalize()
        optimizer.synchronizer.finalize()
        with other.center():
            found["one center"] = len(set(gather(bits(other_model.weights)))) == 1
        results[name] = found
    return results


@on_all("window", "service")
def resume_where_the_root_had_no_data(center: str) -> Any:
    """Only ranks other than the root have trained; what a new job starts from."""
    w = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), w])
    optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0), model, asynchronous=True)
    model.compile(optimizer, loss="mse", jit_compile=False)
    model.set_weights([np.zeros((1, 1))])
    optimizer.synchronizer.broadcast()
    steps = 4 if hvd.rank() or hvd.size() == 1 else 0
    for _ in range(steps):
        optimizer.apply([tf.fill([1, 1], -1.0)])
    optimizer.synchronizer.finalize()
    before = [float(center_of(optimizer, [w.kernel])[0]), float(w.kernel.numpy()[0, 0])]
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        other = keras.models.load_model(f"{folder}/model.keras")
    other.optimizer.attach(other)
    other.optimizer.start()
    kernel = other.layers[-1].kernel
    after = [float(center_of(other.optimizer, [kernel])[0]), float(kernel.numpy()[0, 0])]
    return {"before": before, "after": after}


@on_all("window")
def loaded_and_saved_without_training(center: str) -> Any:
    """A loaded model that is evaluated and saved again: the center is still there."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0), model, asynchronous=True)
    model.compile(optimizer, loss="mse", jit_compile=False)
    for _ in range(4):
        optimizer.apply([tf.fill([1, 1], -1.0 - hvd.rank())])
    optimizer.synchronizer.finalize()
    expected = float(center_of(optimizer, model.weights)[0])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
        loaded.save(f"{folder}/again.keras")
        loaded.optimizer.attach(loaded)
        loaded.save(f"{folder}/attached.keras")

        def evaluate() -> None:
            results["center"] = float(center_of(loaded.optimizer, loaded.weights)[0])

        results["read"] = attempt(evaluate)
        for name in ("again", "attached"):
            other = keras.models.load_model(f"{folder}/{name}.keras")
            other.optimizer.attach(other)
            other.optimizer.start()
            results[name] = float(center_of(other.optimizer, other.weights)[0])
    return results | {"expected": expected}


@on_all("window", "sharded")
def resume_of_a_synchronizer(center: str) -> Any:
    """``state_dict`` of every rank in a new synchronizer; both go on, one rank after the other."""
    results = {}
    algorithms: dict[str, Any] = {"easgd": hvdp.EASGD(0.25, rho=0.5), "agn": hvdp.AGN()}
    for name, algorithm in algorithms.items():

        def make(name: str = name, algorithm: Any = algorithm) -> tuple[Any, Any]:
            w = tf.Variable([0.0, 1.0, 2.0])
            options = {"outer_optimizer": keras.optimizers.Adam(0.1)} if name == "agn" else {}
            return w, hvdp.Synchronizer([w], algorithm, 3, asynchronous=True, center=center, **options)

        def train(w: Any, synchronizer: Any, steps: int) -> None:
            @tf.function
            def step() -> None:
                (gradient,) = synchronizer.prepare_gradients([w - 1.0 - hvd.rank()])
                w.assign_sub(0.1 * gradient)
                synchronizer.step()

            synchronizer.begin()
            for rank in range(hvd.size()):
                if rank == hvd.rank():
                    for _ in range(steps):
                        step()
                barrier()

        w, synchronizer = make()
        train(w, synchronizer, 4 + hvd.rank())
        state, value = synchronizer.state_dict(), w.numpy()
        barrier()
        train(w, synchronizer, 5)
        other_w, other = make()
        other.load_state_dict(state)
        other_w.assign(value)
        read = (
            center_of(other, [other_w]).tolist() == state["vectors"]["parameters"]["center"][first_name(other)].tolist()
        )
        barrier()
        train(other_w, other, 5)
        same = [
            other_w.numpy().tolist() == w.numpy().tolist(),
            center_of(other, [other_w]).tolist() == center_of(synchronizer, [w]).tolist(),
            str(other.state_dict()["center_optimizer"]) == str(synchronizer.state_dict()["center_optimizer"]),
        ]
        barrier()
        results[name] = [read, *same]
    return results


def first_name(synchronizer: Any) -> str:
    return str(synchronizer.tensor_groups.parameters.values.layout.specs[0].name)


@on_all("window")
def callbacks(center: str) -> Any:
    """All callbacks under ``fit`` with more batches on higher ranks: history, the saved model, final centers."""
    results = {}
    inputs = np.concatenate(batches(7, 3 + 2 * hvd.rank()))
    images, targets = np.ones((8, 6), "float32"), np.zeros((8, 2), "float32")
    for name in ("easgd_rho",):
        keras.utils.set_random_seed(hvd.rank())
        model = network()
        optimizer = OPTIMIZERS[name](keras.optimizers.Adam(0.05), model, asynchronous=True)
        model.compile(optimizer, loss="mse", metrics=["mae"], jit_compile=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "best.keras"
            history = model.fit(
                inputs,
                inputs[:, :2],
                batch_size=8,
                epochs=3,
                verbose=0,
                callbacks=[
                    hvdp.callbacks.EvaluateCenter((images, targets)),
                    hvdp.callbacks.ReportExchanges(),
                    hvdp.callbacks.SaveBestCenter(path),
                    hvdp.callbacks.FinalizeAtEnd(),
                ],
            ).history
            saved = path.exists()
            if saved:
                loss = keras.models.load_model(path).evaluate(images, targets, verbose=0, return_dict=True)["loss"]
                best = float(loss) == min(history["val_center_loss"])
        with optimizer.center():
            final = bits(model.weights)
        results[name] = {
            "keys": sorted(history),
            "rounds": history["rounds"],
            "steps": optimizer.synchronizer.local_steps,
            "saved": saved,
            "best": best if saved else None,
            "finite": bool(np.isfinite([value for values in history.values() for value in values]).all()),
            "final": final,
            "local": bits(model.trainable_weights),
        }
    return results


@on_all("window", "service")
def overflow_on_one_rank(center: str) -> Any:
    """The last rank overflows at step 2 of 4, one rank at a time: counters, x and c."""
    results: dict[str, Any] = {}
    for i, name in enumerate(("easgd", "agn")):
        _, compiled = loop_of(i + place(center))
        w = scalar(0.0)
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        optimizer = OPTIMIZERS[name](inner, asynchronous=True)
        optimizer.build([w])
        taken = compiled(scaled_step(optimizer, w))
        taken(tf.constant(1.0))
        for rank in range(hvd.size()):
            barrier()
            for step in range(2, 5) if rank == hvd.rank() else []:
                overflow = hvd.rank() == hvd.size() - 1 and step == 2
                taken(tf.constant(np.inf if overflow else 1.0))
        optimizer.synchronizer.finalize()
        counters = optimizer.synchronizer.counters
        results[name] = [
            [counters.local_steps, counters.rounds, counters.skipped_updates],
            float(w.numpy()[0]),
            read_center(optimizer, w)[0],
        ]
    return results


def embedding_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(11, 3),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )


def sparse_step(model: Any, optimizer: Any) -> Callable[[Any], None]:
    def step(data: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(data, training=True) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


@on_all("window", "sharded")
def embeddings_and_statistics(center: str) -> Any:
    """Sparse gradients, and batch normalization; bits of the final center, and on one worker how far from a
    synchronous run.
    """
    results, names = {}, ("easgd", "easgd_rho", "agn")
    for name in ("agn", *repeated("easgd", "easgd_rho")) if hvd.size() == 1 else names[place(center) :][:1]:
        finals = []
        for asynchronous in (True, False) if hvd.size() == 1 else (True,):
            keras.utils.set_random_seed(1 + hvd.rank())
            model = embedding_model()
            more = {"center": center, "asynchronous": True} if asynchronous else {}
            inner = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5))
            optimizer = OPTIMIZERS[name](inner, model, **more)
            generator = np.random.default_rng(hvd.rank())
            step = tf.function(sparse_step(model, optimizer))
            for _ in range(5 + 4 * hvd.rank()):
                step(tf.constant(generator.integers(0, 11, (8, 4)), tf.int32))
            optimizer.synchronizer.finalize()
            statistics = [v for v in model.weights if "moving" in v.path]
            local = flat(statistics)
            with optimizer.center():
                finals.append(flat(model.weights))
                results[name] = {
                    "center": bits(model.weights),
                    "statistics moved": bool((np.abs(flat(statistics)) > 0).all()),
                    "finite": bool(np.isfinite(finals[0]).all()),
                    "own statistics": bits([tf.constant(local)]),
                }
        if hvd.size() == 1:
            results[name]["from synchronous"] = float(np.abs(finals[0] - finals[1]).max())
    return results


@on_all("window", "sharded")
def kinds_of_variables(center: str) -> Any:
    """Half precision, and statistics of integers; centers of two ranks that follow each other."""
    results: dict[str, Any] = {}
    for dtype, name in rotated(("float16", "bfloat16"), ("easgd", "agn")):
        variables = [
            keras.Variable(np.full(5, float(hvd.rank())), dtype=dtype, name="w"),
            keras.Variable(np.zeros((2, 2)), dtype="float32", name="v"),
        ]
        optimizer = OPTIMIZERS[name](keras.optimizers.SGD(1.0), asynchronous=True, center=center)
        optimizer.build(variables)
        gradients = [-tf.ones(v.shape, v.dtype) for v in variables]
        step = tf.function(applied(optimizer, gradients, variables))
        for _ in range(8):
            step()
        optimizer.synchronizer.finalize()
        with optimizer.center():
            results[f"{name} {dtype}"] = [bits(variables), float(np.asarray(variables[0].numpy())[0])]
    model = keras.Sequential([keras.Input((1,)), Count()])
    optimizer = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), model, 1, asynchronous=True, center=center)
    step = tf.function(applied(optimizer, [tf.zeros([])], model.trainable_variables))
    step()
    barrier()
    for count in model.layers[0].counts:
        count.assign(tf.cast([hvd.rank(), 0], count.dtype))
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            step()
        barrier()
    optimizer.synchronizer.finalize()
    results["own counts"] = {c.dtype: [int(value) for value in c.numpy()] for c in model.layers[0].counts}
    with optimizer.center():
        results["counts"] = {c.dtype: [int(value) for value in c.numpy()] for c in model.layers[0].counts}
    return results


@on_all("window", "service")
def adopted_in_fit(center: str) -> Any:
    """A backbone that is thawed after finalize(), and the model compiled again; bits of the final center."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, trainable=False), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.01, momentum=0.5)
    optimizer = hvdp.ElasticAverageOptimizer(inner, model, 2, asynchronous=True, center=center)
    x = np.random.default_rng(hvd.rank()).normal(size=(10, 3))

    def fit() -> None:
        model.fit(x, x.sum(axis=1) * hvd.rank() + 1, batch_size=2, verbose=0, shuffle=False)

    model.compile(optimizer, loss="mse", jit_compile=False)
    fit()
    early = attempt(optimizer.adopt)
    optimizer.finalize()
    model.layers[0].trainable = True
    optimizer.adopt()
    came = bits(model.layers[0].weights)
    model.compile(optimizer, loss="mse", jit_compile=False)
    fit()
    optimizer.finalize()
    with optimizer.center():
        return [early, came, bits(model.layers[0].weights), bits(model.layers[1].weights)]


@on_all("window")
def several(center: str) -> Any:
    """Two optimizers at once, one of a root of its own, one of a process set; a rank that compiles and one that does
    not.
    """
    last = hvd.size() - 1
    first, second = scalar(float(hvd.rank())), scalar(float(hvd.rank()))
    a = OPTIMIZERS["easgd"](keras.optimizers.SGD(0.5), asynchronous=True, root_rank=last)
    b = OPTIMIZERS["agn"](keras.optimizers.SGD(0.5), asynchronous=True)
    a.build([first])
    b.build([second])
    started = [float(first.numpy()[0]), float(second.numpy()[0])]
    steps = [constant_step(a, first, -1.0), constant_step(b, second, -1.0 - hvd.rank())]
    steps = [tf.function(step) for step in steps] if hvd.rank() == last else steps
    for _ in range(6 + hvd.rank()):
        for step in steps:
            step()
    b.synchronizer.finalize()
    a.synchronizer.finalize()
    results: dict[str, Any] = {"started": started, "centers": [read_center(a, first)[0], read_center(b, second)[0]]}
    if PROCESS_SETS and hvd.rank() in (0, 2):
        w = scalar(float(hvd.rank()))
        optimizer = OPTIMIZERS["easgd"](
            keras.optimizers.SGD(0.5), process_set=PROCESS_SETS[0], asynchronous=True, root_rank=last
        )
        optimizer.build([w])
        step = tf.function(constant_step(optimizer, w, -1.0))
        for _ in range(3 + hvd.rank()):
            step()
        optimizer.synchronizer.finalize()
        results["set"] = read_center(optimizer, w)[0]
    return results


@on_all("window")
def first_calls(center: str) -> Any:
    """A first step without build(); weights loaded after it; sync() at steps of its own."""
    errors = []
    for start in (1.0, float(hvd.rank())):
        w = scalar(start)
        optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(1.0), asynchronous=True)
        errors.append(attempt(lambda w=w, o=optimizer: o.apply_gradients([(tf.ones([1], tf.float64), w)])))
    w = scalar(0.0)
    optimizer = OPTIMIZERS["easgd"](keras.optimizers.SGD(0.0), asynchronous=True)
    optimizer.build([w])
    w.assign([5.0 + hvd.rank()])
    step = tf.function(constant_step(optimizer, w, 1.0))
    step()
    loaded = [float(w.numpy()[0]), read_center(optimizer, w)[0]]
    synchronizer = optimizer.synchronizer
    sync = tf.function(synchronizer.sync)
    for _ in range(1 + hvd.rank()):
        step()
        sync()
    synchronizer.finalize()
    rounds = [synchronizer.counters.rounds, synchronizer.counters.local_steps]
    return {"errors": errors, "loaded": loaded, "rounds": rounds, "distance": synchronizer.distance()}


def disagree(last: dict[str, Any], others: dict[str, Any] | None = None) -> str:
    """Build an optimizer, on the last rank from other arguments; return the error."""

    def make() -> None:
        options = dict(last if hvd.rank() == hvd.size() - 1 else others or {"asynchronous": True})
        with patch.dict(os.environ, {VARIABLE: options.pop("transport", "")}):
            cls = options.pop("cls", hvdp.ElasticAverageOptimizer)
            optimizer = cls(keras.optimizers.SGD(0.1), None, 2, **options)
            optimizer.build([keras.Variable(np.zeros(2), name="w")])

    return attempt(make)


@scenario
def stopped_inside() -> Any:
    """The last rank is stopped in a step of the optimizer of the center, in the window; see ``stopped_inside.py``."""
    if hvd.size() == 1:
        raise NotApplicableError("needs several ranks")
    w = keras.Variable(np.zeros(9), dtype="float64", name="w")
    with patch.dict(os.environ, {VARIABLE: "window"}):
        outer = keras.optimizers.SGD(0.25, momentum=0.5)
        optimizer = hvdp.AGNOptimizer(keras.optimizers.SGD(0.0), None, 1, outer_optimizer=outer, asynchronous=True)
        optimizer.build([w])
        optimizer.synchronizer.begin()

    def push(numbers: list[float]) -> list[float]:
        optimizer.apply([tf.constant(numbers, tf.float64)], [w])
        return list(w.numpy().tolist())

    worker, transport = (hvd.rank(), hvd.size()), optimizer.synchronizer.exchanger.worker.transport
    seen, replaced = pushes(worker, barrier, f"{FOLDER[0]}/stopped", transport, 1, push, (CenterOptimizer, "step_host"))
    optimizer.synchronizer.finalize()
    return [seen, read_center(optimizer, w), replaced, optimizer.synchronizer.counters.staleness_max]


@scenario
def refusals() -> Any:
    """Arguments that make no sense, on the last rank or on all."""
    both = {"asynchronous": True}
    power = {"cls": hvdp.ElasticAverageOptimizer, "staleness_power": 0.5, **both}

    def moved(o: Any, m: Any, p: int, **k: Any) -> Any:
        return hvdp.PeriodicOptimizer(o, m, hvdp.DiLoCo(), p, outer_optimizer=keras.optimizers.SGD(1.0), **k)

    cases: dict[str, list[Any]] = {
        "none": [both],
        "rate": [{"moving_rate": 1.5, **both}],
        "largest rate": [{"moving_rate": 1.0, **both}] * 2,
        "beta": [{"beta": hvd.size() + 0.5, **both}] * 2,
        "synchronous": [{"asynchronous": False}],
        "power": [power] * 2,
        "outer optimizer": [{"cls": moved, **both}] * 2,
        "transport": [{"transport": "service", **both}],
        "unknown transport": [{"transport": "pigeon", **both}],
        "center": [{"center": "nowhere", **both}],
        "sharded": [{"center": "sharded", **both}],
    }
    return {name: disagree(*case) for name, case in cases.items()}


def main(folder: Path) -> None:
    """Run all scenarios."""
    FOLDER.append(folder)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 2:
        PROCESS_SETS.append(hvd.ProcessSet([0, 2]))
    hvd.init(process_sets=PROCESS_SETS or None)
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
