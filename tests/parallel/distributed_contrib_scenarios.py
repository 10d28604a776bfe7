"""What every rank does in TensorFlow 1 graphs without a getter, and around a DistributedOptimizer.

mpirun -np 4 python -m tests.parallel.distributed_contrib_scenarios FOLDER v1 '[[0, 1], [2, 3]]'
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.tensorflow import contrib_opt
from tests import oracle
from tests.parallel.program import Scenarios, attempt, rotated

scenario = Scenarios()
GROUPS: list[Any] = []

Make = Callable[..., Any]

OPTIMIZERS: dict[str, Make] = {
    "easgd": lambda o, n, g, p=2, **k: contrib_opt.ElasticAverageOptimizer(o, n, g, p, 0.25, rho=0.0, **k),
    "easgd_rho": lambda o, n, g, p=2, **k: contrib_opt.ElasticAverageOptimizer(o, n, g, p, 0.25, rho=0.5, **k),
    "average": lambda o, n, g, p=2, **k: contrib_opt.ModelAverageOptimizer(o, n, hvd.rank() == 0, g, p, **k),
    "agn": lambda o, n, g, p=4, **k: contrib_opt.AGNOptimizer(o, n, g, p, **k),
}
GETTERS: dict[str, Callable[[str], Any]] = {
    "easgd": contrib_opt.ElasticAverageCustomGetter,
    "easgd_rho": contrib_opt.ElasticAverageCustomGetter,
    "average": contrib_opt.ModelAverageCustomGetter,
    "agn": contrib_opt.AGNCustomGetter,
}


def local() -> Any:
    return tf.train.MomentumOptimizer(oracle.RATE, oracle.MOMENTUM)


def averaging() -> Any:
    """Return the local optimizer inside of one that averages gradients over all ranks."""
    return hvd.DistributedOptimizer(local())


def loss_of(w: Any) -> Any:
    """Return a loss that has the oracle's gradient."""
    zero = np.array(oracle.gradient(hvd.rank(), [0.0] * len(oracle.START)))
    curvature = np.array(oracle.gradient(hvd.rank(), [1.0] * len(oracle.START))) - zero
    return tf.reduce_sum(curvature * tf.square(w) / 2 + zero * w)


class Training:
    """A graph with one variable, which starts differently on each rank, and its session.

    Args:
        name: of the algorithm.
        with_getter: as a script of tf.contrib.opt, or as one of Horovod.
        opt: the local optimizer.
        options: of the optimizer.
    """

    def __init__(self, name: str, with_getter: bool, opt: Any, workers: int, *period: Any, **options: Any) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            getter = GETTERS[name]("") if with_getter else None
            with tf.variable_scope("", custom_getter=getter):
                start = np.array(oracle.START) + hvd.rank()
                self.w = tf.get_variable("w", initializer=start, dtype=tf.float64)
                self.mean = tf.get_variable("mean", initializer=np.zeros(1), trainable=False, dtype=tf.float64)
            self.optimizer = OPTIMIZERS[name](opt(), workers, getter, *period, **options)
            with tf.control_dependencies([self.mean.assign_add([1.0 + hvd.rank()])]):
                loss = loss_of(self.w)
            self.global_step = tf.train.get_or_create_global_step()
            self.step_op = self.optimizer.minimize(loss, global_step=self.global_step)
            self.saver = self.optimizer.swapping_saver(tf.trainable_variables())
            self.center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/w")
            if not with_getter:
                start_op = tf.group(hvd.broadcast_variables(tf.global_variables(), root_rank=0))
            elif name == "average":
                start_op = self.optimizer.get_init_op()
            else:
                start_op = self.optimizer.get_init_op(hvd.rank())
            self._all = tf.train.Saver()
            self._start = [tf.group(tf.global_variables_initializer(), tf.local_variables_initializer()), start_op]
            self._begin()

    def _begin(self, path: str | None = None) -> None:
        """Start a session as a script does: initialize, restore, and let all ranks start alike."""
        self.session = tf.Session(graph=self.graph)
        self.session.run(self._start[0])
        if path is not None:
            self._all.restore(self.session, path)
        self.session.run(self._start[1])

    def restart(self) -> Training:
        """Go on in a new session, from a checkpoint of the global variables."""
        with tempfile.TemporaryDirectory() as folder:
            self._begin(self._all.save(self.session, f"{folder}/c"))
        return self

    def take(self, steps: int) -> Training:
        for _ in range(steps):
            self.session.run(self.step_op)
        return self

    def state(self) -> list[Any]:
        """x and c."""
        return [value.tolist() for value in self.session.run([self.w, self.center])]


@scenario
def without_getter() -> Any:
    """x and c after the oracle's steps, of a script that knows no getter; the statistics; what a checkpoint holds."""
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        training = Training(name, False, local, hvd.size()).take(oracle.STEPS)
        with training.graph.as_default(), tempfile.TemporaryDirectory() as folder:
            everything = {v.op.name for v in tf.global_variables()}
            path = tf.train.Saver().save(training.session, f"{folder}/c")
            before = training.state()
            mean = [*training.session.run(training.mean).tolist(), int(training.session.run(training.global_step))]
            training.take(3)
            tf.train.Saver().restore(training.session, path)
            again = training.state()
        results[name] = [*before, again == before, mean, sorted(everything), len(tf.local_variables())]
    return results


