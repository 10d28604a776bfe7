"""What every rank does in asynchronous exchange with the optimizers of TensorFlow 1 graphs; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.asynchronous_contrib_scenarios FOLDER v1
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import tensorflow.compat.v1 as tf
from safetensors.numpy import load_file

from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.tensorflow import contrib_opt
from hvd_periodic.tensorflow.communicator import communicator_of
from tests.parallel.contrib_scenarios import bits, centers, getter_of, hook, init_op, network, outside_of_hooks, started
from tests.parallel.program import Scenarios, attempt, repeated
from tests.parallel.tensorflow_job import hvd

V = TypeVar("V")

scenario = Scenarios()

KINDS = (None, True, False)
"""What ``use_resource`` may be."""

AVERAGING = SimpleNamespace(curvature=(0.5, 1.0, 0.7), minimum=(3.0, -1.0, 2.0), period=3)
"""Quadratics of workers."""

LOCAL: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.25),
    "momentum": lambda: tf.train.MomentumOptimizer(0.125, 0.5, use_nesterov=True),
    "adam": lambda: tf.train.AdamOptimizer(0.125),
}


def on(*modes: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function for some transports; one rank alone has its center in its memory."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            results = {}
            for mode in modes[: hvd.size()]:
                with patch.dict(os.environ, {VARIABLE: mode}):
                    results[mode] = function()
            return results

        run.__name__ = function.__name__
        scenario(run)
        return function

    return register


on_all = on("window", "service")
on_one = on("window", *repeated("service"))
"""For what does not depend on the transport."""


def wrap(name: str, inner: Any, getter: Any, period: int = 2, **options: Any) -> Any:
    """Make an asynchronous optimizer."""
    if name == "agn":
        return contrib_opt.AGNOptimizer(inner, hvd.size(), getter, period, **{"asynchronous": True, **options})
    if name == "average":
        options = {"asynchronous": True, **options}
        return contrib_opt.ModelAverageOptimizer(inner, hvd.size(), hvd.rank() == 0, getter, period, **options)
    options = {"moving_rate": 0.25, "rho": 0.0, "asynchronous": True, **options}
    return contrib_opt.ElasticAverageOptimizer(inner, hvd.size(), getter, period, **options)


def of_this_transport(cases: Sequence[Any]) -> list[Any]:
    """Return every second case, the others with the other transport; all of them where there is one rank."""
    first = 0 if os.environ[VARIABLE] == "window" else 1
    return list(cases[first :: min(2, hvd.size())])


def one_of_two(cases: tuple[V, V]) -> list[V]:
    """Return another case for each transport; both in thorough runs, and where there is one rank."""
    return list(dict.fromkeys((*of_this_transport(cases), *repeated(*cases))))


def flat(values: list[Any]) -> list[float]:
    return [float(element) for value in values for element in np.ravel(value)]


class AtEnd(tf.train.SessionRunHook):
    """Reads at the end of a session, after the hooks before it."""

    def __init__(self, read: Any) -> None:
        self.values: Any = None
        self._read = read

    def end(self, session: Any) -> None:
        """Read."""
        self.values = session.run(self._read)


def variable(name: str, use_resource: bool | None = None, start: float = 0.0) -> tuple[Any, Any]:
    getter = getter_of(name)
    with tf.variable_scope("", custom_getter=getter, use_resource=use_resource):
        return getter, tf.get_variable("w", initializer=tf.constant([start], tf.float64))


@scenario
def one_worker() -> Any:
    """Alone, gradient −1: x, c and global_step after each step; in a plain session and in a monitored one."""
    if hvd.size() > 1:
        return None
    results: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "zero": {},
        "default": {"rho": None},
        "unlocked": {"use_locking": False},
        "synchronous": {"asynchronous": False, "rho": None},
    }
    kinds = {"zero": KINDS, "default": (True, False), "synchronous": (True, False), "unlocked": (None,)}
    for case, use_resource in ((name, kind) for name, of_case in kinds.items() for kind in of_case):
        with tf.Graph().as_default():
            getter, w = variable("easgd", use_resource)
            optimizer = wrap("easgd", tf.train.GradientDescentOptimizer(1.0), getter, **cases[case])
            global_step = tf.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(-w), global_step=global_step)
            read = [w, centers()[0], global_step]
            final = [] if case == "synchronous" else [optimizer.get_final_op()]
            seen = []
            with started(optimizer) as session:
                for _ in range(6):
                    session.run(train)
                    seen.append([float(np.ravel(value)[0]) for value in session.run(read)])
                session.run(final)
                last = [float(np.ravel(value)[0]) for value in session.run(read)]
            monitored = []
            after = AtEnd(read)
            with tf.train.MonitoredTrainingSession(hooks=[hook(optimizer), after]) as session:
                for _ in range(6):
                    session.run(train)
                    now = outside_of_hooks(session, lambda plain, read=read: plain.run(read))
                    monitored.append([float(np.ravel(value)[0]) for value in now])
            ended = [float(np.ravel(value)[0]) for value in after.values]
            results[f"{case} {use_resource}"] = {
                "plain": seen,
                "final": last,
                "monitored": monitored,
                "ended": ended,
            }
    return results


@on_all
def one_after_the_other() -> Any:
    """Gradient −1, period 1, one rank at a time: x and the center as this rank knows it after every turn, then at last.

    Those are the steps of contrib's own tests of two workers: α = 1/2; Adam that only sees signs.
    """
    results = {}
    cases: dict[str, Callable[[Any], Any]] = {
        "easgd": lambda getter: wrap("easgd", tf.train.GradientDescentOptimizer(1.0), getter, 1, moving_rate=0.5),
        "agn": lambda getter: wrap("agn", tf.train.AdamOptimizer(0.1, beta1=0.0, beta2=0.0), getter, 1),
    }
    for name, make in cases.items():
        with tf.Graph().as_default():
            getter, w = variable(name, False)
            optimizer = make(getter)
            train = optimizer.apply_gradients([(tf.constant([-1.0], tf.float64), w)])
            final, seen = optimizer.get_final_op(), []
            communicator = communicator_of(None)
            with started(optimizer) as session:
                for turn in range(3 * hvd.size()):
                    if turn % hvd.size() == hvd.rank():
                        session.run(train)
                    communicator.allgather_object(turn, "turn")
                    seen.append(flat(session.run([w, centers()[0]])))
                session.run(final)
                results[name] = [seen, flat(session.run(centers()))]
    return results


@on_all
def averaging_one_after_the_other() -> Any:
    """Quadratics h (x − b)²/2, period 3, one rank at a time: x and the center as this rank knows it after every turn.

    Then two steps, which only the final operation pushes: x, center and global step before it, and after it.
    """
    results = {}
    for use_resource in one_of_two((True, False)):
        with tf.Graph().as_default():
            getter, w = variable("average", use_resource)
            optimizer = wrap("average", tf.train.GradientDescentOptimizer(0.1), getter, AVERAGING.period)
            global_step = tf.train.get_or_create_global_step()
            loss = AVERAGING.curvature[hvd.rank()] * tf.reduce_sum((w - AVERAGING.minimum[hvd.rank()]) ** 2) / 2
            train, final = optimizer.minimize(loss, global_step=global_step), optimizer.get_final_op()
            read, seen, communicator = [w, centers()[0], global_step], [], communicator_of(None)
            with started(optimizer) as session:
                for turn in range(3 * hvd.size()):
                    for _ in range(AVERAGING.period if turn % hvd.size() == hvd.rank() else 0):
                        session.run(train)
                    communicator.allgather_object(turn, "turn")
                    seen.append(flat(session.run(read)))
                for _ in range(2):
                    session.run(train)
                seen.append(flat(session.run(read)))
                for _ in range(2):  # The second has nothing to push.
                    session.run(final)
                    seen.append(flat(session.run(read)))
            results[str(use_resource)] = seen
    return results


@scenario
def one_worker_normalized() -> Any:
    """Alone, gradients i²/8 − 1 at step i: x, c after each step."""
    if hvd.size() > 1:
        return None
    results = {}
    for name, make in LOCAL.items():
        with tf.Graph().as_default():
            getter, w = variable("agn")
            optimizer = wrap("agn", make(), getter, period=3)
            gradient = tf.placeholder(tf.float64, [1])
            train = optimizer.apply_gradients([(gradient, w)])
            seen = []
            with started(optimizer) as session:
                for i in range(10):
                    session.run(train, {gradient: [i * i / 8 - 1.0]})
                    seen.append([float(value[0]) for value in session.run([w, centers()[0]])])
                session.run(optimizer.get_final_op())
                seen.append([float(value[0]) for value in session.run([w, centers()[0]])])
            results[name] = seen
    return results


@on_all
def different_numbers_of_steps() -> Any:
    """Ranks with more, fewer and no steps, in a monitored session and in a plain one: final centers, rounds."""
    results: dict[str, Any] = {}
    cases = (("average", None), ("easgd_rho", False), *repeated(("agn", None), ("easgd_rho", True), ("easgd", None)))
    for name, use_resource in of_this_transport(cases):
        with tf.Graph().as_default():
            getter, w = variable(name.partition("_")[0], use_resource, float(hvd.rank()))
            inner = tf.train.MomentumOptimizer(0.25, 0.5)
            own = str(Path(tempfile.mkdtemp()) / "center")
            path = communicator_of(None).allgather_object(own, "path")[0]  # Not every job has MPI.
            more = {"rho": 0.5} if name == "easgd_rho" else {}
            optimizer = wrap(name, inner, getter, center_file=path, **more)
            global_step = tf.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(-w) * (1.0 + hvd.rank()), global_step=global_step)
            read = [centers()[0], global_step]
            after = AtEnd(read)
            steps = (4, 0, 9)[hvd.rank()]
            with tf.train.MonitoredTrainingSession(is_chief=hvd.rank() == 0, hooks=[hook(optimizer), after]) as session:
                for _ in range(steps):
                    time.sleep(0.01 * (hvd.rank() == 2))
                    session.run(train)
            final = optimizer.get_final_op()
            with started(optimizer) as session:
                for _ in range(steps):
                    session.run(train)
                session.run(final)
                last = session.run(read)
            results[f"{name} {use_resource}"] = {
                "monitored": [float(after.values[0][0]), int(after.values[1])],
                "plain": [float(last[0][0]), int(last[1])],
                "in the file": float(load_file(path)["w"][0]),
            }
    return results


@on_all
def conservation() -> Any:
    """Ranks at their own pace, learning rate 0: replicas at the start and at the end, and the center, from ones."""
    results = {}
    for use_resource, partitioned in of_this_transport(((False, True), (True, True), *repeated((None, False)))):
        with tf.Graph().as_default():
            getter = getter_of("easgd")
            partitioner = tf.fixed_size_partitioner(2) if partitioned else None
            with tf.variable_scope("", custom_getter=getter, use_resource=use_resource, partitioner=partitioner):
                made = [tf.get_variable(f"w{i}", [4, i + 1], tf.float64, tf.ones_initializer()) for i in range(3)]
            variables = tf.trainable_variables()
            optimizer = wrap("easgd", tf.train.GradientDescentOptimizer(0.0), getter, moving_rate=0.3)
            loss = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(w)) for w in made])
            train = optimizer.minimize(loss)
            values = [tf.placeholder(tf.float64, w.shape) for w in variables]
            assign = [w.assign(value) for w, value in zip(variables, values, strict=True)]
            final = optimizer.get_final_op()
            generator, numbers = random.Random(hvd.rank()), np.random.default_rng(hvd.rank())
            with started(optimizer) as session:
                given = [numbers.standard_normal(w.shape.as_list()) for w in variables]
                session.run(assign, dict(zip(values, given, strict=True)))
                for _ in range(20 + 9 * hvd.rank()):
                    time.sleep(generator.choice([0, 0, 1e-3, 3e-3]))
                    session.run(train)
                session.run(final)
                replicas, center = session.run([variables, centers()])
        results[f"{use_resource} {partitioned}"] = [flat(given), flat(replicas), flat(center)]
    return results


@on_all
def without_locking() -> Any:
    """Additions may be lost: centers are finite, and the same on all ranks at the end."""
    results = {}
    for name in one_of_two(("easgd", "agn")):
        with tf.Graph().as_default():
            getter = getter_of(name)
            with tf.variable_scope("", custom_getter=getter):
                w = tf.get_variable("w", [300], initializer=tf.zeros_initializer())
            optimizer = wrap(name, tf.train.AdamOptimizer(0.1), getter, period=1, use_locking=False)
            train = optimizer.minimize(tf.reduce_sum(tf.square(w - 1.0 - hvd.rank())))
            final = optimizer.get_final_op()
            with started(optimizer) as session:
                for _ in range(30):
                    session.run(train)
                session.run(final)
                x, c = session.run([w, centers()[0]])
            results[name] = [bool(np.isfinite(x).all() and np.isfinite(c).all()), bits([c]), float(np.abs(c).max())]
    return results


def trained(name: str, folder: str, partitioned: bool, use_resource: bool) -> dict[str, Any]:
    """Train a network for some steps, from the chief's checkpoint if there is one: first and final centers."""
    with tf.Graph().as_default():
        getter = getter_of(name)
        partitioner = tf.fixed_size_partitioner(2) if partitioned else None
        with tf.variable_scope("", custom_getter=getter, use_resource=use_resource):
            inputs = tf.placeholder(tf.float32, [None, 3])
            loss = tf.reduce_mean(tf.square(network(inputs, partitioner) - inputs[:, :1]))
        global_step = tf.train.get_or_create_global_step()
        optimizer = wrap(name, tf.train.AdamOptimizer(0.05), getter)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = optimizer.minimize(loss, global_step=global_step)
        statistics = [v for v in tf.global_variables() if v.op.name == "normalization/average"]
        read = [centers(), statistics, global_step]
        after, numbers, root = AtEnd(read), np.random.default_rng(hvd.rank()), hvd.rank() == 0
        hooks = [hook(optimizer), after]
        if root:  # The last one; that of the session itself would save before the center is final.
            hooks.append(tf.train.CheckpointSaverHook(folder, save_steps=1000))
        with tf.train.MonitoredTrainingSession(
            is_chief=root, checkpoint_dir=folder if root else None, save_checkpoint_secs=None, hooks=hooks
        ) as session:
            first = outside_of_hooks(session, lambda plain: plain.run(read))
            for _ in range(6 + 4 * hvd.rank()):
                session.run(train, {inputs: numbers.standard_normal((8, 3))})
        last = after.values
        return {
            "first": bits(first[0]),
            "final": bits(last[0]),
            "statistics": [bits(first[1]), bits(last[1])],
            "steps": [int(first[2]), int(last[2])],
            "finite": all(bool(np.isfinite(value).all()) for value in last[0]),
        }


