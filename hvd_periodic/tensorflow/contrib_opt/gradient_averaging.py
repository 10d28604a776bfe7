"""A Horovod DistributedOptimizer inside, and the ranks whose gradients it averages at every step."""

from __future__ import annotations

from typing import Any

from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator


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
