"""The synchronous phase, in which a DistributedOptimizer inside averages gradients before local steps begin."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.tensorflow.contrib_opt.counters import CounterVariables
from hvd_periodic.tensorflow.contrib_opt.gradient_averaging import plain
from hvd_periodic.tensorflow.contrib_opt.pairs import Pairs, trained_by, with_gradient
from hvd_periodic.tensorflow.contrib_opt.session_startup import ROOT
from hvd_periodic.tensorflow.space import in_form_of


class SynchronousPhase:
    """Computes gradients, and averages them over ranks until local steps begin.

    Args:
        opt: the local optimizer.
        distributed: whether it is a DistributedOptimizer.
        until: the step up to which gradients are averaged; None if there is no such phase.
        counters: counts local steps.
        communicator: the ranks that exchange, of which the root alone may have restored its steps; None if a hook gives
            all ranks the same start.
        name: name of the optimizer.
    """

    def __init__(
        self,
        opt: Any,
        distributed: bool,
        until: int | None,
        counters: CounterVariables,
        communicator: Communicator | None,
        name: str,
    ) -> None:
        self._opt = opt
        self._distributed = distributed
        self._until = until
        self._counters = counters
        self._communicator = communicator
        self._name = name

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the (gradient, variable) pairs of the local optimizer, which gets these arguments."""
        begun = self._begun()
        if begun is None or not self._distributed:
            return list(self._opt.compute_gradients(*args, **kwargs))
        return self._averaged_until(begun, plain(self._opt).compute_gradients(*args, **kwargs))

    def _begun(self) -> tf.Tensor | None:
        """Return whether the local steps after the phase have begun; None if there is no such phase."""
        if self._until is None:
            return None
        counted = self._counters.local_steps()
        communicator = self._communicator
        if communicator is None:
            return counted >= self._until
        with tf.control_dependencies(self._counters.check):
            name = f"{self._name}.{counted.op.name}"
            steps = self._counters.first.steps_of_all(lambda own: communicator.broadcast(own, name, ROOT))
        return steps >= self._until

    def _averaged_until(self, begun: tf.Tensor, pairs: Pairs) -> Pairs:
        """Return pairs whose gradients the DistributedOptimizer averages until ``begun``."""
        gradients, variables = [gradient for gradient, _ in with_gradient(pairs)], trained_by(pairs)
        means: list[Any] = []

        def mean() -> list[Any]:
            means[:] = self._opt._allreduce_grads(gradients, variables)
            return means

        def leave() -> list[Any]:
            return [in_form_of(form, gradient) for form, gradient in zip(means, gradients, strict=True)]

        if not gradients:
            return pairs
        chosen = iter(tf.cond(tf.logical_not(begun), mean, leave))
        return [(gradient if gradient is None else next(chosen), variable) for gradient, variable in pairs]
