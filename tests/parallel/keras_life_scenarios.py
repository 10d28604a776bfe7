"""What every rank does with whole Keras models, as their users train them; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.keras_life_scenarios FOLDER
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
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from tests.parallel.keras_scenarios import bits
from tests.parallel.placement_scenarios import compare
from tests.parallel.program import Scenarios, attempt

scenario = Scenarios(graphs_as_built=False)

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "easgd": lambda model, **k: hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.5), model, 2, moving_rate=0.2, rho=0.1, **k
    ),
    "average": lambda model, **k: hvdp.ModelAverageOptimizer(keras.optimizers.Adam(0.01), model, 2, **k),
    "agn": lambda model, **k: hvdp.AGNOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), model, 2, **k),
}
PLACES = ("replicated", "root", "sharded")
WORDS, LENGTH, STEPS = 11, 4, 5


def network(constraint: Any = None) -> Any:
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(5, use_bias=False, kernel_constraint=constraint),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.ReLU(),
            keras.layers.Dense(1),  # its bias has fewer elements than there are ranks
        ]
    )


def batches(steps: int = STEPS) -> Any:
    """Return other data on every rank."""
    generator = np.random.default_rng(hvd.rank())
    words = generator.integers(0, WORDS, (4 * steps, LENGTH))
    targets = generator.standard_normal((4 * steps, 1)).astype("float32") + hvd.rank()
    return tf.data.Dataset.from_tensor_slices((words, targets)).batch(4)


def train_by_fit(model: Any, optimizer: Any, data: Any) -> None:
    model.compile(optimizer, loss="mse", jit_compile=False)
    model.fit(data, shuffle=False, verbose=0, callbacks=[hvdp.callbacks.FinalizeAtEnd()])


def train_by_tape(model: Any, optimizer: Any, data: Any, compiled: bool = True) -> None:
    def step(words: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(words, training=True) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    taken = tf.function(step) if compiled else step
    for words, targets in data:
        taken(words, targets)
    optimizer.finalize()


LOOPS: dict[str, Callable[[Any, Any, Any], None]] = {
    "fit": train_by_fit,
    "function": train_by_tape,
    "eager": lambda model, optimizer, data: train_by_tape(model, optimizer, data, compiled=False),
}


@scenario
def placements() -> Any:
    """Every algorithm with the center in every place, and through every loop: the center of all weights at the end."""
    results = {}
    for i, (name, wrap) in enumerate(ALGORITHMS.items()):
        expected: Any = None
        loops = ("function", "fit") if i % 2 else ("fit", "function")
        for loop, place in [("eager", "replicated"), *zip(loops, PLACES[1:], strict=True)]:
            keras.utils.set_random_seed(hvd.rank())
            model = network()
            optimizer = wrap(model, center=place)
            LOOPS[loop](model, optimizer, batches())
            with optimizer.center():
                center = model.get_weights()
            expected = center if expected is None else expected
            results[f"{name}, {place}, {loop}"] = {
                "rounds": optimizer.synchronizer.rounds,
                "sum": float(sum(np.abs(array).sum(dtype="f8") for array in center)),
                "difference": compare(center, expected)[1],
            }
    return results


@scenario
def last_rank_does_not_look() -> Any:
    """Collectives of whose results the last rank uses the last alone, of equal and constant values, in a branch."""
    communicator = TensorFlowCommunicator()
    here = tf.Variable(tf.fill([3], float(hvd.rank() + 1)))
    last = hvd.rank() == hvd.size() - 1

    def exchange(value: Any) -> Any:
        name = "life"
        found = [
            *(communicator.broadcast(value, f"{name}.broadcast.{i}", 0) for i in range(2)),
            *(communicator.allreduce(value, f"{name}.reduce.{i}")() for i in range(2)),
            communicator.reducescatter(value, f"{name}.scatter")(),
            communicator.allgather(value[: 0 if last else 3], f"{name}.gather"),
        ]
        total = tf.add_n([tf.reduce_sum(one) for one in found[:2]])
        return total if last else total + 0.0 * tf.add_n([tf.reduce_sum(one) for one in found])

    @tf.function
    def step(wanted: Any) -> Any:
        return tf.cond(wanted, lambda: exchange(tf.zeros([3]) if last else here.read_value()), lambda: 0.0)

    return [float(step(tf.constant(i % 2 == 0))) for i in range(4)]


@scenario
def constraints() -> Any:
    """Constraints that no average or step of a center keeps: of the replica and the center at the end."""
    results: dict[str, Any] = {}
    for name, wrap in ALGORITHMS.items():
        cases = [("non_neg", "eager", "replicated"), ("unit_norm", "function", "root")]
        for constraint, loop, place in cases:
            keras.utils.set_random_seed(hvd.rank())
            model = network(constraint)
            optimizer = wrap(model, center=place)
            LOOPS[loop](model, optimizer, batches(4))
            kernel = next(v for v in model.trainable_variables if v.path.endswith("kernel"))
            replica = kernel.numpy()
            with optimizer.center():
                center, whole = kernel.numpy(), bits(model.weights)
            results[f"{name}, {constraint}, {loop}, {place}"] = {
                "replica": violation(constraint, replica),
                "center": violation(constraint, center),
                "bits": whole,
                "distance": optimizer.synchronizer.distance(),
            }
        results[f"{name}, sharded"] = attempt(lambda wrap=wrap: wrap(network("non_neg"), center="sharded"))
    return results


def violation(constraint: str, kernel: Any) -> float:
    """Return by how much a kernel violates a constraint."""
    if constraint == "non_neg":
        return float(max(-kernel.min(), 0.0))
    return float(np.abs(np.linalg.norm(kernel, axis=0) - 1.0).max())


@scenario
def normalization() -> Any:
    """A layer adapted to this rank's data: what the model predicts after the start, and in ``center()``."""
    probe = np.linspace(-1.0, 1.0, 6, dtype="float32").reshape(2, 3)
    generator = np.random.default_rng(hvd.rank())
    data = (3 * generator.standard_normal((16, 3)) + 2 * hvd.rank()).astype("float32")
    normalize = keras.layers.Normalization()
    normalize.adapt(data)
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), normalize, keras.layers.Dense(1)])
    optimizer = ALGORITHMS["average"](model)
    started = model.predict(probe, verbose=0).tolist()
    model.compile(optimizer, loss="mse", jit_compile=False)
    model.fit(data, data[:, :1], batch_size=4, verbose=0, callbacks=[hvdp.callbacks.FinalizeAtEnd()])
    with optimizer.center():
        center = model.predict(probe, verbose=0).tolist()
    return [started, center, bits(normalize.weights)]


