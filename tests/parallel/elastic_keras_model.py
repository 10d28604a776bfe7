"""The model of elastic jobs of Keras in the tests."""

from __future__ import annotations

from typing import Any

import keras

from tests.parallel.elastic_scenarios import SIZE


class Point(keras.layers.Layer):
    """Returns its weights, in tensors of equal size, whatever it is given."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.tensors = tensors

    def build(self, shape: Any) -> None:
        """Make them."""
        shape = (SIZE // self.tensors,)
        self.x = [self.add_weight(shape=shape, initializer="zeros", name=f"x{i}") for i in range(self.tensors)]

    def call(self, inputs: Any) -> Any:
        """Return them."""
        return keras.ops.concatenate(self.x) + 0 * inputs


def half_square(targets: Any, points: Any) -> Any:
    """Return a loss whose gradient is the distance."""
    return 0.5 * keras.ops.sum((points - targets) ** 2)


def point_and_mean(tensors: int = 1) -> tuple[keras.Model, keras.layers.Layer]:
    """Return a model whose outputs are its weights, and the layer that keeps a mean of its inputs."""
    inputs = keras.Input((SIZE,))
    mean = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
    return keras.Model(inputs, Point(tensors)(inputs) + 0 * mean(inputs)), mean
