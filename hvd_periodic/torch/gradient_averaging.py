"""An ``hvd.DistributedOptimizer`` inside: whose gradients it averages, and when it is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.sync.ledger import Ledger
from hvd_periodic.sync.phase import Phase

_NEVER_REACHED = 2**60
"""Backward passes until a DistributedOptimizer averages gradients that it is to leave alone."""


class GradientAveraging:
    """The part of a step that concerns an ``hvd.DistributedOptimizer`` inside; nothing where there is none.

    Args:
        inner: the optimizer that is wrapped, which is one, or has one inside.
        group: the ranks whose gradients it averages, if there is one.
        phase: of training, around it.
        ledger: tells when local steps change.

    Attributes:
        present: whether there is one.
        done: whether the user has waited for the averages, and changed them perhaps.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, group: JobCommunicator | None, phase: Phase, ledger: Ledger
    ) -> None:
        self._inner: Any = inner
        self._phase = phase
        self.present = group is not None
        self.done = False
        self._direct = self.present and not hasattr(inner, "synchronizer")
        self._passes = getattr(inner, "backward_passes_per_step", 1)
        if self._direct and self._phase.until is not None:
            ledger.changed = self._follow_phase
            self._follow_phase()

    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way between ranks, from the backward pass on."""
        return self.present and not self.done and not self._phase.over

    def wait(self) -> None:
        """Wait for the averages, unless replicas differ by now, and nothing is averaged any longer."""
        if self.present and not self._phase.over:
            self._inner.synchronize()

    @contextmanager
    def waited(self) -> Iterator[None]:
        """Take the gradients as they are, inside a ``with`` block."""
        self.done = True
        try:
            yield
        finally:
            self.done = False

    def step(self) -> Any:
        """Let the wrapped optimizer step, on gradients that have been waited for."""
        if not self.present:
            return self._inner.step()
        with self._inner.skip_synchronize():
            return self._inner.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Let the wrapped optimizer reset its gradients; one of Horovod's has no choice of how."""
        if not self._direct:
            self._inner.zero_grad(set_to_none=set_to_none)
        elif self._phase.over:
            torch.optim.Optimizer.zero_grad(self._inner, set_to_none)  # Horovod's asks for a step that averages.
        else:
            self._inner.zero_grad()

    def _follow_phase(self) -> None:
        """Let the DistributedOptimizer leave the gradients alone while the replicas are to differ."""
        passes = _NEVER_REACHED if self._phase.over else self._passes
        if self._inner.backward_passes_per_step != passes:
            self._inner.set_backward_passes_per_step(passes)


def innermost(optimizer: Any) -> Any:
    """Return what the optimizers of this package, one in the other, are around."""
    while hasattr(optimizer, "synchronizer"):
        optimizer = optimizer.inner
    return optimizer


def gradient_group_of(optimizer: Any) -> HorovodCommunicator | None:
    """Return the ranks whose gradients a DistributedOptimizer averages; None of another optimizer.

    Raises:
        TypeError: it is one that averages something else.
        ValueError: it is for ranks of which this is none.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "skip_synchronize"):
        return None
    if not hasattr(optimizer, "process_set"):
        raise TypeError("An hvd.DistributedOptimizer with op=hvd.Adasum has no local steps: use op=hvd.Average")
    return HorovodCommunicator("horovod.torch", optimizer.process_set, torch.from_numpy)


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the innermost optimizer; of a DistributedOptimizer, the one that it was made of."""
    inner = innermost(optimizer)
    return type(inner).__bases__[0] if hasattr(inner, "skip_synchronize") else type(inner)
