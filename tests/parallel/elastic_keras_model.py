"""The model of elastic jobs of Keras in the tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from tests.parallel.elastic_scenarios import SIZE, has_seldom, led_target, target, touched


class Point(keras.layers.Layer):
    """Returns its weights, in tensors of equal size, whatever it is given; and further elements of ``own``.

    It has further weights, by name, which it does not return.
    """

    def __init__(self, tensors: int, own: int, further: Collection[str]) -> None:
        super().__init__()
        self.tensors, self.owned, self.further = tensors, own, further

    def build(self, shape: Any) -> None:
        """Make them."""
        shape = (SIZE // self.tensors,)
        self.x = [self.add_weight(shape=shape, initializer="zeros", name=f"x{i}") for i in range(self.tensors)]
        if self.owned:
            self.own = self.add_weight(shape=(self.owned,), initializer="zeros", name="own")
            self.x.append(self.own)
        for name in self.further:
            self.add_weight(shape=(SIZE, 1) if name == "table" else (1,), initializer="zeros", name=name)

    def call(self, inputs: Any) -> Any:
        """Return them."""
        return keras.ops.concatenate(self.x) + 0 * inputs


def half_square(targets: Any, points: Any) -> Any:
    """Return a loss whose gradient is the distance."""
    return 0.5 * keras.ops.sum((points - targets) ** 2)


def gradient_of(variable: keras.Variable, rank: int, step: int) -> Any:
    """Return the gradient of a further weight in a step; None if the step has none."""
    if variable.name == "seldom" and not has_seldom(rank, step):
        return None
    if variable.name == "table":
        return (variable - np.array(target(rank, step))[:, None]) * touched(rank, step)[:, None]
    return variable - led_target(rank)


def point_and_mean(
    tensors: int = 1, own: int = 0, further: Collection[str] = ()
) -> tuple[keras.Model, keras.layers.Layer]:
    """Return a model whose outputs are its weights, and the layer that keeps a mean of its inputs."""
    inputs = keras.Input((SIZE + own,))
    mean = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
    return keras.Model(inputs, Point(tensors, own, further)(inputs) + 0 * mean(inputs)), mean
