"""Prepares gradients before the local update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_periodic.tensorflow.gradient_averaging import GradientAverage
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.space import in_form_of, scaled
from hvd_periodic.tensorflow.store import accumulation_dtype


class GradientPreparation:
    """Averages gradients over ranks, if requested, and applies the algorithm's local rule to them.

    Args:
        local: the optimizer that takes the local steps; with a ``LossScaleOptimizer``, gradients are scaled.
        average: averages gradients over ranks; None: they are not averaged.
        synchronizer: holds the algorithm, and the step at which averaging ends.
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
        self._synchronizer.replica.seen.update(map(self._index_of, present))
        gradients = self._averaged(gradients, variables)
        updated, scale = self._updates(gradients)
        if self._synchronizer.algorithm.uses_gradients and updated is not False:
            gradients = self._shown(gradients, variables, updated, scale)
        return gradients, updated

    def _averaged(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks of a DistributedOptimizer as long as it averages."""
        average, synchronizer = self._average, self._synchronizer
        if average is None or (tf.executing_eagerly() and synchronizer.warmup.finished):
            return gradients
        if tf.executing_eagerly() or synchronizer.warmup.until is None:
            return average(gradients, variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        shown = [gradients[i] for i in present]
        means: list[Any] = []

        def mean() -> list[Any]:
            means[:] = average(shown, [variables[i] for i in present])
            return means

        def leave() -> list[Any]:
            return [in_form_of(form, gradient) for form, gradient in zip(means, shown, strict=True)]

        averaged = list(gradients)
        for i, gradient in zip(present, tf.cond(synchronizer.steps_to_switch() > 0, mean, leave), strict=True):
            averaged[i] = gradient
        return averaged

    def _updates(self, gradients: list[Any]) -> tuple[Any, Any]:
        """Return whether the local update will run, and the scale of the gradients; None if they are not scaled."""
        if not isinstance(self._local, keras.optimizers.LossScaleOptimizer):
            return True, self._local.loss_scale_factor
        finite = self._local.check_finite(gradients)
        return bool(finite) if tf.executing_eagerly() else finite, native(self._local.dynamic_scale)

    def _shown(self, gradients: list[Any], variables: list[Any], updated: Any, scale: Any) -> list[Any]:
        """Return the gradients after the algorithm's local rule, which sees them without their scale."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        position = [self._index_of(variables[i]) for i in present]
        parameters = len(self._synchronizer.replica.parameters.layout.specs)
        prepared: list[Any] = []

        def unscaled(gradient: Any) -> Any:
            """Return a gradient without its scale, in a dtype in which it does not underflow."""
            return scaled(1.0 / scale, tf.cast(gradient, accumulation_dtype(gradient.dtype)))

        def show() -> list[Any]:
            shown: list[Any] = [None] * parameters
            for i, index in zip(present, position, strict=True):
                shown[index] = gradients[i] if scale is None else unscaled(gradients[i])
            shown = self._synchronizer.prepare_gradients(shown)
            prepared[:] = [shown[index] if scale is None else scaled(scale, shown[index]) for index in position]
            return prepared

        def skip() -> list[Any]:
            """Return non-finite gradients in the form of the results of ``show``, which was traced before."""
            return [in_form_of(form, gradients[i]) for i, form in zip(present, prepared, strict=True)]

        made = list(gradients)
        for i, gradient in zip(present, show() if updated is True else tf.cond(updated, show, skip), strict=True):
            made[i] = gradient
        return made