@scenario
def weights_of_another_training() -> Any:
    """A script without a getter restores its own variable alone, at a minimum: x and c after the first exchanges."""
    results: dict[str, Any] = {}
    for name in ("easgd_rho", "agn"):
        with tf.Graph().as_default():
            w = tf.get_variable("w", initializer=tf.constant([5.0, 7.0], tf.float64))
            load = w.assign([100.0, 50.0])
            optimizer = OPTIMIZERS[name](local(), hvd.size(), None)
            step = tf.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(tf.square(w - [100.0, 50.0])), global_step=step)
            center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/w")
            broadcast = hvd.broadcast_variables(tf.global_variables(), root_rank=0)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                if hvd.rank() == 0:
                    session.run(load)
                session.run(broadcast)
                for _ in range(4):
                    session.run(train)
                results[name] = [value.tolist() for value in session.run([w, center])]
    return results


@scenario
def hierarchical() -> Any:
    """x and c after the oracle's steps, with gradients averaged in groups."""
    results = {}
    groups = GROUPS[0]

    def inside() -> Any:
        return hvd.DistributedOptimizer(local(), process_set=groups.local)

    for name, with_getter in rotated(tuple(OPTIMIZERS), (True, False)):
        training = Training(name, with_getter, inside, groups.cross.size(), process_set=groups.cross)
        results[name] = training.take(oracle.STEPS).state()
    return results


@scenario
def post_local() -> Any:
    """Gradients averaged over all ranks until step 4, then exchanges after every third."""
    results: dict[str, Any] = {}
    for name, with_getter in rotated(tuple(OPTIMIZERS), (False, True)):
        training = Training(name, with_getter, averaging, hvd.size(), hvdp.PostLocal(4, 3)).take(2)
        early = training.state()
        results[name] = [early, training.take(oracle.STEPS - 2).state()]
    return results


@scenario
def resumed() -> Any:
    """x after a step that follows a restart: before the switch at step 4, and after it; with and without a getter."""
    results: dict[str, Any] = {}
    for steps in (2, 6):
        for with_getter in (True, False):
            training = Training("average", with_getter, averaging, hvd.size(), hvdp.PostLocal(4, 30))
            results[f"{steps} {with_getter}"] = training.take(steps).restart().take(1).state()[0]
    return results


@scenario
def embedding() -> Any:
    """Sparse gradients on both sides of the switch: all values at step 3, and after the exchange at step 5."""
    with tf.Graph().as_default():
        table = tf.get_variable("table", initializer=np.arange(8.0).reshape(4, 2) + hvd.rank())
        rows = tf.nn.embedding_lookup(table, [hvd.rank() % 4, 3])
        inside = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1))
        optimizer = OPTIMIZERS["average"](inside, hvd.size(), None, hvdp.PostLocal(3, 2))
        step = optimizer.minimize(tf.reduce_sum(tf.square(rows)), tf.train.get_or_create_global_step())
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        session.run(hvd.broadcast_variables(tf.global_variables(), root_rank=0))
        seen = []
        for _ in range(5):
            session.run(step)
            seen.append(session.run(table).tolist())
    return seen


@scenario
def refused() -> Any:
    """Arguments that are wrong, on all ranks; and a session whose ranks do not start alike."""

    def made(*arguments: Any, **options: Any) -> str:
        with tf.Graph().as_default():
            return attempt(lambda: OPTIMIZERS["easgd"](*arguments, **options))

    def inside_another() -> Any:
        return OPTIMIZERS["average"](local(), hvd.size(), None)

    def never_started() -> None:
        with tf.Graph().as_default(), tf.Session() as session:
            getter = GETTERS["easgd"]("")
            with tf.variable_scope("", custom_getter=getter):
                w = tf.get_variable("w", initializer=np.array(oracle.START) + hvd.rank(), dtype=tf.float64)
            step = OPTIMIZERS["easgd"](local(), hvd.size(), getter).minimize(loss_of(w))
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(step)
            session.run(step)

    n, groups = hvd.size(), GROUPS[0]
    inside = hvd.DistributedOptimizer(local(), process_set=groups.local)
    return {
        "over all": made(averaging(), n, None),
        "asynchronous": made(local(), n, None, asynchronous=True),
        "passes": made(hvd.DistributedOptimizer(local(), backward_passes_per_step=2), n, None),
        "levels": made(inside_another(), n, None),
        "rho": attempt(
            lambda: contrib_opt.ElasticAverageOptimizer(local(), n, GETTERS["easgd"](""), hvdp.PostLocal(4, 3))
        ),
        "workers": made(inside, n + 1, None, process_set=groups.cross),
        "never started": attempt(never_started, tf.errors.OpError),
    }


def main(folder: Path, version: str, groups: str) -> None:
    """Run all scenarios in these groups."""
    if version == "v1":
        tf.disable_v2_behavior()
    else:
        tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    GROUPS.append(hvdp.rank_groups(json.loads(groups)))
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
