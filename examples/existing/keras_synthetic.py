"""Images per second of a network of keras.applications, trained on random images by a loop of its own.

horovodrun -np 2 python keras_synthetic.py --model ResNet50
"""

import argparse
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="ResNet50", help="of keras.applications")
parser.add_argument("--batch-size", type=int, default=64, help="images per step and rank")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

shape = (args.image_size, args.image_size, 3)
model = getattr(keras.applications, args.model)(weights=None, input_shape=shape, classes=1000)
loss_function = keras.losses.SparseCategoricalCrossentropy()
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_weights)
hvd.broadcast_variables([variable.value for variable in model.weights + optimizer.variables], root_rank=0)

images = tf.random.uniform((args.batch_size, *shape))
labels = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)


@tf.function
def train_step() -> None:
    """Take one step."""
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))


def train(batches: int) -> float:
    """Take some steps; return the images per second of this rank."""
    started = time.perf_counter()
    for _ in range(batches):
        train_step()
    return batches * args.batch_size / (time.perf_counter() - started)


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
