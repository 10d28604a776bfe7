"""The cases in TensorFlow 1 graphs.

mpirun -np 2 python -m tests.golden.contrib_program FOLDER [save]
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic.tensorflow import contrib_opt
from tests.golden import cases, course
from tests.golden.cases import Array, Case

GROUPS: list[Any] = []
ALGORITHMS = [algorithm for algorithm in cases.ALGORITHMS if algorithm != "agn_average"]
GETTERS = {
    "elastic": contrib_opt.ElasticAverageCustomGetter,
    "elastic_rho": contrib_opt.ElasticAverageCustomGetter,
    "average": contrib_opt.ModelAverageCustomGetter,
    "agn": contrib_opt.AGNCustomGetter,
}


class ContribTrainer:
    """A graph and its session, begun as a script does that knows getters; or, "adopted", as one of Horovod."""

    def __init__(self, case: Case) -> None:
        self.case, self.steps, self.graph = case, 0, tf.Graph()
        with self.graph.as_default():
            self._build()
            self._begin()

    def _build(self) -> None:
        case = self.case
        self._adopted = case.kind in ("adopted", "distributed")
        getter = None if self._adopted else GETTERS[case.algorithm]("")
        with tf.variable_scope("", custom_getter=getter, use_resource=case.loop == "resource"):
            starts = enumerate(case.start(hvd.rank()))
            self.variables = [tf.get_variable(f"p{i}", initializer=start) for i, start in starts]
            self.statistics = []
            if case.kind == "statistics":
                zeros = np.zeros(2, "float32")
                self.statistics = [tf.get_variable("moving_mean", initializer=zeros, trainable=False)]
        self.targets = [tf.placeholder(v.dtype.base_dtype, v.shape) for v in self.variables]
        self.statistic = tf.placeholder(tf.float32, [2])
        moved = [mean.assign(0.5 * mean + 0.5 * self.statistic) for mean in self.statistics]
        with tf.control_dependencies(moved):
            pairs = zip(self.variables, self.targets, strict=True)
            terms = [tf.reduce_sum(case.curvature / 2 * tf.square(v) - b * v) for v, b in pairs]
        self.optimizer = wrapped(case, getter)
        self.global_step = tf.train.get_or_create_global_step()
        self._train = self.optimizer.minimize(tf.add_n(terms), global_step=self.global_step)
        centers = {v.op.name: v for v in tf.global_variables()}
        self.centers = [centers[f"{contrib_opt.GLOBAL_VARIABLE_NAME}/{v.op.name}"] for v in self.variables]
        if self._adopted:
            self._start = tf.group(hvd.broadcast_variables(tf.global_variables(), root_rank=0))
        elif case.algorithm == "average":
            self._start = self.optimizer.get_init_op()
        else:
            self._start = self.optimizer.get_init_op(hvd.rank())
        self._final = self.optimizer.get_final_op() if case.kind == "asynchronous" else tf.no_op()
        self._initializers = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        own = [] if case.course == "restart" else tf.local_variables()
        self._saver = tf.train.Saver([*tf.global_variables(), *own])

    def _begin(self) -> None:
        self.session = tf.Session()
        self.session.run(self._initializers)
        self.session.run(self._start)

    def step(self, step: int) -> None:
        shown = dict(zip(self.targets, self.case.targets(hvd.rank(), step), strict=True))
        self.session.run(self._train, {**shown, self.statistic: self.case.statistic(hvd.rank(), step)})
        self.steps += 1

    def skip(self) -> None:
        raise NotImplementedError("contrib_opt counts no iterations without update")

    def values(self) -> list[Array]:
        return list(map(np.asarray, self.session.run([*self.variables, *self.statistics])))

    def center(self) -> list[Array]:
        return list(map(np.asarray, self.session.run([*self.centers, *self.statistics])))

    def distance(self) -> float:
        pairs = zip(self.session.run(self.variables), self.session.run(self.centers), strict=True)
        return float(np.sqrt(sum(np.sum((x.astype("f8") - c.astype("f8")) ** 2) for x, c in pairs)))

    def counters(self) -> tuple[int, int, int]:
        """The global step counts rounds; without a getter steps, so that the center is written down after each."""
        return self.steps, int(self.session.run(self.global_step)), 0

    def finalize(self) -> None:
        self.session.run(self._final)
        self.optimizer.finalize()

    def save(self, path: Path) -> None:
        self._saver.save(self.session, str(path), write_meta_graph=False, write_state=False)

    def load(self, path: Path) -> None:
        self.steps = cases.RESUMED_AT
        if self.case.course != "restart":
            self._saver.restore(self.session, str(path))
            return
        self.session.run(self._initializers)
        if hvd.rank() == 0:
            self._saver.restore(self.session, str(path))
        self.session.run(self._start)


def wrapped(case: Case, getter: Any) -> Any:
    """Return the optimizer."""
    inner: Any = tf.train.GradientDescentOptimizer(cases.RATE)
    if case.local == "adam":
        inner = tf.train.AdamOptimizer(*cases.ADAM.values())
    elif case.local == "momentum":
        inner = tf.train.MomentumOptimizer(cases.RATE, cases.MOMENTUM)
    period: Any = hvdp.PostLocal(*cases.POST_LOCAL) if case.kind in ("post_local", "distributed") else cases.PERIOD
    workers, options = hvd.size(), {}
    if case.kind == "groups":
        inner = hvd.DistributedOptimizer(inner, process_set=GROUPS[0].local)
        workers, options = GROUPS[0].cross.size(), {"process_set": GROUPS[0].cross}
    elif case.kind == "distributed":
        inner = hvd.DistributedOptimizer(inner)
    elif case.kind == "asynchronous":
        options = {"asynchronous": True}
    if case.algorithm == "average":
        return contrib_opt.ModelAverageOptimizer(inner, workers, hvd.rank() == 0, getter, period, **options)
    if case.algorithm == "agn":
        return contrib_opt.AGNOptimizer(inner, workers, getter, period, **options)
    rho = cases.RHO if case.algorithm == "elastic_rho" else 0.0
    return contrib_opt.ElasticAverageOptimizer(inner, workers, getter, period, cases.MOVING_RATE, rho, **options)


def planned(size: int) -> list[Case]:
    """Return the cases for some ranks."""
    each = [Case(algorithm) for algorithm in ALGORITHMS]
    found = [*each, *(replace(case, kind="adopted") for case in each), Case("agn", "adam")]
    found += [replace(case, kind="asynchronous") for case in each if size == 1 and case.algorithm != "average"]
    if size == 2:
        most = [case for case in each if case.algorithm != "elastic"]
        found += [replace(case, dtype="float64") for case in most]
        found += [replace(case, loop="resource") for case in most]
        found += [replace(case, kind=kind) for case in most for kind in ("post_local", "statistics")]
        found += [replace(case, course=course) for case in most for course in ("resume", "restart")]
        found += [Case("elastic_rho", "sgd"), Case("agn", "sgd"), Case("elastic", "adam"), Case("average", "adam")]
    return [*found, *cases.around_horovod(size)]


def kept() -> list[Case]:
    """Return the cases whose checkpoints are kept."""
    return [
        Case(algorithm, **options)
        for algorithm in ALGORITHMS
        for options in ({"course": "restart"}, {"kind": "adopted"})
    ]


def main(folder: Path, saving: bool) -> None:
    """Run all cases."""
    warnings.simplefilter("ignore")
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    hvd.init(process_sets="dynamic")
    if hvd.size() == sum(map(len, cases.GROUPS)):
        GROUPS.append(hvdp.rank_groups(cases.GROUPS))
    course.run("contrib", ContribTrainer, planned(hvd.size()), hvd.rank(), hvd.size(), folder, saving, kept())


if __name__ == "__main__":
    main(Path(sys.argv[1]), "save" in sys.argv)
