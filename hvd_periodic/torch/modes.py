"""Optimizers that evaluate the model at a different point than they train it, such as schedule-free ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvd_periodic.torch.copies import TRIAL_STEPS, fresh_copy, settings_in
from hvd_periodic.torch.gradient_averaging import innermost
from hvd_periodic.torch.neutral import random_numbers_kept
from hvd_periodic.torch.sharded_parameters import shard_of


class Modes:
    """The modes of an optimizer whose ``train()`` continues from the evaluation point that ``eval()`` has set.

    The modes of other optimizers, such as those that evaluate a separate moving average, are left alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer: Any = innermost(optimizer)
        if optimizer is None or not _continues_from_evaluation(self._optimizer):
            self._optimizer = None

    @property
    def any(self) -> bool:
        """Whether the optimizer has such modes."""
        return self._optimizer is not None

    def evaluate(self) -> bool:
        """Put the evaluation point into the parameters; return whether the optimizer was in train mode."""
        if self._optimizer is None:
            return False
        before = _flags(self._optimizer)
        self._optimizer.eval()
        return _flags(self._optimizer) != before

    @contextmanager
    def evaluating(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold the evaluation point in the tensors inside a ``with`` block; training continues from its final values.

        Tensors that the block has not changed get their previous values back, bit for bit.
        """
        if self._optimizer is None:
            yield
            return
        shards = [shard_of(tensor).detach() for tensor in tensors]
        trained = [shard.clone() for shard in shards]
        was_training = self.evaluate()
        evaluated = [shard.clone() for shard in shards] if was_training else []
        try:
            yield
        finally:
            left = [shard.clone() for shard in shards]
            (self._optimizer.train if was_training else self._optimizer.eval)()
            for i, shard in enumerate(shards):
                if not was_training:
                    shard.copy_(left[i])  # The user has called train() in the block.
                elif torch.equal(left[i], evaluated[i]):
                    shard.copy_(trained[i])


def _flags(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the plain values in groups and attributes, where an optimizer may record its mode."""
    places = [*map(settings_in, optimizer.param_groups), vars(optimizer)]
    return [{key: value for key, value in place.items() if isinstance(value, (bool, str, int))} for place in places]


def _continues_from_evaluation(optimizer: Any) -> bool:
    """Return whether a change at the evaluation point carries over to train mode, as tried out on a copy."""
    if not (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))):
        return False
    try:
        with random_numbers_kept():
            ends = [_end(optimizer, added) for added in (0.0, 1.0)]
    except Exception:
        return False
    return not torch.equal(*ends)


def _end(optimizer: torch.optim.Optimizer, added: float) -> torch.Tensor:
    """Return a copy's parameter in train mode after some steps, with ``added`` added at its evaluation point."""
    probe = torch.nn.Parameter(torch.zeros(2, 2))  # Near zero, even the small steps of a warm-up show.
    trial: Any = fresh_copy(optimizer, probe)
    for _ in range(TRIAL_STEPS):
        probe.grad = torch.ones_like(probe)
        trial.step()
    trained = probe.detach().clone()
    trial.eval()
    if torch.equal(probe, trained):
        raise ValueError  # It evaluates the point that it trains.
    with torch.no_grad():
        probe.add_(added)
    trial.train()
    return probe.detach()
