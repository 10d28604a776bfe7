"""A callback by which the ranks of a Keras ``fit`` exchange, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import keras

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import as_typed
from hvd_periodic.centers import placement_of
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.keras.fit import callbacks_of_fit, restores
from hvd_periodic.keras.model import check_policy, described, named_variables
from hvd_periodic.keras.options import ModelOptions
from hvd_periodic.keras.replica import HostedReplica
from hvd_periodic.keras.store import Variables
from hvd_periodic.local_state import as_local_state
from hvd_periodic.numpy.communicator import communicator_of
from hvd_periodic.numpy.sgd import Array
from hvd_periodic.options import of_exchange, takes
from hvd_periodic.participation import Present
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.sync.finite import SKIP
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


class PeriodicExchange(keras.callbacks.Callback):
    """Exchanges the weights of a model during ``model.fit``, with Keras on any backend.

    The callback counts the batches, and exchanges after the batch at which an exchange is due, through arrays in host
    memory. The steps of Keras remain as they are: with JAX, compiled once. Construction gives all ranks the root's
    weights; when ``fit`` ends, the ranks exchange their last steps, and the model holds the center on all of them.
    Ranks with fewer batches than others take part in exchanges until all are done.

    Args:
        model: the model, built; all its trainable weights take part. It may be compiled later, before ``fit``.
        algorithm: an :class:`~hvd_periodic.Algorithm` that works on weights alone, or a function that makes one: model
            averaging, elastic averaging with ρ = 0, DiLoCo, SlowMo, BMUF, or your own.
        period: local steps (batches) between exchanges, or a schedule.
        asynchronous: exchange with one center without waiting for other ranks; over MPI.
        options: those of :class:`~hvd_periodic.options.Options` and
            :class:`~hvd_periodic.keras.options.ModelOptions`; the signature has their defaults. The state of the local
            optimizer is always ``"local"``, ``nonfinite`` is ``"raise"`` or ``"ignore"``, and ``parameters`` can be
            ``"present"`` with Keras on PyTorch, where a batch counts by the gradients that its step has left.

    Attributes:
        synchronizer: counters, ``sync()``, ``distance()``, ``state_dict()`` and ``load_state_dict()`` of the exchanges.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, or ranks that disagree. On every rank: if
            an argument was refused on one rank, the others raise a RuntimeError that cites its error.
        RuntimeError: no library that could exchange is ready.

    Example:
        >>> import keras, numpy as np
        >>> from hvd_periodic import EASGD, LocalCommunicator
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), loss="mse")
        >>> exchange = PeriodicExchange(model, EASGD(beta=0.5), period=2, process_set=LocalCommunicator())
        >>> history = model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0, callbacks=[exchange])
        >>> exchange.synchronizer.rounds
        2
    """

    @takes(ModelOptions)
    def __init__(
        self,
        model: keras.Model,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        asynchronous: bool = False,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__()
        communicator = communicator_of(options["process_set"])
        name = communicator.unique_name(options["timeout_seconds"])

        def build() -> ReplicaSynchronizer[Array]:
            _check(model, options)
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            _refuse_gradients(made)
            named = named_variables(model.trainable_variables, model, options["buffers"], options["parameters"])
            if Present.name in named.by_policy and keras.backend.backend() != "torch":
                raise ValueError(
                    "`parameters` can be 'present' for PeriodicExchange with Keras on PyTorch only, where variables "
                    "keep the gradients of a batch: JAX computes zeros for those that are missing, and a step of "
                    "TensorFlow shows none, for which there are the optimizers of hvd_periodic.tensorflow. Received: "
                    f"Keras on {keras.backend.backend()}"
                )
            replica = HostedReplica(named, self._values)
            synchronizer = ReplicaSynchronizer(
                replica,
                made,
                as_schedule(period, as_typed("period")),
                communicator,
                communicator.rank_of(options["root_rank"]),
                name,
                asynchronous=asynchronous,
                rates=LearningRates(lambda: [self._learning_rate()] * len(named.parameters)),
                **of_exchange(options),
            )
            alone = synchronizer.exchanger.worker is not None
            replica.refuse_constraints(synchronizer.tensor_groups.parameters.center.layout, alone)
            return synchronizer

        self._exchanged, self._values = model, Variables(model)
        self._trained = list(model.trainable_variables) if isinstance(model, keras.Model) else []
        self.synchronizer: ReplicaSynchronizer[Array] = build_on_all(communicator, name, build)
        self.synchronizer.learning_rate = lambda: None if self._optimizer is None else self._learning_rate()
        self.synchronizer.start()

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center in the model inside a ``with`` block; the local values return after it, even on an exception.

        With ``center="root"`` or ``"sharded"`` all ranks must enter the block.

        Raises:
            RuntimeError: blocks are nested.

        Example::

            with exchange.center():
                model.evaluate(images, labels)
        """
        with self.synchronizer.center():
            yield

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check what this ``fit`` trains."""
        if self.model is not self._exchanged:
            raise ValueError(
                "PeriodicExchange is for the model that it was given: construct one for each model. Received: fit() of "
                f"{self.model.name!r}, with an exchange of {self._exchanged.name!r}"
            )
        if self._exchanged.steps_per_execution != 1:
            raise ValueError(
                "PeriodicExchange counts batches: compile the model with steps_per_execution=1. Received: "
                f"steps_per_execution={self._exchanged.steps_per_execution}"
            )
        if getattr(_innermost(self._optimizer), "use_ema", False):
            raise ValueError(
                "PeriodicExchange needs the trained weights when fit() ends, and with use_ema=True Keras has put "
                "moving averages in their place: compile with use_ema=False; the center is an average of its own"
            )
        if any(restores(fellow) for fellow in callbacks_of_fit(self)):
            raise ValueError(
                "EarlyStopping(restore_best_weights=True) would put weights of this rank alone into the model when "
                "fit() ends, in place of the center of all ranks: leave the argument out"
            )
        trained = self._exchanged.trainable_variables
        if [*map(id, trained)] != [*map(id, self._trained)]:
            raise ValueError(
                "PeriodicExchange exchanges the variables that are trainable when it is constructed: construct a new "
                f"one after layers were frozen, thawed or added. Received: {len(trained)} trainable variables, of "
                f"{len(self._trained)} then, or others"
            )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin on all ranks together, at the first batch: other callbacks may have loaded weights until then."""
        self.synchronizer.begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count a step, and exchange if an exchange is due."""
        self.synchronizer.prepare_gradients()  # Notes which there were: no algorithm here needs their values.
        self.synchronizer.step()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchange the last steps, and leave all ranks with the center in the model."""
        self.synchronizer.finalize()
        groups = list(self.synchronizer.tensor_groups)
        with self.center():
            center = [[group.values.read(bucket) for bucket in group.values.layout.buckets] for group in groups]
        for group, values in zip(groups, center, strict=True):
            for bucket, value in zip(group.values.layout.buckets, values, strict=True):
                group.values.write(bucket, value)

    @property
    def _optimizer(self) -> Any:
        """The local optimizer; None before the model is compiled."""
        return getattr(self._exchanged, "optimizer", None)

    def _learning_rate(self) -> float:
        """Return the current learning rate of the local optimizer."""
        if self._optimizer is None:
            raise ValueError("The algorithm needs the learning rate of local steps: compile the model first")
        self._values.attach()  # A schedule reads the iterations.
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))