@scenario
def audits() -> Any:
    """A center that changes on the last rank alone, before the third exchange: after which exchange that is noticed."""
    results: dict[str, Any] = {}
    for loop in LOOPS:
        keras.utils.set_random_seed(hvd.rank())
        model = network()
        optimizer = ALGORITHMS["easgd"](model, audit_every=2)

        def data(optimizer: Any = optimizer) -> Any:
            for step, batch in enumerate(batches(10)):
                if step == 4 and hvd.rank() == hvd.size() - 1:
                    center = optimizer.synchronizer.center_tensors()[2]
                    center.assign_add(tf.ones_like(center))
                yield batch

        if loop == "fit":  # which reads ahead
            results[loop] = attempt(lambda m=model, o=optimizer: LOOPS["fit"](m, o, batches(10)))
        else:
            unknown = tf.errors.UnknownError  # what errors of a graph become
            results[loop] = attempt(lambda m=model, o=optimizer, loop=loop, d=data: LOOPS[loop](m, o, d()), unknown)
        results[f"{loop}, rounds"] = int(optimizer.synchronizer.rounds)
    return results


@scenario
def values_that_count() -> Any:
    """Every step adds rank + 1; the last rank's second is NaN; or ranks weigh more. Momentum of a step goes on."""
    results: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "raise": {},
        "skip": {"nonfinite": "skip"},
        "fragments": {"nonfinite": "skip", "fragments": 2},
        "sharded": {"nonfinite": "skip", "center": "sharded"},
        "weight": {"nonfinite": "skip", "weight": lambda: hvd.rank() + 1.0},
    }
    for compiled in (False, True):
        for name, given in options.items():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
            inner = keras.optimizers.SGD(1.0, momentum=0.5)
            optimizer = hvdp.ModelAverageOptimizer(inner, model, given.get("fragments", 1), **given)
            optimizer.build(model.trainable_variables)

            def apply(gradients: Any, model: Any = model, optimizer: Any = optimizer) -> None:
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            take = tf.function(apply) if compiled else apply

            def work(model: Any = model, take: Any = take) -> None:
                for step in range(1, 5):
                    wrong = step == 2 and hvd.rank() == hvd.size() - 1
                    gradients = [tf.fill(v.shape, -1.0 - hvd.rank()) for v in model.trainable_variables]
                    gradients[0] = gradients[0] * (np.nan if wrong else 1.0)
                    take(gradients)

            error = attempt(work, tf.errors.UnknownError)
            optimizer.finalize() if not error else None
            with optimizer.center():
                center = [float(tf.reduce_max(tf.abs(v - v[0]))) + float(v.numpy().flat[0]) for v in model.variables]
            counters, momenta = optimizer.synchronizer.counters, inner.variables[2:]
            finite = all(np.isfinite(v.numpy()).all() for v in momenta)
            results[f"{name}, {compiled}"] = [error, center, finite, counters.left_out, counters.rounds]
    return results


