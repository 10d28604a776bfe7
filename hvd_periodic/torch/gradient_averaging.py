"""A wrapped ``hvd.DistributedOptimizer``: the ranks whose gradients it averages, and when to wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.warmup import SynchronousWarmup

_NEVER_REACHED = 2**60
"""Backward passes between averages of a DistributedOptimizer that must leave the gradients alone."""


class GradientAveraging:
    """The part of a step that concerns a wrapped ``hvd.DistributedOptimizer``; does nothing if there is none.

    Args:
        inner: the wrapped optimizer, which may be a DistributedOptimizer or contain one.
        group: the ranks whose gradients the DistributedOptimizer averages, if there is one.
        phase: the synchronous warmup, in which gradients are averaged.
        progress: reports changes of the local steps.

    Attributes:
        present: whether there is a DistributedOptimizer.
        done: whether the user has waited for the averages, and perhaps changed them.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        group: JobCommunicator | None,
        phase: SynchronousWarmup,
        progress: ProgressTracker,
    ) -> None:
        self._inner: Any = inner
        self._warmup = phase
        self.present = group is not None
        self.done = False
        self._direct = self.present and not hasattr(inner, "synchronizer")
        self._passes = getattr(inner, "backward_passes_per_step", 1)
        if self._direct and self._warmup.until is not None:
            progress.changed = self._follow_phase
            self._follow_phase()

    @property
    def in_flight(self) -> bool:
        """Whether averages of gradients are in flight, from the backward pass on."""
        return self.present and not self.done and not self._warmup.finished

    def wait(self) -> None:
        """Wait for the averages, unless the warmup has ended: replicas then differ, and nothing is averaged."""
        if self.present and not self._warmup.finished:
            self._inner.synchronize()

    @contextmanager
    def waited(self) -> Iterator[None]:
        """Use the gradients as they are inside a ``with`` block."""
        self.done = True
        try:
            yield
        finally:
            self.done = False

    def step(self) -> Any:
        """Step the wrapped optimizer, after its averages have been waited for."""
        if not self.present:
            return self._inner.step()
        with self._inner.skip_synchronize():
            return self._inner.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradients of the wrapped optimizer; Horovod's does not take ``set_to_none``."""
        if not self._direct:
            self._inner.zero_grad(set_to_none=set_to_none)
        elif self._warmup.finished:
            torch.optim.Optimizer.zero_grad(self._inner, set_to_none)  # Horovod's requires a step that averages.
        else:
            self._inner.zero_grad()

    def _follow_phase(self) -> None:
        """Make the DistributedOptimizer leave the gradients alone while the replicas may differ."""
        passes = _NEVER_REACHED if self._warmup.finished else self._passes
        if self._inner.backward_passes_per_step != passes:
            self._inner.set_backward_passes_per_step(passes)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside nested optimizers of this package."""
    while hasattr(optimizer, "synchronizer"):
        optimizer = optimizer.inner
    return optimizer


def gradient_group_of(optimizer: Any) -> HorovodCommunicator | None:
    """Return the ranks whose gradients a DistributedOptimizer averages; None for other optimizers.

    Raises:
        TypeError: the DistributedOptimizer averages something other than gradients.
        ValueError: this rank is not in the DistributedOptimizer's process set.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "skip_synchronize"):
        return None
    if not hasattr(optimizer, "process_set"):
        raise TypeError("An hvd.DistributedOptimizer with op=hvd.Adasum has no local steps: use op=hvd.Average")
    return HorovodCommunicator("horovod.torch", optimizer.process_set, torch.from_numpy)


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the innermost optimizer; for a DistributedOptimizer, the class that it was made from."""
    inner = innermost(optimizer)
    return type(inner).__bases__[0] if hasattr(inner, "skip_synchronize") else type(inner)
