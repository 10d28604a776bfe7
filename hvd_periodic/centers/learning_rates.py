"""The learning rates of the local optimizers, for algorithms whose center moves in proportion to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvd_periodic.vectors.layout import Bucket, Layout


class LearningRates:
    """Learning rates that each rank reads from its local optimizer, and on which ranks agree for an exchange.

    Like the hyper-parameters of an outer optimizer, they may differ between ranks: a scheduler lags behind on a rank
    that skipped updates.

    Args:
        read: returns the learning rate of every tensor, in their order.

    Example:
        >>> LearningRates(lambda: [0.1, 0.1]).settings()
        {'learning_rate of the local optimizer': '[0.1, 0.1]'}
    """

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read
        self._followed: Sequence[Any] | None = None

    def settings(self) -> dict[str, object]:
        """Return the learning rates by readable name."""
        return {"learning_rate of the local optimizer": str(list(self._read()))}

    def hyperparameters(self) -> Any:
        """Return the learning rates in the form that :meth:`follow` takes on another rank."""
        return list(self._read())

    def follow(self, settings: Any) -> None:
        """Use the learning rates of another rank for the next exchange; None: this rank's own."""
        self._followed = settings

    def of_tensors(self, count: int) -> list[float]:
        """Return this rank's own learning rates as numbers, one for each of the ``count`` tensors."""
        return [float(rate) for rate in self._read()]

    def constant_ranges(self, layout: Layout, bucket: Bucket) -> Iterator[tuple[int, int, Any]]:
        """Yield the ranges of a bucket with one learning rate: first and past-the-last element, and the rate.

        The bucket is one of the layout of this rank's shard.
        """
        rates = self._read() if self._followed is None else self._followed
        yield from layout.constant_ranges(bucket, rates.__getitem__)
