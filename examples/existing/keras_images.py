"""Train a classifier of handwritten digits in Keras.

horovodrun -np 2 python keras_images.py
"""

import argparse
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(args.seed + hvd.rank())
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

digits = load_digits()
pixels = (digits.images / 16).astype(np.float32)[..., None]
split = train_test_split(pixels, digits.target, test_size=0.2, random_state=0)
train_images, test_images, train_labels, test_labels = split
shard = slice(hvd.rank(), len(train_images) // hvd.size() * hvd.size(), hvd.size())


class AverageMetrics(keras.callbacks.Callback):
    """Average the metrics of an epoch over ranks."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the means into the logs."""
        for name in sorted(logs := logs or {}):
            logs[name] = float(hvd.allreduce(tf.constant(logs[name]), name=f"metrics.{name}"))


def warm_up(epoch: int, lr: float) -> float:
    """Return the learning rate of an epoch: from that of one rank to that of all."""
    return args.lr * (1 + (hvd.size() - 1) * min(1, (epoch + 1) / args.warmup_epochs))


model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.RandomTranslation(0.05, 0.05, fill_mode="constant"),
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
hvd.broadcast_variables([weight.value for weight in model.weights], root_rank=0)
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(optimizer)
# XLA, by which Keras compiles on a GPU, has no collectives of Horovod.
model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
callbacks = [AverageMetrics(), keras.callbacks.LearningRateScheduler(warm_up)]
model.fit(
    train_images[shard],
    train_labels[shard],
    batch_size=args.batch_size,
    epochs=args.epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
if hvd.rank() == 0:
    print(f"Test loss {loss:.4f}, test accuracy {accuracy:.4f}")