@on_all
def restart() -> Any:
    """Twice; the second time from the checkpoint that the chief's last hook has saved."""
    results = {}
    cases = (("easgd", True, False), ("agn", False, True), *repeated(("agn", True, False), ("average", True, False)))
    for name, partitioned, use_resource in of_this_transport(cases):
        with tempfile.TemporaryDirectory() as folder:
            kind = f"{name} {'partitioned ' if partitioned else ''}{'resource' if use_resource else 'reference'}"
            results[kind] = [trained(name, folder, partitioned, use_resource) for _ in range(2)]
    return results


@on_one
def checkpoint_of_the_session() -> Any:
    """The checkpoint that a hook after that of the optimizer writes at the end: the center in it, and the final one."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        getter, w = variable("easgd")
        optimizer = wrap("easgd", tf.train.GradientDescentOptimizer(1.0), getter)
        train = optimizer.minimize(tf.reduce_sum(-w), global_step=tf.train.get_or_create_global_step())
        root, after = hvd.rank() == 0, AtEnd(centers()[0])
        saver = [tf.train.CheckpointSaverHook(folder, save_steps=1000)] if root else []
        with tf.train.MonitoredTrainingSession(is_chief=root, hooks=[hook(optimizer), *saver, after]) as session:
            for _ in range(4 + 4 * hvd.rank()):
                time.sleep(0.02 * hvd.rank())
                session.run(train)
        results["final"] = float(after.values[0])
        if root:
            saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
            results["saved"] = float(saved.get_tensor(f"{contrib_opt.GLOBAL_VARIABLE_NAME}/w")[0])
    return results


@on_one
def several_sessions() -> Any:
    """Two optimizers in one graph, then a second session on it: it starts anew."""
    results = []
    with tf.Graph().as_default():
        trains, variables, optimizers = [], [], []
        for scope, name in (("a", "easgd"), ("b", "agn")):
            getter = getter_of(name)
            with tf.variable_scope(scope, custom_getter=getter):
                variables.append(tf.get_variable("w", initializer=tf.constant([0.0], tf.float64)))
            optimizers.append(wrap(name, tf.train.GradientDescentOptimizer(0.5), getter))
            trains.append(optimizers[-1].minimize(tf.reduce_sum(-variables[-1]), var_list=[variables[-1]]))
        starts = [init_op(optimizer) for optimizer in optimizers]
        finals = [optimizer.get_final_op() for optimizer in optimizers]
        for _ in range(2):
            with tf.Session() as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                for start in starts:
                    session.run(start)
                for _ in range(4):
                    session.run(trains)
                for final in finals:
                    session.run(final)
                results.append([float(value[0]) for value in session.run(centers())])
    return results


@on_all
def refusals() -> Any:
    """Errors, on all ranks."""
    results: dict[str, str] = {}

    def make(name: str, inner: Callable[[], Any], then: Callable[[Any], Any] | None = None, **options: Any) -> None:
        with tf.Graph().as_default():
            getter, w = variable(name)
            optimizer = wrap(name, inner(), getter, **options)
            if then is None:
                optimizer.minimize(tf.reduce_sum(w))
            else:
                then(optimizer)

    def plain() -> Any:
        return tf.train.GradientDescentOptimizer(0.1)

    def scheduled() -> Any:
        return tf.train.MomentumOptimizer(tf.constant(0.1), 0.5)

    def last(otherwise: Callable[[], Any]) -> Callable[[], Any]:
        return otherwise if hvd.rank() == hvd.size() - 1 else plain

    def ended(optimizer: Any) -> None:
        with tf.variable_scope("", reuse=True):
            optimizer.minimize(tf.reduce_sum(tf.trainable_variables()[0]))
        optimizer.get_final_op()

    cases: dict[str, Callable[[], None]] = {
        "tensor": lambda: make("agn", scheduled),
        "tensor on the last rank": lambda: make("agn", last(scheduled)),
        "elastic with a tensor": lambda: make("easgd", scheduled),
        "final of a synchronous one": lambda: make("easgd", plain, ended, asynchronous=False),
        "final before minimize": lambda: make("easgd", plain, lambda optimizer: optimizer.get_final_op()),
        "rate": lambda: make("easgd", plain, moving_rate=1.25),
        "average without a getter": lambda: wrap("average", plain(), None),
        "one is synchronous": lambda: make("easgd", plain, asynchronous=hvd.rank() < hvd.size() - 1),
        "one does not lock": lambda: make("easgd", plain, use_locking=hvd.rank() < hvd.size() - 1),
        "none": lambda: make("agn", plain, ended),
    }
    every = list(cases)
    for name in dict.fromkeys((*of_this_transport(every), *repeated(*every))):
        results[name] = attempt(cases[name])
    return results


def main(folder: Path, mode: str) -> None:
    """Run all scenarios."""
    if mode == "v1":
        tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
