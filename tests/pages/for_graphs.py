"""What the blocks in TensorFlow 1 talk about."""

import tensorflow.compat.v1 as tf


def loss_of_model() -> tf.Tensor:
    """Any model."""
    weights = tf.get_variable("w", (3,), initializer=tf.zeros_initializer())
    return tf.reduce_sum(tf.square(weights - 1.0))


__all__ = ["loss_of_model"]
