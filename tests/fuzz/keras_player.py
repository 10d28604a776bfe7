"""One rank of a program with a Keras optimizer: every method is a call that a user might make."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.tensorflow.stage import Stage
from tests.fuzz.player import ALGORITHMS, PERIODS, Player, Setup, Trained
from tests.fuzz.ranks import InjectedError, TableCommunicator

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


class TensorTable(TableCommunicator):
    """A rank at a table, on TensorFlow's eager tensors; what comes as an array stays one."""

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Reduce in rank order, at once."""
        total = self._like(buffer, super().allreduce(np.array(buffer), name, op)())
        return lambda: total

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Return the root's values."""
        return self._like(buffer, super().broadcast(np.array(buffer), name, root))

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Reduce in rank order, at once."""
        part = self._like(buffer, super().reducescatter(np.array(buffer), name)())
        return lambda: part

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Return what all have."""
        return self._like(buffer, super().allgather(np.array(buffer), name))

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Exchange parts at once."""
        parts = self._like(buffer, super().alltoall(np.array(buffer), name)())
        return lambda: parts

    def _like(self, buffer: Any, array: Any) -> Any:
        return np.array(array) if isinstance(buffer, np.ndarray) else tf.constant(array)


def make_model(width: int) -> Any:
    """Return a model with statistics, and with a frozen weight; a state knows tensors by name."""
    first = keras.layers.Dense(width, name="first")
    frozen = keras.layers.Dense(width, use_bias=False, trainable=False, name="frozen")
    last = keras.layers.Dense(1, use_bias=False, name="last")
    layers = [first, keras.layers.BatchNormalization(name="statistics"), frozen, last]
    return keras.Sequential([keras.Input((3,)), *layers], name="model")


class KerasPlayer(Player):
    """One rank; steps are eager, and exchanges wait: there is no overlap."""

    communicator: TensorTable
    table = TensorTable

    def __init__(self, communicator: TensorTable) -> None:
        super().__init__(communicator)
        self.left: list[tuple[Trained, Any]] = []

    def made(self, setup: Setup) -> Trained:
        """Return a new model, and an optimizer of it."""
        model = make_model(setup.width)
        optimizer = self.wrapped(setup, model, OPTIMIZERS[setup.optimizer]())
        optimizer.build(model.trainable_variables)
        return Trained(setup, model, optimizer)

    def wrapped(self, setup: Setup, model: Any, local: Any) -> Any:
        """Wrap a local optimizer."""
        if setup.levels > 1:
            inner = replace(setup, levels=setup.levels - 1, algorithm="averaging", period="1")
            local = self.wrapped(inner, model, local)
        return hvdp.PeriodicOptimizer(
            local,
            model,
            ALGORITHMS[setup.algorithm],
            PERIODS[setup.period],
            asynchronous=setup.asynchronous,
            process_set=self.communicator,
            **{name: value for name, value in setup.options().items() if name != "overlap"},
        )

    def gradients(self, trained: Trained) -> list[Any]:
        """Return those of the next batch of this rank."""
        self.batches += 1
        inputs = np.random.default_rng([self.communicator.rank, self.batches]).normal(size=(4, 3)).astype(np.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(trained.model(inputs, training=True)))
        found: list[Any] = tape.gradient(loss, [v.value for v in trained.model.trainable_variables])
        return found

    def step(self, trained: Trained) -> None:
        """Take a step, as a loop does."""
        trained.optimizer.apply(self.gradients(trained), trained.model.trainable_variables)

    def overflow(self, trained: Trained) -> None:
        """Pass over a batch, as is done where gradients are not finite."""
        self.gradients(trained)
        trained.optimizer.skip()

    def closure(self, trained: Trained, raising: bool) -> None:
        """Take a step, unless the gradients cannot be computed."""
        gradients = self.gradients(trained)
        if raising:
            raise InjectedError("in the backward pass")
        trained.optimizer.apply_gradients(zip(gradients, trained.model.trainable_variables, strict=True))

    def replaced(self, trained: Trained, how: str) -> None:
        """Go on with a copy, which has not been used: of a copy of the model, or of none."""
        model = keras.models.clone_model(trained.model)
        model.set_weights(trained.model.get_weights())
        if how == "deepcopy":
            made = copy.deepcopy(trained.optimizer)
            made.attach(model)
        else:
            made = pickle.loads(pickle.dumps(trained.optimizer))
            for optimizer in levels_of(made):
                optimizer.attach(process_set=self.communicator)
            made.build(model.trainable_variables)
        if trained.optimizer.stage >= Stage.CREATED:
            self.left.append((trained, trained.optimizer))
        trained.abandon()
        trained.model, trained.optimizer = model, made

    def change(self, trained: Trained, what: str) -> None:
        """Change something after construction, where there is such a change."""
        trained.before = None
        first = trained.model.layers[0]
        if what == "freeze":
            first.trainable = not first.trainable
        elif what == "group":
            stranger = keras.Variable(np.zeros(1, np.float32))
            variables = [*trained.model.trainable_variables, stranger]
            trained.optimizer.apply([*self.gradients(trained), tf.ones(1)], variables)
        elif what == "rate":
            trained.optimizer.learning_rate = 0.5 * trained.optimizer.learning_rate
        elif what == "state":
            for variable in self.local(trained):
                variable.assign(np.zeros(variable.shape, variable.dtype))
        elif what == "nan":
            first.kernel.assign(np.full(first.kernel.shape, np.nan))

    def local(self, trained: Trained) -> list[Any]:
        """Return what the local optimizer keeps, but for the learning rate."""
        inner = list(levels_of(trained.optimizer))[-1].inner
        return [variable for variable in inner.variables if variable is not inner._learning_rate]

    def state(self, trained: Trained) -> Any:
        """Return the state of the exchanges of every level, and of the local optimizer."""
        exchanges = [optimizer.synchronizer.state_dict() for optimizer in levels_of(trained.optimizer)]
        return {"exchanges": exchanges, "local": [np.array(variable) for variable in self.local(trained)]}

    def load_state(self, trained: Trained, state: Any) -> None:
        """Load both."""
        levels, local = list(levels_of(trained.optimizer)), self.local(trained)
        shapes = [array.shape for array in state["local"]]
        if len(levels) != len(state["exchanges"]) or [tuple(variable.shape) for variable in local] != shapes:
            raise InjectedError("loading the state of another optimizer")
        for optimizer, exchanges in zip(levels, state["exchanges"], strict=True):
            optimizer.synchronizer.load_state_dict(exchanges)
        for variable, array in zip(local, state["local"], strict=True):
            variable.assign(array)

    def finalize(self, trained: Trained) -> None:
        """Leave training on every level: first that of what copies have replaced, where others may wait."""
        mine = [pair for pair in self.left if pair[0] is trained]
        self.left = [pair for pair in self.left if pair[0] is not trained]
        for _, original in mine:
            original.finalize()
        trained.optimizer.finalize()

    def weights(self, trained: Trained) -> Any:
        """Return copies of all weights."""
        return trained.model.get_weights()

    def load_weights(self, trained: Trained, weights: Any) -> None:
        """Load weights, which may be those of another model."""
        if [array.shape for array in weights] != [array.shape for array in trained.model.get_weights()]:
            raise InjectedError("loading weights")
        trained.model.set_weights(weights)

    def copied(self, state: Any) -> Any:
        """Return a copy; of variables, their values."""
        variables = isinstance(state, list) and all(isinstance(value, tf.Variable) for value in state)
        return [value.numpy() for value in state] if variables else copy.deepcopy(state)

    def parameters(self, trained: Trained) -> list[Any]:
        """Return copies."""
        return [np.array(variable) for variable in trained.model.trainable_variables]

    def is_finite(self, trained: Trained) -> bool:
        """Return whether all parameters are."""
        return all(bool(np.isfinite(array).all()) for array in self.parameters(trained))

    def standing(self, trained: Trained) -> dict[str, Any]:
        """Return the same as other players; a copy that was not built yet has nothing."""
        if trained.optimizer.stage >= Stage.CREATED:
            return super().standing(trained)
        nothing: dict[str, Any] = {"counters": None, "begun": False, "inside": False, "centers": []}
        return nothing | {"finite": self.is_finite(trained)}


def levels_of(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those of this package inside of it."""
    while isinstance(optimizer, hvdp.PeriodicOptimizer):
        yield optimizer
        optimizer = optimizer.inner
