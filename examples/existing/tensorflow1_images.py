"""Train a classifier of handwritten digits in a TensorFlow 1 graph.

horovodrun -np 2 python tensorflow1_images.py
"""

import argparse
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
parser.add_argument("--steps", type=int, default=500, help="divided by the number of ranks")
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)
hvd.init()
tf.set_random_seed(args.seed + hvd.rank())
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())

digits = load_digits()
pixels = (digits.images / 16).astype(np.float32)[..., None]
split = train_test_split(pixels, digits.target, test_size=0.2, random_state=0)
train_images, test_images, train_labels, test_labels = split


def convolution(x: tf.Tensor, channels: int, training: tf.Tensor, scope: str) -> tf.Tensor:
    """Convolve and normalize; moving averages are updated by operations in UPDATE_OPS."""
    with tf.variable_scope(scope):
        filters = tf.get_variable("filters", [3, 3, x.shape[-1], channels])
        scale = tf.get_variable("scale", channels, initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", channels, initializer=tf.zeros_initializer())
        mean = tf.get_variable("mean", channels, initializer=tf.zeros_initializer(), trainable=False)
        variance = tf.get_variable("variance", channels, initializer=tf.ones_initializer(), trainable=False)
    y = tf.nn.conv2d(x, filters, 1, "SAME")
    of_batch = tf.nn.moments(y, [0, 1, 2])
    for average, value in zip((mean, variance), of_batch, strict=True):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * value))
    mean, variance = tf.cond(training, lambda: of_batch, lambda: (mean.read_value(), variance.read_value()))
    return tf.nn.relu(tf.nn.batch_normalization(y, mean, variance, offset, scale, 1e-3))


def network(x: tf.Tensor, training: tf.Tensor) -> tf.Tensor:
    """Return the logits."""
    x = convolution(convolution(x, 16, training, "conv1"), 32, training, "conv2")
    x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "SAME"), [-1, 4 * 4 * 32])
    return tf.matmul(x, tf.get_variable("weights", [4 * 4 * 32, 10]))


class Broadcast(tf.train.SessionRunHook):
    """Let all ranks start from the variables of the first."""

    def begin(self) -> None:
        """Make the operation."""
        self.operation = hvd.broadcast_variables(tf.global_variables(), root_rank=0)

    def after_create_session(self, session: tf.Session, coord: Any) -> None:
        """Run it."""
        session.run(self.operation)


class Evaluate(tf.train.SessionRunHook):
    """Print the test accuracy at the end."""

    def end(self, session: tf.Session) -> None:
        """Evaluate the test images."""
        value = session.run(accuracy, {images: test_images, labels: test_labels})
        if hvd.rank() == 0:
            print(f"Test accuracy {value:.4f}")


def shuffled() -> Iterator[dict[tf.Tensor, np.ndarray | bool]]:
    """Yield the batches of this rank, every epoch in another order that all ranks share."""
    random = np.random.default_rng(args.seed)
    while True:
        order = random.permutation(len(train_images))[hvd.rank() :: hvd.size()]
        for batch in np.array_split(order, len(order) // args.batch_size):
            yield {images: train_images[batch], labels: train_labels[batch], training: True}


images = tf.placeholder(tf.float32, [None, 8, 8, 1])
labels = tf.placeholder(tf.int64, [None])
training = tf.placeholder_with_default(False, [])
logits = network(images, training)
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
global_step = tf.train.get_or_create_global_step()
optimizer = tf.train.MomentumOptimizer(args.lr * hvd.size(), 0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = optimizer.minimize(loss, global_step=global_step)

hooks = [Broadcast(), tf.train.StopAtStepHook(last_step=args.steps // hvd.size()), Evaluate()]
if hvd.rank() == 0:
    hooks.append(tf.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=50))
batches = shuffled()
with tf.train.MonitoredTrainingSession(config=config, hooks=hooks) as session:
    while not session.should_stop():
        session.run(train_op, next(batches))
