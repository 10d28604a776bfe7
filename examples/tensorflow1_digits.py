"""Train a classifier of handwritten digits in a TensorFlow 1 graph, with the optimizers of tf.contrib.opt.

horovodrun -np 2 python examples/tensorflow1_digits.py --algorithm easgd --period 10

Without Horovod, over MPI or torch.distributed:

HVD_PERIODIC_COMM=mpi mpirun -np 2 python examples/tensorflow1_digits.py --algorithm easgd --period 10
torchrun --standalone --nproc-per-node 2 examples/tensorflow1_digits.py --algorithm easgd --period 10
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import digits
import flags
import numpy as np
import tensorflow.compat.v1 as tf
import workers
from tqdm import tqdm

from hvd_periodic.tensorflow import contrib_opt

if workers.LIBRARY == "horovod":
    import horovod.tensorflow as hvd

tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()

GETTERS = {
    "easgd": contrib_opt.ElasticAverageCustomGetter,
    "average": contrib_opt.ModelAverageCustomGetter,
    "agn": contrib_opt.AGNCustomGetter,
}


def batch_normalization(inputs: Any, training: Any, scope: str) -> Any:
    """Normalize over batch and image; moving averages are updated by operations in UPDATE_OPS."""
    channels = inputs.shape[-1]
    with tf.variable_scope(scope):
        scale = tf.get_variable("scale", channels, initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", channels, initializer=tf.zeros_initializer())
        mean = tf.get_variable("moving_mean", channels, initializer=tf.zeros_initializer(), trainable=False)
        variance = tf.get_variable("moving_variance", channels, initializer=tf.ones_initializer(), trainable=False)
    batch_mean, batch_variance = tf.nn.moments(inputs, [0, 1, 2])
    for average, value in ((mean, batch_mean), (variance, batch_variance)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * value))
        tf.add_to_collection(tf.GraphKeys.MOVING_AVERAGE_VARIABLES, average)
    mean = tf.where(training, batch_mean, mean)
    variance = tf.where(training, batch_variance, variance)
    return tf.nn.batch_normalization(inputs, mean, variance, offset, scale, 1e-3)


def convolution(inputs: Any, channels: int, scope: str) -> Any:
    """Convolve with 3 x 3 filters."""
    with tf.variable_scope(scope):
        filters = tf.get_variable("filters", [3, 3, inputs.shape[-1], channels])
        bias = tf.get_variable("bias", channels, initializer=tf.zeros_initializer())
    return tf.nn.conv2d(inputs, filters, strides=1, padding="SAME") + bias


def build_model(images: Any, training: Any) -> Any:
    """Return the logits of a small convolutional network with batch normalization."""
    hidden = tf.nn.relu(batch_normalization(convolution(images, 16, "conv1"), training, "bn1"))
    hidden = tf.nn.relu(batch_normalization(convolution(hidden, 32, "conv2"), training, "bn2"))
    hidden = tf.reshape(tf.nn.max_pool2d(hidden, 2, 2, "SAME"), [-1, 4 * 4 * 32])
    weights = tf.get_variable("weights", [4 * 4 * 32, 10])
    return tf.matmul(hidden, weights) + tf.get_variable("bias", 10, initializer=tf.zeros_initializer())


def make_optimizer(args: flags.argparse.Namespace, getter: Any) -> Any:
    """Return the optimizer for an algorithm."""
    local = tf.train.MomentumOptimizer(args.learning_rate, args.momentum)
    wire = flags.compression(args)
    if args.algorithm == "easgd":
        rate = args.moving_rate if args.beta is None else args.beta / workers.size()
        return contrib_opt.ElasticAverageOptimizer(
            local,
            workers.size(),
            getter,
            communication_period=args.period,
            moving_rate=rate,
            rho=args.rho,
            asynchronous=args.asynchronous,
            compression=wire,
        )
    if args.algorithm == "average":
        is_chief = workers.rank() == 0
        return contrib_opt.ModelAverageOptimizer(local, workers.size(), is_chief, getter, args.period, compression=wire)
    if args.algorithm == "agn":
        return contrib_opt.AGNOptimizer(
            local, workers.size(), getter, args.period, asynchronous=args.asynchronous, compression=wire
        )
    return hvd.DistributedOptimizer(local)


class BroadcastAtStart(tf.train.SessionRunHook):
    """Gives all workers the root's variables: what the baseline needs."""

    def begin(self) -> None:
        self.operation = hvd.broadcast_variables(tf.global_variables(), root_rank=0)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.operation)


def make_hook(args: flags.argparse.Namespace, optimizer: Any) -> Any:
    """Return the hook that makes all workers start alike."""
    if args.algorithm == "allreduce":
        return BroadcastAtStart()
    if args.algorithm == "average":
        return optimizer.make_session_run_hook()
    return optimizer.make_session_run_hook(is_chief=workers.rank() == 0, task_index=workers.rank())


def distance_to_center() -> Any:
    """Return the distance of the local variables to the center variables."""
    everything = {variable.op.name: variable for variable in tf.global_variables()}
    squares = [
        tf.reduce_sum(tf.square(local - everything[f"{contrib_opt.GLOBAL_VARIABLE_NAME}/{local.op.name}"]))
        for local in tf.trainable_variables()
    ]
    return tf.sqrt(tf.add_n(squares))


