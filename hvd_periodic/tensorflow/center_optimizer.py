"""The Keras optimizer that moves the center, with its own state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.arguments import outer_name
from hvd_periodic.keras.model import described
from hvd_periodic.tensorflow.private import decays, exclude_same_names, track
from hvd_periodic.tensorflow.store import array_of

_OF_LOCAL_STEPS_ONLY: dict[str, Any] = {
    "use_ema": False,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
}
"""Settings that a copy does not inherit: it steps once per exchange, on gradients without a loss scale."""


_PLAIN = (bool, int, float, str, type(None))
"""Types of settings that become constants in a compiled function."""

MARK = 0.73918246
"""A value with which no optimizer state starts on its own."""


class CenterOptimizer:
    """A Keras optimizer over the center variables.

    A copy of the local optimizer has its class and hyper-parameters, and takes its current learning rate before every
    step, so that a schedule follows the local steps. It shares no state with the original.

    Args:
        local: the local optimizer, which is copied if ``optimizer`` is None.
        optimizer: another optimizer, not yet built.

    Attributes:
        optimizer: the optimizer that moves the center.
        cut: whether the centers are parts of tensors.
        others: clones, one per fragment of the parameters; if there are any, this one has no center itself.

    Raises:
        TypeError: ``optimizer`` is not a Keras optimizer; or the local one cannot be copied.
        ValueError: ``optimizer`` is the local one or has been used already.
    """

    def __init__(self, local: Any, optimizer: Any = None) -> None:
        self._local, self._followed = local, None
        self.others: list[CenterOptimizer] = []
        if optimizer is None:
            plain = local.inner_optimizer if isinstance(local, keras.optimizers.LossScaleOptimizer) else local
            self._followed = plain
            optimizer = copied(plain, _OF_LOCAL_STEPS_ONLY, learning_rate=0.0, name=f"center_{plain.name}")
        elif not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"`{outer_name()}` must be a Keras optimizer. Received: {described(optimizer)}")
        elif optimizer is local or optimizer.built:
            raise ValueError(f"`{outer_name()}` must be an optimizer of its own that has not been used yet")
        self.optimizer: Any = optimizer
        self.cut = False
        self._owner: Any = None
        self._name = ""
        self._given_rate: Any = None
        self._parameters: list[Any] = []
        self._centers: list[Any] = []

    def clone(self) -> CenterOptimizer:
        """Return a clone without a center, which takes the learning rate of this one before every step."""
        self.others.append(self.successor())
        if self._owner is not None:
            self.others[-1].track(self._owner, f"{self._name}_{len(self.others) - 1}")
        return self.others[-1]

    def successor(self) -> CenterOptimizer:
        """Return one without a center and an owner, which takes the learning rate of this one before every step."""
        made = CenterOptimizer(self._local, None if self.copied else unused(self.optimizer))
        made._given_rate = self.given_rate
        return made

    def track(self, owner: Any, name: str) -> None:
        """Register the center's optimizer with TensorFlow as a part of ``owner``, under a name."""
        self._owner, self._name = owner, name
        track(owner, self.optimizer, name)

    @property
    def given_rate(self) -> Any:
        """The learning rate of the optimizer that was given, if users may set it; else None."""
        if self._given_rate is not None or self.copied or is_scheduled(self.optimizer):
            return self._given_rate
        return self.optimizer.learning_rate

    @property
    def variables(self) -> list[Any]:
        """The state of the optimizer, or of all clones."""
        return [variable for each in self.others or [self] for variable in each.optimizer.variables]

    @property
    def copied(self) -> bool:
        """Whether the center's optimizer is a copy of the local one."""
        return self._followed is not None

    @property
    def _scheduled(self) -> bool:
        """Whether the local optimizer's rate is a schedule over its iterations, which may differ between ranks."""
        return self._followed is not None and is_scheduled(self._followed)

    def bind(
        self,
        parameters: Sequence[tuple[str, tf.Variable]],
        centers: Sequence[tf.Variable],
        gradients: Sequence[tf.Variable],
    ) -> None:
        """Build the optimizer over the centers of named parameters; ``gradients`` will hold their gradients.

        For another shard of the center a new optimizer is created, since Keras builds an optimizer only once.
        """
        if self.optimizer.built:
            self._given_rate, self.optimizer = self.given_rate, unused(self.optimizer)
            if self._owner is not None:
                self.track(self._owner, self._name)
        pairs = zip(parameters, centers, strict=True)
        self._centers = [_named(path, center) for (path, _), center in pairs]
        self._parameters, self._gradients = [variable for _, variable in parameters], list(gradients)
        self.follow_exclusions()
        self._build()

    def _build(self) -> None:
        """Build the optimizer; its state must not depend on the centers' values, which are not set yet."""
        values = [center.numpy() for center in self._centers]  # zeros, or values that a checkpoint has just restored
        for center in self._centers:
            center.assign(tf.fill(center.shape, tf.cast(MARK, center.dtype)))
        self.optimizer.build(self._centers)
        copies = [v for v in self.optimizer.variables if v.shape and np.allclose(v.numpy(), MARK, rtol=1e-6)]
        for center, value in zip(self._centers, values, strict=True):
            center.assign(value)
        if any(np.size(copy.numpy()) for copy in copies):
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps a copy of the variables in its state, which would not follow a "
                f"center that is broadcast or restored: pass another `{outer_name()}`"
            )

    def follow(self, name: str, value: Any) -> None:
        """Adopt a setting of the local optimizer if this is a copy of it."""
        if self.copied and getattr(self.optimizer, name) != value:
            if self.cut and name in ("clipnorm", "global_clipnorm") and value is not None:
                raise ValueError(
                    f"`center='sharded'` cuts tensors, and `{name}` needs whole ones: use center='root', or another "
                    f"`{outer_name()}`. Received: {name}={value!r}"
                )
            setattr(self.optimizer, name, value)
        for other in self.others:
            other.follow(name, value)

    def follow_exclusions(self) -> None:
        """Exclude centers from weight decay if the local optimizer excludes their variables."""
        if self._followed is not None and self._centers:
            pairs = zip(self._parameters, self._centers, strict=True)
            spared = [center for parameter, center in pairs if not decays(self._followed, parameter)]
            self.optimizer.exclude_from_weight_decay(var_list=spared)
        for other in self.others:
            other.follow_exclusions()

    def take_rate(self, given: Any, maximum: Callable[[Any], Any]) -> None:
        """Set the learning rate of the next step, see :func:`rate_of_now`."""
        if self._followed is not None:
            self.optimizer.learning_rate = rate_of_now(self._followed, given, maximum)
        elif self._given_rate is not None:
            self.optimizer.learning_rate = tf.convert_to_tensor(self._given_rate)  # it would adopt a variable

    def step(self, passed_over: Collection[int] = ()) -> None:
        """Move the centers by their gradients, except those ``passed_over``, by index."""
        moved = [i for i in range(len(self._centers)) if i not in passed_over]
        gradients = [tf.convert_to_tensor(self._gradients[i]) for i in moved]
        self.optimizer.apply(gradients, [self._centers[i] for i in moved])

    def constants(self) -> dict[str, object]:
        """Return the settings that a compiled :meth:`step` would contain as constants."""
        plain = {name: value for name, value in vars(self.optimizer).items() if isinstance(value, _PLAIN)}
        spared = [decays(self.optimizer, center) for center in self._centers]
        return {**plain, "weight decay": spared}

    def shapes(self, centers: Sequence[tuple[str, tuple[int, ...], str]]) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the optimizer's variables for given centers, found from a copy."""
        trial = copied(self.optimizer, learning_rate=0.0)
        made = [(path, tf.Variable(tf.zeros(shape, dtype), trainable=False)) for path, shape, dtype in centers]
        trial.build([_named(path, variable) for path, variable in made])
        return [(tuple(variable.shape), variable.dtype) for variable in trial.variables]

    def slots(self, count: int) -> list[int | None]:
        """Return, for every variable of the optimizer over ``count`` centers, the index of its center; None: of all.

        The answer comes from a copy over vectors of different lengths.

        Raises:
            ValueError: the optimizer has state per center whose shape differs from the center's.
        """
        slots = self._slots_of_copy(count)
        if slots.count(None) != self._slots_of_copy(0).count(None):
            raise ValueError(
                f"`center='sharded'` cuts tensors again when ranks change, and {type(self.optimizer).__name__} keeps "
                f"state per tensor that differs from it in shape: use center='root', or another `{outer_name()}`"
            )
        return slots

    def _slots_of_copy(self, count: int) -> list[int | None]:
        trial, shortest = copied(self.optimizer), 11
        with tf.init_scope():
            trial.build([keras.Variable(tf.zeros(shortest + i), trainable=False) for i in range(count)])
        owners = {(shortest + i,): i for i in range(count)}
        return [owners.get(tuple(variable.shape)) for variable in trial.variables]

    def steps(self, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        """Return ``x`` after one step per gradient of a new optimizer of this kind."""
        with tf.init_scope():
            trial = copied(self.optimizer, learning_rate=0.1)
            moved = tf.Variable(x, dtype=tf.float32, trainable=False)
            trial.build([moved])
            for gradient in gradients:
                trial.apply([tf.constant(gradient, tf.float32)], [moved])
            return np.asarray(moved)

    def bind_host(
        self, parameters: Sequence[tuple[str, Any]], centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> None:
        """Build the optimizer over variables that mirror arrays in host memory."""
        variables = [tf.Variable(tf.zeros_like(array), trainable=False) for array in (*centers, *gradients)]
        self.bind(parameters, variables[: len(centers)], variables[len(centers) :])

    def step_host(self, centers: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
        """Apply one step to the arrays."""
        pairs = [*zip(self._centers, centers, strict=True), *zip(self._gradients, gradients, strict=True)]
        for variable, array in pairs:
            variable.assign(array)
        self.take_rate(None, lambda value: value)
        self.step()
        for variable, array in zip(self._centers, centers, strict=True):
            array[...] = variable.numpy()

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step, by readable name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a learning rate that cannot be saved
            config = self.optimizer.get_config()
        rate = self.given_rate if self._followed is None else self._followed.learning_rate
        rate = self.optimizer.learning_rate if rate is None else rate
        config["learning_rate"] = "scheduled" if self._scheduled else float(keras.ops.convert_to_numpy(rate))
        return {f"{key} of the center optimizer": value for key, value in sorted(config.items()) if key != "name"}

    def hyperparameters(self) -> dict[str, float] | None:
        """Return the learning rate if it is a variable of the local optimizer, which ranks may set differently."""
        if self._followed is None or self._scheduled:
            return None
        return {"learning_rate": float(keras.ops.convert_to_numpy(self._followed.learning_rate))}

    def state(self) -> list[Any]:
        """Return copies of the optimizer's variables, as numpy arrays."""
        return [array_of(variable) for variable in self.optimizer.variables]

    def load_state(self, state: list[Any]) -> None:
        """Assign a state that :meth:`state` returned."""
        for variable, value in zip(self.optimizer.variables, state, strict=True):
            variable.assign(value)


def is_scheduled(optimizer: Any) -> bool:
    """Return whether the learning rate is a schedule over the iterations, which may differ between ranks."""
    return not isinstance(optimizer.learning_rate, keras.Variable)


def rate_of_now(optimizer: Any, given: Any, maximum: Callable[[Any], Any]) -> tf.Tensor:
    """Return the current learning rate for all ranks, as a tensor, since an optimizer would adopt a variable.

    Args:
        optimizer: the local optimizer.
        given: the rate on which ranks have agreed, if there is one.
        maximum: returns the maximum over ranks. With a schedule, ranks that skipped updates or have fewer steps are
            behind; all take the rate of the ranks with the most iterations.
    """
    rate = tf.convert_to_tensor(optimizer.learning_rate)
    if is_scheduled(optimizer):
        iterations = tf.convert_to_tensor(optimizer.iterations)
        return maximum(tf.where(iterations == maximum(iterations), rate, 0.0))
    return rate if given is None else tf.cast(given, rate.dtype)


def _named(path: str, variable: tf.Variable) -> keras.Variable:
    """Return a variable under the path of another, since some Keras optimizers treat variables by their paths."""
    *scopes, name = path.split("/")
    with ExitStack() as stack:
        for scope in filter(None, scopes):
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(variable, dtype=variable.dtype.name, trainable=False, autocast=False, name=name)


def unused(optimizer: Any) -> Any:
    """Return an unused copy of an optimizer, with the same exclusions from weight decay by name."""
    made = copied(optimizer)
    exclude_same_names(made, optimizer)
    return made


def copied(optimizer: Any, replaced: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Any:
    """Return an unused optimizer of the same class and configuration, except for ``changes``.

    Args:
        optimizer: any Keras optimizer.
        replaced: further changes, applied only to arguments that the optimizer has.
        changes: changed arguments, which the optimizer must have.

    Raises:
        TypeError: the optimizer cannot be created from its configuration.
    """
    kind = type(optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a learning rate that cannot be saved, which is not copied
            config = {**optimizer.get_config(), **changes}
        return kind.from_config({**config, **{key: replaced[key] for key in replaced.keys() & config.keys()}})
    except Exception as error:
        raise TypeError(
            f"The center needs an optimizer of its own, and {kind.__name__} cannot be copied with a learning rate by "
            f"its get_config() and from_config() ({type(error).__name__}: {error}): pass `{outer_name()}`, an unused "
            "optimizer of one learning rate whose get_config() holds all arguments of its constructor"
        ) from error
