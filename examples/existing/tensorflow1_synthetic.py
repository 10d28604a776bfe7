"""Images per second of a residual network in a TensorFlow 1 graph, trained on random images.

horovodrun -np 2 python tensorflow1_synthetic.py
"""

import argparse
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=64, help="images per step and rank")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
parser.add_argument("--blocks", type=int, default=2, help="per stage")
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
args = parser.parse_args()

tf.disable_v2_behavior()
hvd.init()
tf.set_random_seed(hvd.rank())
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())


def convolution(x: tf.Tensor, channels: int, size: int, stride: int, scope: str) -> tf.Tensor:
    """Convolve and normalize over the batch."""
    with tf.variable_scope(scope):
        filters = tf.get_variable("filters", [size, size, x.shape[-1], channels])
        scale = tf.get_variable("scale", [channels], initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", [channels], initializer=tf.zeros_initializer())
    y = tf.nn.conv2d(x, filters, stride, "SAME")
    mean, variance = tf.nn.moments(y, [0, 1, 2])
    return tf.nn.batch_normalization(y, mean, variance, offset, scale, 1e-3)


def block(x: tf.Tensor, channels: int, stride: int, scope: str) -> tf.Tensor:
    """Two convolutions and a shortcut around them."""
    with tf.variable_scope(scope):
        y = tf.nn.relu(convolution(x, channels, 3, stride, "first"))
        y = convolution(y, channels, 3, 1, "second")
        return tf.nn.relu(y + (x if stride == 1 else convolution(x, channels, 1, stride, "shortcut")))


def residual_net(x: tf.Tensor, width: int, blocks: int, classes: int = 1000) -> tf.Tensor:
    """Return the logits of a network of four stages, each with half the resolution and twice the channels."""
    x = tf.nn.relu(convolution(x, width, 3, 2, "stem"))
    for stage in range(4):
        for i in range(blocks):
            x = block(x, width * 2**stage, 2 if stage and i == 0 else 1, f"stage{stage}/block{i}")
    weights = tf.get_variable("weights", [8 * width, classes])
    return tf.matmul(tf.reduce_mean(x, [1, 2]), weights)


images = tf.random_uniform([args.batch_size, args.image_size, args.image_size, 3])
labels = tf.random_uniform([args.batch_size], maxval=1000, dtype=tf.int64)
logits = residual_net(images, args.width, args.blocks)
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
optimizer = tf.train.MomentumOptimizer(args.lr * hvd.size(), 0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
train_op = optimizer.minimize(loss)
start = hvd.broadcast_global_variables(root_rank=0)

with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    session.run(start)

    def train(batches: int) -> float:
        """Take some steps; return the images per second of this rank."""
        seconds = timeit.timeit(lambda: session.run(train_op), number=batches)
        return batches * args.batch_size / seconds

    train(args.num_warmup_batches)
    speeds = []
    for i in range(args.num_iters):
        speeds.append(train(args.num_batches_per_iter))
        if hvd.rank() == 0:
            print(f"Iteration {i}: {speeds[-1]:.1f} images/s per rank")
mean, deviation = np.mean(speeds), 1.96 * np.std(speeds)
if hvd.rank() == 0:
    print(f"Images/s per rank: {mean:.1f} +- {deviation:.1f}")
    print(f"Images/s on {hvd.size()} ranks: {hvd.size() * mean:.1f} +- {hvd.size() * deviation:.1f}")
