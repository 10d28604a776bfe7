"""What the blocks in Keras talk about."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_periodic import tensorflow as hvdp

hvd.init()
generator = np.random.default_rng(hvd.rank())
images, labels = generator.normal(size=(48, 4)).astype("float32"), generator.integers(3, size=48)
test_images, test_labels = images[:16], labels[:16]
loss = "sparse_categorical_crossentropy"
epochs = 2


def dataset(rank: int = 0, ranks: int = 1) -> tf.data.Dataset:
    """The shard of a rank."""
    return tf.data.Dataset.from_tensor_slices((images[rank::ranks], labels[rank::ranks])).batch(8)


def make_model() -> keras.Model:
    """Any model, with statistics."""
    layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    return keras.Sequential([*layers, keras.layers.Softmax()])


shard = dataset(hvd.rank(), hvd.size())
model = make_model()
local = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer = local

__all__ = [
    "dataset",
    "epochs",
    "hvd",
    "hvdp",
    "images",
    "keras",
    "labels",
    "local",
    "loss",
    "make_model",
    "model",
    "np",
    "optimizer",
    "shard",
    "test_images",
    "test_labels",
    "tf",
]