@scenario
def states_of_static_jobs() -> Any:
    """A State where ranks neither come nor go: groups by a function, a commit at every exchange of compiled steps."""
    found = {}
    for name, groups in (("one level", None), ("two levels", lambda: range(hvd.size()))):
        model = network()
        inner = keras.optimizers.SGD(0.01)
        inner = inner if groups is None else hvdp.ModelAverageOptimizer(inner, model, 1, process_set=groups)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 2)
        model.compile(optimizer, loss="mse", jit_compile=False)
        state = hvdp.elastic.State(model, commit="exchange")
        state.sync()
        before = max(state.commits.held)
        model.fit(batches(), epochs=1, verbose=0)
        made = max(state.commits.held) - before
        state.sync()  # Goes back to the last commit.
        rounds = None if groups is None else inner.synchronizer.rounds
        found[name] = [made, optimizer.synchronizer.local_steps, rounds]
        optimizer.finalize()
    model = network()
    optimizer = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.01), model, 2)
    model.compile(optimizer, loss="mse", jit_compile=False)
    state = hvdp.elastic.State(model, commit="exchange")  # Whose ranks never come together.
    model.fit(batches(), epochs=1, verbose=0)
    found["without sync()"] = [len(state.commits.held), optimizer.synchronizer.local_steps, None]
    optimizer.finalize()
    return found


class Noted(keras.callbacks.Callback):
    """What was trained last, and the center at the end of every epoch; the root's first epoch is its best."""

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.first_is_best, self.trained, self.centers = alike or hvd.rank() == 0, {}, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        local = self.model.optimizer.plain_optimizer
        self.trained["replica"] = [v.numpy() for v in self.model.trainable_variables]
        self.trained["averages"] = [v.numpy() for v in local._model_variables_moving_average] if local.use_ema else []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["judged"] = float(epoch if self.first_is_best else -epoch)
        with self.model.optimizer.center():
            self.centers.append(self.model.get_weights())


@scenario
def ends_of_fit() -> Any:
    """What models hold when ``fit`` ends: how far from which mean or center, and whether on all ranks alike."""
    final, inner = hvdp.callbacks.FinalizeAtEnd, {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.9}
    two_levels = {"process_set": lambda: range(hvd.size())}
    averages: dict[str, Callable[[Any, Any], Any]] = {
        "average": lambda local, model: hvdp.ModelAverageOptimizer(local, model, 3),
        "root": lambda local, model: hvdp.ModelAverageOptimizer(local, model, 3, center="root"),
        "two levels": lambda local, model: hvdp.ElasticAverageOptimizer(
            hvdp.ModelAverageOptimizer(local, model, 2, **two_levels), model, 3
        ),
        "asynchronous": lambda local, model: hvdp.ElasticAverageOptimizer(local, model, 3, asynchronous=True),
    }
    results: dict[str, Any] = {"averages": {}, "best": {}}
    for name, wrap in averages.items():
        for steps in (3, 4):
            model, noted = network(), Noted()
            optimizer = wrap(keras.optimizers.SGD(**inner), model)
            model.compile(optimizer, loss="mse", jit_compile=False)
            swap = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if name == "average" else []
            callbacks = [*swap, final(), noted] if steps == 3 else [noted, final(), *swap]
            model.fit(batches(steps), shuffle=False, verbose=0, callbacks=callbacks)
            with optimizer.center():
                center = [v.numpy() for v in model.trainable_variables]
            means = {key: [mean(array) for array in arrays] for key, arrays in noted.trained.items()}
            results["averages"][f"{name}, {steps}"] = {
                "center": compare(center, means["replica"])[1],
                "model": compare([v.numpy() for v in model.trainable_variables], means["averages"])[1],
                "bits": bits(model.weights),
            }
    for place in PLACES:
        for steps in (2, 3):
            model, noted = network(), Noted(alike=place != "replicated")
            model.compile(ALGORITHMS["easgd"](model, center=place), loss="mse", jit_compile=False)
            stop = keras.callbacks.EarlyStopping("judged", mode="min", patience=1, restore_best_weights=True)
            callbacks = [noted, stop, final()] if steps == 2 else [final(), noted, stop]
            model.fit(batches(steps), epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
            first = [hvd.broadcast(tf.constant(array), 0).numpy() for array in noted.centers[0]]
            found = [compare(model.get_weights(), first)[1], len(noted.centers), bits(model.weights)]
            results["best"][f"{place}, {steps}"] = found
    return results


def mean(array: Any) -> Any:
    """Return the mean over the ranks."""
    return hvd.allreduce(tf.constant(array), op=hvd.Average).numpy()


@scenario
def determinism() -> Any:
    """Keras's recipe for reproducible runs, twice; it cannot be undone, so this comes last."""
    keras.utils.set_random_seed(7)
    tf.config.experimental.enable_op_determinism()
    results = {}
    for name in ("easgd", "agn"):
        wrap, found = ALGORITHMS[name], []
        for _ in range(2):
            keras.utils.set_random_seed(7 + hvd.rank())
            model = network()
            optimizer = wrap(model)
            train_by_fit(model, optimizer, batches())
            found.append([bits(model.weights), optimizer.synchronizer.rounds])
        results[name] = [found[0] == found[1], found[0][1], optimizer.synchronizer.counters.exchange_seconds > 0]
    return results


def main(folder: Path) -> None:
    """Run all scenarios."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
