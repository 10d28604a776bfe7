"""Forwards the settings of a wrapper to the optimizer inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_periodic.tensorflow.stage import Stage

FOLLOWED = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm")
"""Settings of a local optimizer that its copy for the center follows."""


def _context(name: str) -> property:
    def read(self: ForwardedSettings) -> Any:
        return getattr(self.plain_optimizer, name) if self._forwards() else None

    def write(self: ForwardedSettings, value: Any) -> None:
        if self._forwards():
            self._set(name, value)

    return property(read, write, doc=f"``{name}`` of the wrapped optimizer.")


class ForwardedSettings(keras.optimizers.Optimizer):
    """A wrapper that forwards its settings to the optimizer that takes the local steps.

    As everywhere in Keras, a compiled step keeps the settings with which it was compiled.
    """

    inner_optimizer: keras.optimizers.Optimizer
    stage = Stage.CONSTRUCTING
    _center: Any = None

    weight_decay = _context("weight_decay")
    clipnorm = _context("clipnorm")
    clipvalue = _context("clipvalue")
    global_clipnorm = _context("global_clipnorm")
    use_ema = _context("use_ema")
    ema_momentum = _context("ema_momentum")
    ema_overwrite_frequency = _context("ema_overwrite_frequency")
    gradient_accumulation_steps = _context("gradient_accumulation_steps")

    @property
    def plain_optimizer(self) -> Any:
        """The optimizer inside of all wrappers of this package and of Keras."""
        return _plain(self)

    def _forwards(self) -> bool:
        """Return whether settings are forwarded; not while Keras constructs or builds the wrapper, which has none."""
        return self.stage not in (Stage.CONSTRUCTING, Stage.BUILDING)

    def _set(self, name: str, value: Any) -> None:
        plain = self.plain_optimizer
        if hasattr(plain, "optimizers"):
            raise ValueError(f"Set `{name}` on the optimizers that the {type(plain).__name__} inside consists of")
        if self._center is not None and name in FOLLOWED:
            self._center.follow(name, value)
        setattr(plain, name, value)

    @property
    def variables(self) -> list[Any]:
        """All variables: of the wrapper, of the wrapped optimizer, and of the center optimizer."""
        center = [] if self._center is None else self._center.variables
        return self._variables + self.inner_optimizer.variables + center

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the wrapped optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Iterations of the wrapped optimizer; exchanges count in ``synchronizer.local_steps``."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> float:
        """1, since the wrapped optimizer scales the loss."""
        return 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # A LossScaleOptimizer around this optimizer sets the factor to None.
        if self.stage > Stage.CONSTRUCTING:
            raise ValueError(
                f"{type(self).__name__} must not be inside a LossScaleOptimizer, under which a rank whose gradients "
                "overflow would not count the step: the LossScaleOptimizer goes inside, "
                f"{type(self).__name__}(keras.optimizers.LossScaleOptimizer(optimizer), ...), and model.compile(..., "
                "auto_scale_loss=False) keeps Keras from adding another"
            )

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the wrapped optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the weight decay of the wrapped optimizer and of its copy for the center."""
        self.plain_optimizer.exclude_from_weight_decay(var_list, var_names)
        if self._center is not None:
            self._center.follow_exclusions()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set all :attr:`variables`, in their order.

        Raises:
            ValueError: the optimizer is not built; or weights do not match its variables in number or shape.
        """
        name, variables = type(self).__name__, self.variables
        if not self.built:
            raise ValueError(f"{name} is not built, and has no weights to set: call optimizer.build(variables)")
        received, expected = [tuple(weight.shape) for weight in weights], [tuple(v.shape) for v in variables]
        if received != expected:
            raise ValueError(f"{name} has variables of the shapes {expected}. Received: {received}")
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)


def innermost(optimizer: Any) -> Any:
    """Unwrap nested optimizers of this package."""
    while isinstance(optimizer, ForwardedSettings):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _plain(optimizer: Any) -> Any:
    while isinstance(optimizer, (ForwardedSettings, keras.optimizers.LossScaleOptimizer)):
        optimizer = optimizer.inner_optimizer
    return optimizer


def optimizers_inside(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers inside all wrappers: one, or all optimizers of a MultiOptimizer."""
    plain = _plain(optimizer)
    return getattr(plain, "optimizers", [plain])


def show_inside(optimizer: Any) -> None:
    """Make the optimizers that keep moving averages visible to Keras's ``SwapEMAWeights``.

    The callback looks inside one wrapper only, the periodic optimizer, and then for an attribute ``optimizers``; the
    argument is the optimizer directly inside a periodic one.
    """
    if isinstance(optimizer, (ForwardedSettings, keras.optimizers.LossScaleOptimizer)):
        optimizer.optimizers = tuple(optimizers_inside(optimizer))
