"""What every rank does in TensorFlow 1 scripts of Horovod, with a broadcast and without; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.beginning_contrib_scenarios FOLDER v1
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.tensorflow import contrib_opt
from tests.parallel.contrib_scenarios import outside_of_hooks
from tests.parallel.program import Scenarios, attempt, rotated

scenario = Scenarios()

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, p=2: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), None, p, 0.25),
    "easgd_rho": lambda o, p=2: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), None, p, 0.25, rho=0.5),
    "average": lambda o, p=2: contrib_opt.ModelAverageOptimizer(o, hvd.size(), hvd.rank() == 0, None, p),
    "agn": lambda o, p=2: contrib_opt.AGNOptimizer(o, hvd.size(), None, p),
}


def descent() -> Any:
    return tf.train.GradientDescentOptimizer(1.0)


class Script:
    """A model whose weights start at 5 + rank, its gradients −1 − 2 rank, and a statistic that grows by 1 + rank.

    Args:
        name: of the algorithm.
        local: makes the local optimizer.
        period: of the exchanges.
    """

    def __init__(self, name: str, local: Callable[[], Any] = descent, *period: Any) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.w = tf.get_variable("w", initializer=tf.constant([5.0 + hvd.rank()]))
            self.mean = tf.get_variable("mean", initializer=tf.constant([0.0]), trainable=False)
            self.global_step = tf.train.get_or_create_global_step()
            self.pretrained = tf.group(self.w.assign([100.0]), self.mean.assign([50.0]))
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, self.mean.assign_add([1.0 + hvd.rank()]))
            loss = tf.reduce_sum(self.w) * (-1.0 - 2.0 * hvd.rank())
            self.optimizer = OPTIMIZERS[name](local(), *period)
            with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                self.train = self.optimizer.minimize(loss, global_step=self.global_step)
            self.broadcast = hvd.broadcast_global_variables(0)
            self.initialize = tf.global_variables_initializer()
            self.saver = tf.train.Saver()
            found = {v.op.name.rpartition("/")[2]: v for v in tf.global_variables()}
            center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/w")
            self.read = {
                "x": self.w,
                "c": center,
                "mean": self.mean,
                "step": self.global_step,
                "skipped": found["skipped_updates"],
            }

    def session(self, *operations: Any) -> tf.Session:
        """Return a session that has run the initializer, and then these."""
        session = tf.Session(graph=self.graph)
        for operation in (self.initialize, *operations):
            session.run(operation)
        return session

    def take(self, session: Any, steps: int) -> list[dict[str, float]]:
        """Return what the variables hold after each step."""
        seen = []
        for _ in range(steps):
            session.run(self.train)
            seen.append({key: float(value.item()) for key, value in session.run(self.read).items()})
        return seen


@scenario
def sessions() -> Any:
    """With the broadcast and without; what was pretrained is in the root's session alone, or in all."""
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        script = Script(name)
        root = [script.pretrained] if hvd.rank() == 0 else []
        cases = {"without": [], "root, kept": [*root, script.broadcast]}
        if name == "agn":
            cases |= {"kept": [script.broadcast], "root": root, "all": [script.pretrained]}
        results[name] = {case: script.take(script.session(*operations), 4) for case, operations in cases.items()}
    return results


@scenario
def monitored_sessions() -> Any:
    """A new training, and one that goes on from the root's checkpoint, which others have not; until step 3 and 6."""
    results: dict[str, Any] = {}
    for name in ("average", "agn"):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = []
            for last in (3, 6):
                script, seen = Script(name, lambda: tf.train.MomentumOptimizer(1.0, 0.5)), []
                root = hvd.rank() == 0
                with (
                    script.graph.as_default(),
                    tf.train.MonitoredTrainingSession(
                        checkpoint_dir=folder if root else None, hooks=[tf.train.StopAtStepHook(last_step=last)]
                    ) as session,
                ):
                    while not session.should_stop():
                        session.run(script.train)
                        read = outside_of_hooks(session, lambda plain: plain.run(script.read))  # noqa: B023
                        seen.append({key: float(value.item()) for key, value in read.items()})
                results[name].append(seen)
    return results


@scenario
def resumed() -> Any:
    """Every rank goes on from its own checkpoint, in a new session; beside what would have come."""
    results: dict[str, Any] = {}
    for name in ("easgd_rho", "agn"):
        script = Script(name, lambda: tf.train.MomentumOptimizer(1.0, 0.5))
        with tempfile.TemporaryDirectory() as folder:
            session = script.session()
            script.take(session, 3)
            path = script.saver.save(session, f"{folder}/{hvd.rank()}")
            expected = script.take(session, 3)
            again = script.session()
            script.saver.restore(again, path)
            results[name] = [expected, script.take(again, 3)]
    return results


