"""The model of elastic jobs of Keras in the tests."""

from __future__ import annotations

from typing import Any

import keras

from tests.parallel.elastic_scenarios import SIZE


class Point(keras.layers.Layer):
    """Returns its weights, in tensors of equal size, whatever it is given; and further elements of ``own``."""

    def __init__(self, tensors: int, own: int) -> None:
        super().__init__()
        self.tensors, self.owned = tensors, own

    def build(self, shape: Any) -> None:
        """Make them."""
        shape = (SIZE // self.tensors,)
        self.x = [self.add_weight(shape=shape, initializer="zeros", name=f"x{i}") for i in range(self.tensors)]
        if self.owned:
            self.own = self.add_weight(shape=(self.owned,), initializer="zeros", name="own")
            self.x.append(self.own)

    def call(self, inputs: Any) -> Any:
        """Return them."""
        return keras.ops.concatenate(self.x) + 0 * inputs


def half_square(targets: Any, points: Any) -> Any:
    """Return a loss whose gradient is the distance."""
    return 0.5 * keras.ops.sum((points - targets) ** 2)


def point_and_mean(tensors: int = 1, own: int = 0) -> tuple[keras.Model, keras.layers.Layer]:
    """Return a model whose outputs are its weights, and the layer that keeps a mean of its inputs."""
    inputs = keras.Input((SIZE + own,))
    mean = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
    return keras.Model(inputs, Point(tensors, own)(inputs) + 0 * mean(inputs)), mean
