"""A Horovod DistributedOptimizer inside: the ranks whose gradients it averages, and the steps at which it does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.contrib_opt.counters import CounterVariables
from hvd_periodic.tensorflow.contrib_opt.pairs import Pairs, trained_by
from hvd_periodic.tensorflow.contrib_opt.python_call import sent_from_root
from hvd_periodic.tensorflow.contrib_opt.session_startup import ROOT
from hvd_periodic.tensorflow.contrib_opt.turns import Turn
from hvd_periodic.tensorflow.space import changed_if


def gradient_group_of(opt: Any) -> TensorFlowCommunicator | None:
    """Return the ranks whose gradients a DistributedOptimizer averages; None for other optimizers.

    Raises:
        TypeError: it does not average gradients.
        ValueError: several backward passes per step; or this rank is not among its ranks.
    """
    if "Adasum" in type(opt).__name__:
        raise TypeError("An hvd.DistributedOptimizer with op=hvd.Adasum has no local steps: use op=hvd.Average")
    if not hasattr(opt, "_allreduce_grads"):
        return None
    if opt._agg_helper is not None:
        raise ValueError(
            "backward_passes_per_step > 1 inside is for PyTorch only: here a step would be counted at every backward "
            "pass. Use larger batches"
        )
    return TensorFlowCommunicator(opt.process_set)


def plain(opt: Any) -> Any:
    """Return the optimizer inside a DistributedOptimizer; any other optimizer unchanged."""
    return opt._optimizer if hasattr(opt, "_allreduce_grads") else opt


class SynchronousPhase:
    """Computes gradients, which a DistributedOptimizer averages until local steps begin.

    Args:
        until: the step up to which gradients are averaged; None if there is no such phase.
        communicator: the ranks that exchange, of which the root alone may have restored its steps; None if a hook gives
            all ranks the same start.

    Attributes:
        turn: the turn of the optimizer, once it has a train op.
    """

    def __init__(
        self, opt: Any, until: int | None, counters: CounterVariables, communicator: Communicator | None, name: str
    ) -> None:
        self._opt, self._until, self._counters = opt, until, counters
        self._communicator, self._name = communicator, name
        self.turn: Turn = nullcontext

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the (gradient, variable) pairs of the local optimizer, which gets these arguments."""
        inside = plain(self._opt)
        if self._until is None or inside is self._opt:
            return list(self._opt.compute_gradients(*args, **kwargs))
        averages = self._steps() < self._until
        pairs: Pairs = inside.compute_gradients(*args, **kwargs)
        trained = trained_by(pairs)
        if not trained:
            return pairs
        gradients, variables = zip(*pairs, strict=True)

        def average(present: list[Any]) -> list[Any]:
            return list(self._opt._allreduce_grads(present, trained))

        return list(zip(changed_if(averages, gradients, average), variables, strict=True))

    def _steps(self) -> tf.Tensor:
        """Return the local steps so far; in the first step, those of the root."""
        counted, communicator = self._counters.local_steps(), self._communicator
        if communicator is None:
            return counted
        with tf.control_dependencies(self._counters.check):
            routes = [(communicator, self._name, ROOT)]
            return self._counters.first.steps_of_all(
                lambda own: sent_from_root([own], counted.op.name, lambda: routes, lambda: self.turn())[0]
            )
