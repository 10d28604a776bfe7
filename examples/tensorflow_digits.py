"""Train a Keras classifier of handwritten digits on several workers that exchange every few steps.

horovodrun -np 2 python examples/tensorflow_digits.py --algorithm easgd --period 10 --loop fit

Without Horovod, over MPI or torch.distributed:

HVD_PERIODIC_COMM=mpi mpirun -np 2 python examples/tensorflow_digits.py --algorithm easgd --period 10 --loop fit
torchrun --standalone --nproc-per-node 2 examples/tensorflow_digits.py --algorithm easgd --period 10 --loop fit
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import time
from contextlib import nullcontext
from typing import Any

import digits
import flags
import keras
import numpy as np
import tensorflow as tf
import workers
from tqdm import tqdm

import hvd_periodic.tensorflow as hvdp

if workers.LIBRARY == "horovod":
    import horovod.tensorflow as hvd


def build_model() -> keras.Model:
    """Return a small convolutional network with batch normalization."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(32, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


class EveryStep(keras.optimizers.SGD):
    """The baseline: SGD on gradients that are averaged at every step."""

    def __init__(self, model: keras.Model, **options: Any) -> None:
        super().__init__(**options)
        model.set_weights(workers.gather(model.get_weights())[0])
        self.build(model.trainable_variables)
        self.bytes_per_step = 4 * model.count_params()
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        with tf.control_dependencies(grads):
            started = tf.timestamp()
        if workers.LIBRARY == "horovod":
            means = [total / hvd.size() for total in hvd.grouped_allreduce(grads, op=hvd.Sum)]
        else:
            means = self.average_in_python(grads)
        with tf.control_dependencies(means):
            self.seconds.assign_add(tf.timestamp() - started)
        super().apply(means, trainable_variables)

    @staticmethod
    def average_in_python(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means over all workers, by one call of Python."""

        def average(joined: np.ndarray) -> np.ndarray:
            mean = joined.copy()
            workers.average(mean)
            return mean

        joined = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        mean = tf.ensure_shape(tf.numpy_function(average, [joined], joined.dtype), joined.shape)
        parts = tf.split(mean, [gradient.shape.num_elements() for gradient in gradients])
        return [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


def make_optimizer(args: flags.argparse.Namespace, model: keras.Model, steps: int) -> keras.optimizers.Optimizer:
    """Return the optimizer for an algorithm, of a training with so many steps."""
    rate: Any = args.learning_rate
    if args.decay:
        rate = keras.optimizers.schedules.CosineDecay(args.learning_rate, steps, alpha=0.1)
    if args.algorithm == "allreduce":
        return EveryStep(model, learning_rate=rate, momentum=args.momentum)
    return hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(rate, momentum=args.momentum),
        model,
        flags.algorithm(args),
        flags.schedule(args, steps),
        asynchronous=args.asynchronous,
        center=args.center,
        optimizer_state=args.optimizer_state,
        compression=flags.compression(args),
        fragments=args.fragments,
    )


class Recorder(keras.callbacks.Callback):
    """Collects loss, distance to the center and exchanges, step by step, and the accuracy of the center."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, progress: tqdm, center_accuracy: Any) -> None:
        super().__init__()
        self.center_accuracy = center_accuracy
        self.course: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.distances: list[float] = []
        self.exchange_steps: list[int] = []
        self.optimizer, self.progress = optimizer, progress
        self.rounds = self.before = 0

    def step(self, loss: float) -> None:
        """Record one step."""
        self.losses.append(loss)
        rounds, distance = len(self.losses), 0.0
        if isinstance(self.optimizer, hvdp.PeriodicOptimizer):
            self.optimizer.synchronizer.report(loss)  # AdaComm asks for it
            rounds, distance = self.optimizer.synchronizer.rounds, self.optimizer.synchronizer.distance()
        self.distances.append(distance)
        if rounds > self.rounds:
            self.exchange_steps.append(len(self.losses))
        self.rounds = rounds
        self.progress.update()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record the accuracy of the center."""
        self.course.append((int(self.rounds), self.center_accuracy()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record one step of ``model.fit``, which tells the mean of the losses since the start of the epoch."""
        total = logs["loss"] * (batch + 1)
        self.step(total - (self.before if batch else 0.0))
        self.before = total


def train_by_tape(model: keras.Model, optimizer: Any, data: tf.data.Dataset, epochs: int, recorder: Recorder) -> None:
    """Train in a loop of our own."""
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(epochs):
        for images, labels in data:
            recorder.step(float(train_step(images, labels)))
        recorder.on_epoch_end(epoch)


def accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of images that the model recognizes."""
    return float((model(images, training=False).numpy().argmax(axis=1) == labels).mean())


def train(args: flags.argparse.Namespace) -> digits.Run:
    """Train this worker's replica; return the record of all workers."""
    workers.init("tensorflow")
    keras.utils.set_random_seed(args.seed + workers.rank())  # different on purpose: the root's weights are given to all
    shard, test = digits.load(workers.rank(), workers.size())
    images, test_images = np.moveaxis(shard.images, 1, -1), np.moveaxis(test.images, 1, -1)
    data = tf.data.Dataset.from_tensor_slices((images, shard.labels))
    data = data.shuffle(len(images), seed=args.seed + workers.rank()).batch(args.batch_size, drop_remainder=True)
    model = build_model()
    steps = args.epochs * len(data)
    optimizer = make_optimizer(args, model, steps)
    periodic = isinstance(optimizer, hvdp.PeriodicOptimizer)
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)

    def center_accuracy() -> float:
        with optimizer.center() if periodic else nullcontext():
            return accuracy(model, test_images, test.labels)

    hidden = args.no_progress or workers.rank() > 0
    started = time.perf_counter()
    with tqdm(total=steps, desc=args.algorithm, unit="step", disable=hidden or None, mininterval=0.5) as progress:
        recorder = Recorder(optimizer, progress, center_accuracy)
        if args.loop == "fit":
            model.fit(data, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[recorder])
        else:
            train_by_tape(model, optimizer, data, args.epochs, recorder)
    seconds = time.perf_counter() - started

    if periodic:
        optimizer.synchronizer.finalize()
        counters = optimizer.synchronizer.counters
        exchanges, bytes_sent, exchange_seconds = counters.rounds, counters.bytes_sent, counters.exchange_seconds
    else:
        exchanges, bytes_sent = steps, steps * optimizer.bytes_per_step
        exchange_seconds = float(optimizer.seconds)
    worker_accuracy = accuracy(model, test_images, test.labels)
    at_end = center_accuracy()
    records = workers.gather((worker_accuracy, recorder.losses, recorder.distances))
    return digits.Run(
        algorithm=args.algorithm,
        framework=f"tensorflow, {args.loop}",
        workers=workers.size(),
        period=args.period if periodic else 1,
        steps=steps,
        worker_accuracy=[worker[0] for worker in records],
        center_accuracy=at_end,
        exchanges=exchanges,
        bytes_sent=bytes_sent,
        exchange_seconds=exchange_seconds,
        seconds=seconds,
        losses=[worker[1] for worker in records],
        distances=[worker[2] for worker in records],
        exchange_steps=recorder.exchange_steps,
        staleness=counters.staleness_mean if args.asynchronous else None,
        schedule=args.schedule,
        optimizer_state=args.optimizer_state,
        compression=args.compression,
        fragments=args.fragments,
        course=recorder.course,
    )


def main() -> None:
    """Train and report, or compare earlier runs."""
    placements = ("replicated", "root", "sharded")
    wires = ("compression", "fragments")
    args = flags.parse(__doc__.splitlines()[0], loops=("fit", "tape"), placements=placements, wires=wires)
    if args.compare:
        digits.compare(args.compare)
        return
    for chosen in flags.runs(args):
        run = train(chosen)
        if workers.rank() == 0:
            run.save(args.output)
    if workers.rank() == 0:
        digits.report(args, run)


if __name__ == "__main__":
    main()
