"""Train a classifier of handwritten digits in Keras, while workers come and go.

horovodrun --gloo -np 2 --min-np 1 --host-discovery-script hosts.sh python keras_elastic.py
"""

import argparse
from types import SimpleNamespace

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--batches-per-commit", type=int, default=10)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1)
digits = load_digits()
pixels = (digits.images / 16).astype(np.float32)[..., None]
split = train_test_split(pixels, digits.target, test_size=0.2, random_state=0)
train_images, test_images, train_labels, test_labels = split

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=args.momentum)
optimizer.build(model.trainable_variables)


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
    """Take one step."""
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowKerasState) -> None:
    """Train from wherever the state is."""
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        order = np.random.default_rng(state.epoch).permutation(len(train_images))
        batches = np.array_split(order, len(order) // (args.batch_size * hvd.size()))
        while state.batch < len(batches):
            mine = batches[state.batch][hvd.rank() :: hvd.size()]
            train_step(tf.constant(train_images[mine]), tf.constant(train_labels[mine]))
            state.batch += 1
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        state.batch = 0

        mine = slice(hvd.rank(), None, hvd.size())
        predicted = model.predict_on_batch(test_images[mine]).argmax(axis=1)
        right = tf.constant((predicted == test_labels[mine]).mean())
        accuracy = float(hvd.allreduce(right, name="HorovodAllreduce.accuracy"))
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch}: {hvd.size()} ranks, test accuracy {accuracy:.4f}", flush=True)


def on_reset() -> None:
    """Let the rate follow the number of ranks."""
    optimizer.learning_rate = args.lr * hvd.size()


# As the state of Horovod 0.28.1 knows them from Keras 2: variables of TensorFlow, those of the optimizer by a call.
weights, moments = ([variable.value for variable in owner.variables] for owner in (model, optimizer))
keras_2 = SimpleNamespace(variables=weights), SimpleNamespace(variables=lambda: moments)
state = hvd.elastic.TensorFlowKerasState(*keras_2, epoch=0, batch=0)
state.register_reset_callbacks([on_reset])
train(state)
