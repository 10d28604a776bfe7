"""What every rank does with messages that Keras optimizers send encoded; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.compression_tensorflow_scenarios FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests import oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.program import Scenarios, attempt

scenario = Scenarios(graphs_as_built=True)

WIRES: dict[str, Any] = {
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "topk": hvdp.Compression.topk(0.5),
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(0.5),
}
MOMENTUM = 0.5
"""A number of float32: Keras rounds the momentum."""

LOOPS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "eager": lambda step: step,
    "function": lambda step: tf.function(step),
}


def made(algorithm: Any, variable: Any, rate: float, period: int, **options: Any) -> Any:
    inner = keras.optimizers.SGD(rate, momentum=MOMENTUM)
    optimizer = hvdp.PeriodicOptimizer(inner, None, algorithm, period, **options)
    optimizer.build([variable])
    return optimizer


CASES = [
    *(("average", wire, loop) for wire in WIRES for loop in LOOPS),
    *(("easgd", wire, "function") for wire in ("bf16", "int8", "topk")),
    *(("agn", wire, "function") for wire in ("int8", "topk")),
    *(("diloco", "int8", "eager"), ("slowmo", "bf16", "function"), ("bmuf", "topk", "function")),
]
"""Algorithms, wires and loops. All algorithms by all wires are in the tests of the core."""


@scenario
def compressed_quadratics() -> Any:
    """The losses of the oracle: x after every step, the center at the end, and bytes."""
    results = {}
    for name, wire, loop in CASES:
        w = keras.Variable(oracle.START, dtype="float64", name="w")
        gradient = tf.Variable(oracle.START, dtype=tf.float64)
        optimizer = made(ALGORITHMS[name](), w, oracle.RATE, PERIOD, compression=WIRES[wire])

        def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
            optimizer.apply_gradients([(tf.identity(gradient), w)])

        step, seen = LOOPS[loop](lambda take=take: take()), []  # type: ignore[misc]
        for _ in range(oracle.STEPS):
            gradient.assign(oracle.gradient(hvd.rank(), w.numpy().tolist()))
            step()
            seen.append(w.numpy().tolist())
        with optimizer.center():
            results[f"{name} {wire} {loop}"] = [seen, w.numpy().tolist()]
    return results


def network() -> Any:
    keras.utils.set_random_seed(hvd.rank())
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(50),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )


def batches(seed: int, count: int) -> Any:
    random = np.random.default_rng(seed + 100 * hvd.rank())
    x = random.standard_normal((4 * count, 6)).astype("float32") + hvd.rank()
    return x, x[:, :2]


@scenario
def compressed_in_fit() -> Any:
    """Saved in mid-period, and loaded; other numbers of batches on every rank.

    Returns the sums of the center's weights at the end: of the original, and of what was loaded.
    """
    results = {}
    for name, wire in (("average", "int8"), ("easgd", "topk"), ("agn", "bf16")):
        model = network()
        inner = keras.optimizers.SGD(0.01, momentum=MOMENTUM)
        optimizer = hvdp.PeriodicOptimizer(inner, model, ALGORITHMS[name](), PERIOD, compression=WIRES[wire])
        model.compile(optimizer, loss="mse", jit_compile=False)
        model.fit(*batches(1, 2 * PERIOD + 1), batch_size=4, shuffle=False, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.saving.load_model(f"{folder}/model.keras")
        loaded.optimizer.attach(loaded)
        ends = []
        for trained in (model, loaded):
            trained.fit(*batches(2, 4 + 3 * hvd.rank()), batch_size=4, shuffle=False, verbose=0)
            trained.optimizer.synchronizer.finalize()
            with trained.optimizer.center():
                ends.append([float(np.sum(weight, dtype="float64")) for weight in trained.get_weights()])
        results[f"{name} {wire}"] = ends
    return results


@scenario
def not_finite_on_the_last_rank() -> Any:
    """The error, and the center after it."""
    results = {}
    for wire, compression in WIRES.items():
        for loop in LOOPS:
            w, gradient = keras.Variable([0.0, 0.0], name="w"), tf.Variable([1.0, 1.0])
            optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=compression)

            def take(optimizer: Any = optimizer, gradient: Any = gradient, w: Any = w) -> None:
                optimizer.apply_gradients([(tf.identity(gradient), w)])

            step = LOOPS[loop](lambda take=take: take())  # type: ignore[misc]
            step()
            if hvd.rank() == hvd.size() - 1:
                gradient.assign([float("inf"), 1.0])
            error = attempt(step, tf.errors.OpError)
            with optimizer.center():
                results[f"{wire} {loop}"] = [error, w.numpy().tolist()]
    return results


@scenario
def compressed_and_broadcast() -> Any:
    """The center after two exchanges, where all variables of the optimizer were broadcast before training or not."""
    results = {}
    for wire in ("int8", "bf16", "topk"):
        for broadcast in (False, True):
            w = keras.Variable(np.linspace(-1, 1, 5), dtype="float32", name="w")
            optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=WIRES[wire])
            optimizer.build([w])
            if broadcast:
                hvd.broadcast_variables([getattr(variable, "value", variable) for variable in optimizer.variables], 0)
            for step in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1 + step, 5).astype("f4"), w)])
            with optimizer.center():
                results[f"{wire}{' broadcast' * broadcast}"] = w.numpy().tolist()
    return results


def momentum_of(optimizer: Any) -> Any:
    """Return the only momentum of the local optimizer."""
    (momentum,) = (variable for variable in optimizer.variables if "momentum" in variable.path)
    return momentum


@scenario
def compressed_and_restored() -> Any:
    """The center after four exchanges, and that of an optimizer which took over a state after two."""
    results = {}
    for wire in ("int8", "topk"):

        def start(values: Any, wire: str = wire) -> Any:
            w = keras.Variable(values, dtype="float32", name="w")
            optimizer = made(hvdp.Averaging(), w, 0.1, 2, compression=WIRES[wire])
            optimizer.build([w])
            return w, optimizer

        def go_on(w: Any, optimizer: Any) -> list[float]:
            for step in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1 + step, 5).astype("f4"), w)])
            with optimizer.center():
                return w.numpy().tolist()  # type: ignore[no-any-return]

        w, optimizer = start(np.linspace(-1, 1, 5))
        go_on(w, optimizer)
        state, momentum = optimizer.synchronizer.state_dict(), momentum_of(optimizer).numpy()
        other, restored = start(w.numpy())
        momentum_of(restored).assign(momentum)
        restored.synchronizer.load_state_dict(state)
        results[wire] = [go_on(w, optimizer), go_on(other, restored)]
    return results


@scenario
def compressed_in_other_places() -> Any:
    """float16 with the center on the root, or sharded: the center after four exchanges; others: the error."""
    results = {}
    for wire, compression in WIRES.items():
        for place in ("replicated", "root", "sharded") if wire in ("fp16", "int8") else ("root",):
            w = keras.Variable(np.linspace(-1, 1, 50), dtype="float32", name="w")
            optimizer = None

            def make(w: Any = w, place: str = place, compression: Any = compression) -> Any:
                return made(hvdp.Averaging(), w, 0.1, 1, center=place, compression=compression)

            error = attempt(make)
            if error:
                results[f"{wire} {place}"] = error
                continue
            optimizer = make()
            for _ in range(4):
                optimizer.apply_gradients([((w.value - hvd.rank()) * np.linspace(0.5, 1, 50).astype("float32"), w)])
            with optimizer.center():
                results[f"{wire} {place}"] = w.numpy().tolist()
    return results


def main(folder: Path) -> None:
    """Run all scenarios."""
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
