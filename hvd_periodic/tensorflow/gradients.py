"""Prepares gradients before the local update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_periodic.tensorflow.gradient_averaging import GradientAverage
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.space import changed_if, scaled
from hvd_periodic.tensorflow.store import accumulation_dtype


class GradientPreparation:
    """Averages gradients over ranks, if requested, and applies the algorithm's local rule to them.

    Args:
        local: the optimizer that takes the local steps; with a ``LossScaleOptimizer``, gradients are scaled.
        average: averages gradients over ranks; None: they are not averaged.
        index_of: returns the index of a variable among the parameters.
    """

    def __init__(
        self,
        local: keras.optimizers.Optimizer,
        average: GradientAverage | None,
        synchronizer: VariableSynchronizer,
        index_of: Callable[[Any], int],
    ) -> None:
        self._local = local
        self._average = average
        self._synchronizer = synchronizer
        self._index_of = index_of

    def __call__(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], Any]:
        """Return the gradients for the local update, and whether it will run: a bool, or a boolean scalar tensor."""
        present = (v for v, gradient in zip(variables, gradients, strict=True) if gradient is not None)
        self._synchronizer.replica.with_gradients.update(map(self._index_of, present))
        gradients = self._averaged(gradients, variables)
        updated, scale = self._updates(gradients)
        if self._synchronizer.gradients.needed_by is not None and updated is not False:
            gradients = self._shown(gradients, variables, updated, scale)
        return gradients, updated

    def _averaged(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks of a DistributedOptimizer as long as it averages."""
        average, synchronizer = self._average, self._synchronizer
        if average is None or (tf.executing_eagerly() and synchronizer.warmup.finished):
            return gradients
        if tf.executing_eagerly() or synchronizer.warmup.until is None:
            return average(gradients, variables)
        trained = [variable for variable, gradient in zip(variables, gradients, strict=True) if gradient is not None]
        return changed_if(synchronizer.steps_to_switch() > 0, gradients, lambda present: average(present, trained))

    def _updates(self, gradients: list[Any]) -> tuple[Any, Any]:
        """Return whether the local update will run, and the scale of the gradients; None if they are not scaled."""
        if not isinstance(self._local, keras.optimizers.LossScaleOptimizer):
            return True, self._local.loss_scale_factor
        finite = self._local.check_finite(gradients)
        return bool(finite) if tf.executing_eagerly() else finite, native(self._local.dynamic_scale)

    def _shown(self, gradients: list[Any], variables: list[Any], updated: Any, scale: Any) -> list[Any]:
        """Return the gradients after the algorithm's local rule, which sees them without their scale."""
        pairs = zip(variables, gradients, strict=True)
        position = [self._index_of(variable) for variable, gradient in pairs if gradient is not None]
        trained = self._synchronizer.replica.trained

        def unscaled(gradient: Any) -> Any:
            """Return a gradient without its scale, in a dtype in which it does not underflow."""
            return scaled(1.0 / scale, tf.cast(gradient, accumulation_dtype(gradient.dtype)))

        def show(present: list[Any]) -> list[Any]:
            shown: list[Any] = [None] * trained
            for index, gradient in zip(position, present, strict=True):
                shown[index] = gradient if scale is None else unscaled(gradient)
            shown = self._synchronizer.prepare_gradients(shown)
            return [shown[index] if scale is None else scaled(scale, shown[index]) for index in position]

        return changed_if(updated, gradients, show)
