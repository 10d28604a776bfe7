"""An ``hvd.DistributedOptimizer`` inside: whose gradients it averages, and how.

Horovod has no public names for that. ``tests/parallel/test_distributed_tensorflow.py`` fails where these change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.model import native


class GradientAverage:
    """Averages gradients over ranks with the settings of an ``hvd.DistributedOptimizer`` of Keras.

    With Keras 3, Horovod 0.28.1's own optimizer does not average gradients, and it cannot be saved.

    Attributes:
        communicator: the ranks over which gradients are averaged.

    Raises:
        ValueError: several backward passes per step; or this rank is not among the ranks.
    """

    def __init__(self, distributed: Any) -> None:
        if distributed._agg_helper is not None:
            raise ValueError(
                "backward_passes_per_step > 1 is not for Keras 3, whose optimizers accumulate gradients themselves: "
                "pass gradient_accumulation_steps to the optimizer inside of the hvd.DistributedOptimizer"
            )
        self.communicator = TensorFlowCommunicator(distributed.process_set)
        self._distributed = distributed

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the means over ranks, with Horovod's settings for compression and sparse gradients."""
        return list(self._distributed._allreduce(list(gradients), [native(variable) for variable in variables]))


def is_distributed(optimizer: object) -> bool:
    """Return whether this is an ``hvd.DistributedOptimizer`` of Keras."""
    return isinstance(optimizer, keras.optimizers.Optimizer) and hasattr(optimizer, "_allreduce_grads")


def refuse_as_subclass(made: type) -> None:
    """Raise a TypeError for a subclass that ``hvd.DistributedOptimizer`` creates to wrap an optimizer."""
    if "_allreduce" in vars(made):
        raise TypeError(
            "An hvd.DistributedOptimizer goes inside of an optimizer of hvd_periodic, not around it: "
            "hvdp.ElasticAverageOptimizer(hvd.DistributedOptimizer(optimizer, ...), model, ...)"
        )


def split_distributed(optimizer: Any) -> tuple[Any, GradientAverage | None]:
    """Return the optimizer that a DistributedOptimizer wraps, and its averaging; others unchanged, and None.

    The DistributedOptimizer may be inside a LossScaleOptimizer.

    Raises:
        ValueError: the DistributedOptimizer has been used before; or as :class:`GradientAverage`.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and is_distributed(optimizer.inner_optimizer):
        plain, average = split_distributed(optimizer.inner_optimizer)
        settings = {key: value for key, value in optimizer.get_config().items() if key != "inner_optimizer"}
        return keras.optimizers.LossScaleOptimizer(plain, **settings), average
    if not is_distributed(optimizer):
        return optimizer, None
    if optimizer.built:
        raise ValueError("The hvd.DistributedOptimizer inside has been used already: pass a new one")
    made_of: Any = type(optimizer).__bases__[0]
    return made_of.from_config(optimizer.get_config()), GradientAverage(optimizer)
