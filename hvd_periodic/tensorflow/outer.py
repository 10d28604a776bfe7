"""A Keras optimizer that moves the center; and the local optimizer's learning rate, for algorithms that need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.outer.elementwise import require_elementwise
from hvd_periodic.outer.framework import misfit
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer, StoreFragment
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer, is_scheduled, rate_of_now
from hvd_periodic.tensorflow.host import several_threads
from hvd_periodic.tensorflow.host_values import HostValues, as_tensor, blocks_of
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import FlatStore, Store

Maximum = Callable[[Any], Any]
"""Returns the maximum of a scalar over ranks."""


class FollowsRate:
    """Moves the center with the local optimizer's learning rate, on which ranks may have to agree.

    Attributes:
        maximum: returns the maximum over ranks; set by the synchronizer.
    """

    maximum: Maximum = staticmethod(lambda value: value)


class VariableOuterOptimizer(FollowsRate):
    """A Keras optimizer over the variables of the center.

    Args:
        moved: creates and steps the optimizer.
        parameters: the exchanged variables, by name, in the order of their layout.
        values: holds the variables while Python exchanges for a compiled step.
    """

    def __init__(self, moved: Any, parameters: Sequence[tuple[str, tf.Variable]], values: HostValues) -> None:
        self._moved: CenterOptimizer = moved
        self._values = values
        self._center: Store[Any]
        self._gradient: Store[Any]
        self._blocks: list[Bucket]
        self._owned: list[int] = []
        self._compiled: tuple[dict[str, object], Callable[..., list[tf.Tensor]]] | None = None
        self._parameters = list(parameters)
        self._host: tuple[list[np.ndarray], list[np.ndarray]] | None = None
        self._initial: list[Any] = []

    def clone(self) -> VariableOuterOptimizer:
        """Return a clone without a center."""
        return type(self)(self._moved.clone(), self._parameters, self._values)

    def per_fragment(self, fragments: Sequence[Fragment]) -> PerFragmentOptimizer:
        """Return one outer optimizer for each fragment."""
        return PerFragmentOptimizer(self, fragments)

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self._moved.optimizer).__name__

    @property
    def given_rate(self) -> Any:
        """The learning rate of the optimizer that was given, if users may set it; else None."""
        return self._moved.given_rate

    def slots(self, count: int) -> list[int | None]:
        """Return, for every variable over ``count`` parts of the center, the index of its part; None: of all."""
        return self._moved.slots(count)

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Build the optimizer over this rank's part of the center; a former one is replaced."""
        self._require_elementwise(center.layout, whole)
        self._moved.cut = bool(center.layout.cut)
        self._moved.bind(self._owners(center.layout), center.tensors(), gradient.tensors())
        self._center, self._gradient, buckets = center, gradient, [b for b in center.layout.buckets if b.size]
        if isinstance(center, StoreFragment) and isinstance(gradient, StoreFragment):
            self._center, self._gradient = center.store, gradient.store
            buckets = [self._center.layout.buckets[bucket.index] for bucket in buckets]
        self._blocks = [block for bucket in buckets for block in blocks_of(bucket)]
        self._owned = [owner for owner, _, _ in center.layout.sources]
        self._compiled = None

    def step(self, without: Set[int] = frozenset()) -> None:
        """Apply one step."""
        values = self._values
        passed_over = [i for i, owner in enumerate(self._owned) if owner in without]
        if self._host is not None:
            self._moved.step_host(*self._host)
        elif self._steps_on_arrays() and not passed_over and several_threads():
            self._step_compiled()
        else:
            values.release()
            self._moved.step(passed_over)

    def _steps_on_arrays(self) -> bool:
        """Return whether arrays represent the gradient, and the center has no value that its variables lack."""
        gradient = [tensor for tensor in self._gradient.tensors() if math.prod(tensor.shape)]
        return all(map(self._values.holds, gradient)) and not self._values.changed(self._center, self._blocks)

    def _step_compiled(self) -> None:
        """Apply one compiled step while arrays represent the variables.

        Single operations, which Python starts, would take ten times as long.
        """
        constants = self._moved.constants()
        if self._compiled is None or self._compiled[0] != constants:
            self._compiled = constants, self._compile()
        moved = self._compiled[1](*(as_tensor(self._gradient.read(block)) for block in self._blocks))
        for block, vector in zip(self._blocks, moved, strict=True):
            self._values.lend(self._center, block, np.asarray(vector))

    def _compile(self) -> Callable[..., list[tf.Tensor]]:
        """Return a function that takes the blocks of the gradient, and returns those of the center."""

        def step(*gradient: tf.Tensor) -> list[tf.Tensor]:
            for block, vector in zip(self._blocks, gradient, strict=True):
                self._gradient.write(block, vector)
            self._moved.step()
            return [self._center.read(block) for block in self._blocks]

        specs = [tf.TensorSpec([block.size], block.kind) for block in self._blocks]
        compiled: Callable[..., list[tf.Tensor]] = tf.function(step, autograph=False).get_concrete_function(*specs)
        return compiled

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters."""
        return self._moved.settings()

    def hyperparameters(self) -> Any:
        """Return the learning rate if it follows the local optimizer's; else None."""
        return self._moved.hyperparameters()

    def take_hyperparameters(self, settings: Any) -> None:
        """Do nothing: the learning rate is a variable, and part of the state."""

    def follow(self, settings: Any) -> None:
        """Set the learning rate of the next step, which may be another rank's; collective."""
        self._moved.take_rate(None if settings is None else settings["learning_rate"], self.maximum)

    def state(self) -> Any:
        """Return copies of the variables."""
        return self._moved.state()

    def check(self, state: Any) -> None:
        """Check the number of variables, and their shapes.

        Raises:
            ValueError: the state has more or fewer variables, or one of another shape.
        """
        here, there = ([np.shape(value) for value in values] for values in (self._moved.state(), state))
        if len(here) != len(there):
            raise misfit(self.name, f"it has {len(there)} variables, and {len(here)} here")
        for i, (own, saved) in enumerate(zip(here, there, strict=True)):
            if own != saved:
                raise misfit(self.name, f"variable {i} has shape {saved}, and {own} here")

    def load(self, state: Any) -> None:
        """Assign the variables."""
        self._moved.load_state(state)

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Build the optimizer over variables that are filled from the arrays before every step."""
        self._host = (center.tensors(), gradient.tensors())
        self._require_elementwise(center.layout, whole)
        self._moved.bind_host(self._owners(center.layout), *self._host)
        self._initial = self._moved.state()

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the optimizer's variables."""
        return self._moved.shapes([(spec.name, spec.shape, spec.kind) for spec in layout.specs])

    def reset(self) -> None:
        """Set the variables to their initial values."""
        self._moved.load_state(self._initial)

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Assign the arrays to the variables."""
        self._moved.load_state(list(arrays))

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy the variables into the arrays."""
        for array, value in zip(arrays, self._moved.state(), strict=True):
            array[...] = value

    def _owners(self, share: Layout) -> list[tuple[str, tf.Variable]]:
        return [self._parameters[tensor] for tensor, _, _ in share.sources]

    def _require_elementwise(self, share: Layout, whole: Layout) -> None:
        if share.specs and share is not whole:
            require_elementwise(self.name, share, whole, self._moved.steps)