def evaluate(checkpoint: str, data: digits.Digits) -> float:
    """Return the accuracy of a checkpoint, in a graph without training."""
    with tf.Graph().as_default(), tf.Session() as session:
        logits = build_model(tf.constant(np.moveaxis(data.images, 1, -1)), tf.constant(False))
        tf.train.Saver().restore(session, checkpoint)
        return float((session.run(logits).argmax(axis=1) == data.labels).mean())


def train(args: flags.argparse.Namespace) -> digits.Run:
    """Train this worker's replica; return the record of all workers."""
    workers.init("tensorflow")
    tf.set_random_seed(args.seed + workers.rank())  # different on purpose: the root's weights are given to all
    random = np.random.default_rng(args.seed + workers.rank())
    data, test = digits.load(workers.rank(), workers.size())
    data.images = np.moveaxis(data.images, 1, -1)
    periodic = args.algorithm != "allreduce"

    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf.placeholder(tf.int64, [None])
    training = tf.placeholder_with_default(True, [])
    getter = GETTERS[args.algorithm](worker_device="") if periodic else None
    with tf.variable_scope("", custom_getter=getter):
        logits = build_model(images, training)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    global_step = tf.train.get_or_create_global_step()
    optimizer = make_optimizer(args, getter)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = optimizer.minimize(loss, global_step=global_step)
    final = optimizer.get_final_op() if args.asynchronous else tf.no_op()
    distance = distance_to_center() if periodic else tf.constant(0.0)
    counters = {variable.op.name.rpartition("/")[2]: variable for variable in tf.local_variables()}
    averages = tf.get_collection(tf.GraphKeys.MOVING_AVERAGE_VARIABLES)
    saved = tf.trainable_variables() + averages
    savers = [tf.train.Saver(saved), optimizer.swapping_saver(saved) if periodic else tf.train.Saver(saved)]

    losses: list[float] = []
    distances: list[float] = []
    exchange_steps: list[int] = []
    batches = len(data.images) // args.batch_size
    steps = args.epochs * batches
    hidden = args.no_progress or workers.rank() > 0
    with (
        tempfile.TemporaryDirectory() as folder,
        tf.train.MonitoredTrainingSession(is_chief=True, hooks=[make_hook(args, optimizer)]) as session,
    ):
        started, rounds = time.perf_counter(), 0
        with tqdm(total=steps, desc=args.algorithm, unit="step", disable=hidden or None, mininterval=0.5) as progress:
            for _ in range(args.epochs):
                order = random.permutation(len(data.images))
                for batch in np.split(order[: batches * args.batch_size], batches):
                    value, _ = session.run([loss, train_op], {images: data.images[batch], labels: data.labels[batch]})
                    losses.append(float(value))
                    step, away = session.run([global_step, distance])
                    distances.append(float(away))
                    if step > rounds:
                        exchange_steps.append(len(losses))
                    rounds = step
                    progress.update()
        seconds = time.perf_counter() - started
        checkpoints = [str(Path(folder) / name) for name in ("worker", "center")]

        def save(step_context: Any) -> None:
            step_context.session.run(final)
            for saver, checkpoint in zip(savers, checkpoints, strict=True):
                saver.save(step_context.session, checkpoint)

        session.run_step_fn(save)
        worker_accuracy, center_accuracy = (evaluate(checkpoint, test) for checkpoint in checkpoints)
        bytes_sent = steps * 4 * sum(int(np.prod(v.shape)) for v in tf.trainable_variables())
        exchange_seconds = None  # Horovod's DistributedOptimizer does not tell
        if periodic:
            bytes_sent, exchange_seconds = session.run([counters["bytes_sent"], counters["exchange_seconds"]])
            missed = session.run(counters["pushes_missed"])
    with tf.Session():
        records = workers.gather((worker_accuracy, losses, distances))
    return digits.Run(
        algorithm=args.algorithm,
        framework="tensorflow 1",
        workers=workers.size(),
        period=args.period if periodic else 1,
        steps=steps,
        worker_accuracy=[worker[0] for worker in records],
        center_accuracy=center_accuracy,
        exchanges=int(rounds),
        bytes_sent=int(bytes_sent),
        exchange_seconds=None if exchange_seconds is None else float(exchange_seconds),
        seconds=seconds,
        losses=[worker[1] for worker in records],
        distances=[worker[2] for worker in records],
        exchange_steps=exchange_steps,
        staleness=float(missed) / max(rounds, 1) if args.asynchronous else None,
        compression=args.compression,
    )


def main() -> None:
    """Train and report, or compare earlier runs."""
    args = flags.parse(__doc__.splitlines()[0], ("allreduce", *GETTERS), wires=("compression",))
    if args.compare:
        digits.compare(args.compare)
        return
    if args.algorithm == "allreduce" and workers.LIBRARY != "horovod":
        raise SystemExit(
            "--algorithm allreduce is Horovod's DistributedOptimizer: install Horovod, or choose another algorithm. "
            f"These workers exchange over: {workers.LIBRARY}"
        )
    run = train(args)
    if workers.rank() == 0:
        run.save(args.output)
        digits.report(args, run)


if __name__ == "__main__":
    main()