@scenario
def resumed_by_one() -> Any:
    """The last rank alone restores; then ranks that exchange and one that begins."""
    script = Script("average")
    last = hvd.rank() == hvd.size() - 1
    with tempfile.TemporaryDirectory() as folder:
        session = script.session()
        script.take(session, 3)
        path = script.saver.save(session, f"{folder}/{hvd.rank()}")
        again = script.session()
        if last:
            script.saver.restore(again, path)
        return attempt(lambda: script.take(again, 1), tf.errors.OpError)


@scenario
def synchronous_phase() -> Any:
    """Gradients averaged until step 3, and then no longer: a new training; and one that the root alone has restored."""
    results = {}

    def local() -> Any:
        return hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0))

    for steps in (2, 4):
        script = Script("average", local, hvdp.PostLocal(3, 2))
        with tempfile.TemporaryDirectory() as folder:
            session = script.session()
            first = script.take(session, steps)
            path = script.saver.save(session, f"{folder}/{hvd.rank()}")
            again = script.session()
            if hvd.rank() == 0:
                script.saver.restore(again, path)
            results[str(steps)] = [first, script.take(again, 2)]
    return results


@scenario
def several_optimizers() -> Any:
    """A frozen weight and two optimizers, of which the second steps first: all weights, and skipped updates."""
    results = {}
    for kept in (False, True):
        with tf.Graph().as_default():
            a, b, frozen = (tf.get_variable(name, initializer=tf.constant([1.0 + hvd.rank()])) for name in "abf")
            loss = tf.reduce_sum(a * b * frozen)
            trains = [
                OPTIMIZERS["average"](tf.train.GradientDescentOptimizer(0.25), 4).minimize(
                    loss * (1.0 + hvd.rank()), tf.train.get_or_create_global_step(), [trained]
                )
                for trained in (a, b)
            ]
            skipped = [v for v in tf.global_variables() if "skipped_updates" in v.op.name]
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if kept:
                    session.run(hvd.broadcast_global_variables(0))
                seen = []
                for train in (trains[1], trains[1], trains[0], trains):
                    session.run(train)
                    values, counts = session.run([[a, b, frozen], skipped])
                    seen.append([[float(value.item()) for value in values], [int(count) for count in counts]])
                results[str(kept)] = seen
    return results


@scenario
def initializers_built_too_early() -> Any:
    """In the order of Horovod's benchmark: with no broadcast, or one that is built before or after minimize."""
    results = {}
    cases = [(use_resource, broadcast) for use_resource in (True, False) for broadcast in ("none", "early", "late")]
    for (use_resource, broadcast), name in rotated(cases, ("easgd_rho", "agn")):
        with tf.Graph().as_default(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with tf.variable_scope("", use_resource=use_resource):
                w = tf.get_variable("w", initializer=tf.constant([5.0 + hvd.rank()]))
                step = tf.get_variable("global_step", initializer=0, trainable=False)
            operations = [tf.global_variables_initializer()]
            if broadcast == "early":
                operations.append(hvd.broadcast_global_variables(0))
            optimizer = OPTIMIZERS[name](tf.train.MomentumOptimizer(1.0, 0.5))
            train = optimizer.minimize(-tf.reduce_sum(w), global_step=step)
            if broadcast == "late":
                operations.append(hvd.broadcast_global_variables(0))
            session = tf.Session()
            for operation in (*operations, train):
                session.run(operation)
            warned = [str(one.message) for one in told if "initializer" in str(one.message)]
            results[f"{name} {use_resource} {broadcast}"] = [float(session.run(w).item()), warned]
    return results


@scenario
def initializers_run_too_early() -> Any:
    """A session has run the initializer before minimize: its error."""
    results = {}
    for use_resource in (True, False):
        with tf.Graph().as_default(), tf.Session() as session:
            with tf.variable_scope("", use_resource=use_resource):
                w = tf.get_variable("w", initializer=tf.constant([5.0]))
            session.run(tf.global_variables_initializer())
            train = OPTIMIZERS["easgd_rho"](tf.train.MomentumOptimizer(1.0, 0.5)).minimize(-tf.reduce_sum(w))
            results[str(use_resource)] = attempt(lambda: session.run(train), tf.errors.OpError)  # noqa: B023
    return results


def main(folder: Path, mode: str) -> None:
    """Run all scenarios."""
    if mode == "v1":
        tf.disable_v2_behavior()
    else:
        tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
