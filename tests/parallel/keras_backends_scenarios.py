"""``fit`` of Keras on another backend than TensorFlow, whose ranks exchange by a callback.

mpirun -np 2 -x KERAS_BACKEND=jax python -m tests.parallel.keras_backends_scenarios FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvd_periodic.keras as hvdp
from hvd_periodic.comm.selection import requested
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.numpy.communicator import communicator_of
from tests.conformance.communicator_contract import check_communicator
from tests.parallel.program import NotApplicableError, Scenarios, attempt

scenario = Scenarios()

RATE, MOMENTUM = 0.125, 0.5
"""Exact in float32."""

BATCHES, PERIOD = 7, 3
"""In an epoch, so that exchanges fall on different batches of the two epochs; the last steps of fit() have none."""


class Quadratic(keras.layers.Layer):
    """Σ_k ½ h_k (w_k − b_k)², with h and b from the batch, and w in two weights; counts how often it is traced."""

    traces = 0

    def build(self, shape: Any) -> None:
        self.first = self.add_weight(shape=(2,), initializer="ones", name="first")
        self.second = self.add_weight(shape=(3, 2), initializer="zeros", name="second")
        self.moving_mean = self.add_weight(shape=(2,), initializer="zeros", trainable=False, name="moving_mean")

    def call(self, x: Any, training: bool = False) -> Any:
        type(self).traces += 1
        w = keras.ops.concatenate([self.first, keras.ops.reshape(self.second, (-1,))])
        if training:
            self.moving_mean.assign(0.5 * self.moving_mean + 0.5 * keras.ops.mean(x[:, :2], axis=0))
        return keras.ops.sum(0.5 * x[:, 8:] * keras.ops.square(w - x[:, :8]), axis=1, keepdims=True)


class Routed(Quadratic):
    """The same without the terms of ``second`` in batches that do not use it, in which it has no gradient."""

    used = True

    def call(self, x: Any, training: bool = False) -> Any:
        second = keras.ops.reshape(self.second, (-1,)) if self.used else keras.ops.zeros(6)
        w = keras.ops.concatenate([self.first, second])
        return keras.ops.sum(0.5 * x[:, 8:] * keras.ops.square(w - x[:, :8]), axis=1, keepdims=True)


PRESENT = [{0, 1}, set(), {0}, {1}, {0, 1}]
"""The ranks that use ``second`` in each period."""


class Routes(keras.callbacks.Callback):
    """Says in which batches the layer uses ``second``."""

    batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.layers[0].used = communicator_of(None).rank in PRESENT[self.batches // PERIOD]
        self.batches += 1


def data(rank: int) -> np.ndarray:
    """Return minima and curvatures, one row per batch, different on each rank."""
    random = np.random.default_rng(rank)
    return np.concatenate([random.normal(size=(BATCHES, 8)), random.uniform(0.2, 1.0, (BATCHES, 8))], axis=1, dtype="f")


def network(layer: type[Quadratic] = Quadratic) -> Any:
    model = keras.Sequential([keras.Input((16,)), layer(name="quadratic")], name="model")
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), loss=lambda y_true, y_pred: keras.ops.mean(y_pred))
    return model


class Recorder(keras.callbacks.Callback):
    """Notes what the model holds after every epoch, and how often the layer had been traced after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[list[float]] = []
        self.traces: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.traces.append(Quadratic.traces)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(weights(self.model))

    @property
    def traced_again(self) -> int:
        """How often it was traced after the first batch."""
        return self.traces[-1] - self.traces[0]


def weights(model: Any) -> list[float]:
    first, second = (keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables)
    return [float(value) for value in (*first, *second.reshape(-1))]


def fit(model: Any, *callbacks: Any, epochs: int = 2, rows: slice = slice(None)) -> None:
    x = data(communicator_of(None).rank)[rows]
    options = {"batch_size": 1, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x, np.zeros((len(x), 1), np.float32), callbacks=list(callbacks), **options)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "averaging": (hvdp.Averaging(), {}),
    "elastic averaging": (hvdp.EASGD(moving_rate=0.25), {}),
    "DiLoCo": (hvdp.DiLoCo(), {"center": "root"}),
    "SlowMo": (hvdp.SlowMo(), {"center": "sharded"}),
    "BMUF": (hvdp.BMUF(), {"fragments": 2}),
    "overlap": (hvdp.Averaging(), {"overlap": 1}),
    "int8": (hvdp.DiLoCo(), {"compression": hvdp.Compression.int8}),
    "quorum": (hvdp.Averaging(), {"quorum": 1, "grace_seconds": 0.0, "staleness_power": 0.5}),
}