def _check(model: Any, options: ModelOptions) -> None:
    """Raise an error for a model, or an option, with which exchanges between batches are not possible."""
    if model is None:
        raise TypeError(f"`model` must be a keras.Model. Received: {described(model)}")
    check_policy(options["buffers"], model)
    placement_of(options["center"])
    if not model.built:
        raise ValueError("The model is not built: give it an input shape, or call it once")
    if as_local_state(options["optimizer_state"]).touches:
        raise ValueError(
            "PeriodicExchange leaves the local optimizer's state alone: `optimizer_state` must be 'local'. Received: "
            f"{options['optimizer_state']!r}"
        )
    if options["nonfinite"] == SKIP:
        raise ValueError(
            "PeriodicExchange cannot exclude a rank, whose local optimizer would have to start again: `nonfinite` must "
            "be 'raise' or 'ignore'. Received: 'skip'"
        )


def _refuse_gradients(algorithm: Algorithm) -> None:
    """Raise a ValueError for an algorithm that has to see gradients."""
    if algorithm.uses_gradients:
        raise ValueError(
            f"{algorithm!r} needs the gradients of every step, which a callback of Keras never sees: take averaging, "
            "elastic averaging with rho=0, DiLoCo, SlowMo or BMUF; or train with Keras on TensorFlow and the "
            "optimizers of hvd_periodic.tensorflow"
        )


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside of a LossScaleOptimizer."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