class KerasLearningRate(FollowsRate, LearningRates):
    """The learning rate of a Keras optimizer, the same for all its variables; eagerly and in graphs."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(lambda: [optimizer.learning_rate])
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._optimizer: Any = optimizer.inner_optimizer if scales else optimizer
        self._now: Any = None

    def settings(self) -> dict[str, object]:
        """Return the learning rate by readable name.

        Raises:
            ValueError: the local optimizer has no learning rate of its own.
        """
        if hasattr(self._optimizer, "optimizers"):
            raise ValueError(
                "The algorithm needs the learning rate of local steps, and "
                f"{type(self._optimizer).__name__} consists of several optimizers, each with its own"
            )
        rate = "scheduled" if is_scheduled(self._optimizer) else f"{self._as_float()}"
        return {"learning_rate of the local optimizer": rate}

    def hyperparameters(self) -> Any:
        """Return the learning rate if it is a variable; else None."""
        return None if is_scheduled(self._optimizer) else {"learning_rate": self._as_float()}

    def follow(self, settings: Any) -> None:
        """Adopt the rate in ``settings``, or this rank's current one; in a graph, as a tensor."""
        given = None if settings is None else settings["learning_rate"]
        rate = tf.cast(rate_of_now(self._optimizer, given, self.maximum), tf.float64)
        self._now = float(rate) if tf.executing_eagerly() else rate

    def of_tensors(self, count: int) -> list[float]:
        """Return this rank's own learning rate, once for each tensor; outside graphs."""
        self.follow(None)
        return [float(self._now)] * count

    def constant_ranges(self, layout: Layout, bucket: Bucket) -> Iterator[tuple[int, int, Any]]:
        """Yield the whole bucket as one range."""
        yield 0, bucket.size, self._now

    def _as_float(self) -> float:
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))