SETS = [[0, 1], [0], [0, 1], [0, 1]]
"""The ranks in the first rounds with a quorum."""


def in_fit(algorithm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train by ``fit``; the ranks' weights differ until the root's are given to all."""
    model, recorder = network(), Recorder()
    model.set_weights([weight + communicator_of(None).rank for weight in model.get_weights()])
    exchange = hvdp.PeriodicExchange(model, algorithm, PERIOD, **options)
    if "quorum" in options:
        exchange.synchronizer.exchanger.replay(SETS)
    fit(model, exchange, recorder)
    counters = exchange.synchronizer.counters
    return {
        "epochs": recorder.weights,
        "center": weights(model),
        "statistics": keras.ops.convert_to_numpy(model.layers[0].moving_mean).tolist(),
        "traced again": recorder.traced_again,
        "counters": [counters.local_steps, counters.rounds],
    }


def on_arrays(algorithm: Any, options: dict[str, Any], present: list[set[int]] | None = None) -> dict[str, Any]:
    """Train the same in the numpy front end; only some ranks have gradients of ``second`` in each period, if given."""
    communicator = communicator_of(None)
    first, second = np.ones(2, np.float32), np.zeros((3, 2), np.float32)
    arrays, local = {"first": first, "second": second}, SGD(RATE, MOMENTUM)
    optimizer = PeriodicOptimizer(local, arrays, algorithm, PERIOD, process_set=communicator, **options)
    if "quorum" in options:
        optimizer.synchronizer.exchanger.replay(SETS)
    epochs = []
    for epoch in range(2):
        for batch, row in enumerate(data(communicator.rank), epoch * BATCHES):
            w = np.concatenate([first, second.reshape(-1)])
            g = row[8:] * (w - row[:8])
            gradients = {"first": g[:2], "second": g[2:].reshape(3, 2)}
            if present is not None and communicator.rank not in present[batch // PERIOD]:
                del gradients["second"]
            optimizer.step(gradients)
        epochs.append([*first.tolist(), *second.reshape(-1).tolist()])
    optimizer.finalize()
    with optimizer.center():
        center = [*first.tolist(), *second.reshape(-1).tolist()]
    counters = optimizer.synchronizer.counters
    return {"epochs": epochs, "center": center, "counters": [counters.local_steps, counters.rounds]}


@scenario
def contract() -> None:
    check_communicator(communicator_of(None))


@scenario
def trained() -> dict[str, Any]:
    """Return by case what a model is after each epoch and at the end, in ``fit`` and on arrays."""
    return {name: {"fit": in_fit(*case), "arrays": on_arrays(*case)} for name, case in CASES.items()}


@scenario
def present() -> dict[str, Any]:
    """Return by algorithm what a model is at the end of each epoch, and of ``fit``, and what arrays are."""
    if keras.backend.backend() != "torch":
        raise NotApplicableError("Keras on PyTorch alone shows which gradients a batch had")
    found: dict[str, Any] = {}
    for algorithm in (hvdp.Averaging(), hvdp.EASGD(moving_rate=0.25), hvdp.DiLoCo()):
        model, recorder = network(Routed), Recorder()
        exchange = hvdp.PeriodicExchange(model, algorithm, PERIOD, parameters={"*/second": "present"})
        fit(model, Routes(), exchange, recorder)
        arrays = on_arrays(algorithm, {"parameters": {"second": "present"}}, PRESENT)
        in_fit = [*recorder.weights, weights(model)]
        found[type(algorithm).__name__] = {"fit": in_fit, "arrays": [*arrays["epochs"], arrays["center"]]}
    return found


@scenario
def uneven_data() -> list[Any]:
    """The last rank has fewer batches, and leaves earlier."""
    model, communicator = network(), communicator_of(None)
    exchange = hvdp.PeriodicExchange(model, hvdp.Averaging(), PERIOD)
    fit(model, exchange, rows=slice(2 if communicator.rank == communicator.size - 1 else None))
    return [weights(model), exchange.synchronizer.rounds]


@scenario
def looked_at_in_mid_epoch() -> dict[str, Any]:
    """Reading the center, its distance and a state between batches changes nothing, and traces nothing again."""

    class Looks(keras.callbacks.Callback):
        seen: list[Any]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == PERIOD:
                local, synchronizer = weights(self.model), exchange.synchronizer
                with exchange.center():
                    center = weights(self.model)
                    zeros = np.zeros((1, 1), np.float32)
                    self.model.evaluate(data(0)[:1], zeros, verbose=0)
                state = synchronizer.state_dict()["vectors"]["parameters"]["center"]
                saved = [float(value) for array in state.values() for value in array.reshape(-1)]
                self.seen = [local, center, weights(self.model), saved, synchronizer.distance()]

    found = {}
    for name, looks in (("not looked at", []), ("looked at", [Looks()])):
        model, recorder = network(), Recorder()
        exchange = hvdp.PeriodicExchange(model, hvdp.EASGD(moving_rate=0.25), PERIOD)
        fit(model, exchange, *looks, recorder)
        found[name] = [recorder.weights, weights(model)]
        found[f"{name}: traced again"] = recorder.traced_again
    return found | {"seen": looks[0].seen}


@scenario
def resumed() -> list[Any]:
    """Return the weights after two ``fit``, the second of the same model, or of one that has loaded its state."""
    model = network()
    exchange = hvdp.PeriodicExchange(model, hvdp.EASGD(moving_rate=0.25), PERIOD)
    fit(model, exchange, epochs=1)
    state, saved = exchange.synchronizer.state_dict(), model.get_weights()
    of_optimizer = [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    fit(model, exchange, epochs=1)

    other = network()
    again = hvdp.PeriodicExchange(other, hvdp.EASGD(moving_rate=0.25), PERIOD)
    other.optimizer.build(other.trainable_variables)
    other.set_weights(saved)
    for variable, value in zip(other.optimizer.variables, of_optimizer, strict=True):
        variable.assign(value)
    again.synchronizer.load_state_dict(state)
    fit(other, again, epochs=1)
    return [weights(model), weights(other), exchange.synchronizer.rounds, again.synchronizer.rounds]


@scenario
def refused() -> dict[str, str]:
    """All ranks get errors; of what only one of them gives wrongly as well."""
    model, rank = network(), communicator_of(None).rank

    def exchange(algorithm: Any = hvdp.Averaging, period: Any = PERIOD, **options: Any) -> Any:
        return hvdp.PeriodicExchange(model, algorithm, period, **options)

    def trained_with(*callbacks: Any, **settings: Any) -> None:
        model.compile(keras.optimizers.SGD(RATE, use_ema=settings.pop("use_ema", False)), loss="mse", **settings)
        fit(model, exchange(), *callbacks)

    def other_model() -> None:
        fit(network(), exchange())

    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    found = {
        "gradients": attempt(lambda: exchange(hvdp.EASGD(rho=0.5))),
        "on one rank": attempt(lambda: exchange(period=0 if rank == 0 else PERIOD)),
        "disagreement": attempt(lambda: exchange(period=PERIOD + rank)),
        "moving averages": attempt(lambda: trained_with(use_ema=True)),
        "best weights": attempt(lambda: trained_with(stopping)),
        "another model": attempt(other_model),
        "state of the optimizer": attempt(lambda: exchange(optimizer_state="average")),
        "excluded": attempt(lambda: exchange(nonfinite="skip")),
        "not built": attempt(lambda: hvdp.PeriodicExchange(keras.Sequential([Quadratic()]), hvdp.Averaging(), 2)),
    }
    if keras.backend.backend() != "torch":
        found["several steps"] = attempt(lambda: trained_with(steps_per_execution=2))
        found["present"] = attempt(lambda: exchange(parameters="present"))

    def import_other() -> None:
        import hvd_periodic.tensorflow  # noqa: F401

    return found | {"other front end": attempt(import_other, ImportError)}


@scenario
def imported() -> list[str]:
    """Return the packages that were imported, out of those that nothing here needs."""
    return sorted({"tensorflow", "horovod"} & {name.partition(".")[0] for name in sys.modules})


if __name__ == "__main__":
    if requested() != "mpi":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    scenario.run(Path(sys.argv[1]), communicator_of(None).rank, backend=os.environ["KERAS_BACKEND"])
