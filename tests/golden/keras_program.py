"""The cases in Keras, eagerly and compiled.

mpirun -np 2 python -m tests.golden.keras_program FOLDER [save]
"""

from __future__ import annotations

import pickle
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from tests.golden import cases, course
from tests.golden.cases import Array, Case

GROUPS: list[Any] = []

SOME = ("elastic_rho", "agn")
"""One that keeps something per worker, and one with an optimizer of the center."""


@keras.saving.register_keras_serializable("golden")
class Tensors(keras.layers.Layer):
    """Trainable weights and, if asked for, statistics."""

    def __init__(self, shapes: Any, dtype: str, statistics: bool, **options: Any) -> None:
        super().__init__(dtype=dtype, **options)
        self.arguments = {"shapes": shapes, "dtype": dtype, "statistics": statistics}
        for i, shape in enumerate(shapes):
            self.add_weight(shape=tuple(shape), initializer="zeros", name=f"p{i}")
        if statistics:
            options = {"initializer": "zeros", "trainable": False}
            self.add_weight(shape=(2,), dtype="float32", name="moving_mean", **options)
            self.add_weight(shape=(), dtype="int64", name="count", **options)

    def call(self, inputs: Any) -> Any:
        return inputs * self.weights[0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


class KerasTrainer:
    """A model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        layer = Tensors(case.shapes, case.dtype, case.kind == "statistics", name="tensors")
        self.model = keras.Sequential([keras.Input((1,), dtype=case.dtype), layer])
        for variable, array in zip(self.model.trainable_variables, case.start(hvd.rank()), strict=True):
            variable.assign(array)
        inner = optimizer(case)
        options: dict[str, Any] = {"center": case.center}
        if case.kind == "groups":
            inner = hvd.DistributedOptimizer(inner, process_set=GROUPS[0].local)
            options["process_set"] = GROUPS[0].cross
        elif case.kind == "distributed":
            inner = hvd.DistributedOptimizer(inner)
        elif case.kind == "asynchronous":
            options["asynchronous"] = True
        local_first = case.kind in ("post_local", "distributed")
        period = hvdp.PostLocal(*cases.POST_LOCAL) if local_first else cases.PERIOD
        if case.algorithm == "average":
            made = hvdp.ModelAverageOptimizer(inner, self.model, period, **options)
        elif case.algorithm.startswith("agn"):
            op = "average" if case.algorithm == "agn_average" else "sum"
            made = hvdp.AGNOptimizer(inner, self.model, period, op=op, **options)
        else:
            rho = cases.RHO if case.algorithm == "elastic_rho" else 0.0
            made = hvdp.ElasticAverageOptimizer(inner, self.model, period, cases.MOVING_RATE, rho=rho, **options)
        self.model.compile(made, loss="mse", jit_compile=False)
        self._train = tf.function(self._batch) if case.loop == "compiled" else self._batch

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    def _batch(self, targets: list[Any], statistic: Any) -> None:
        variables = self.model.trainable_variables
        if self.case.kind == "statistics":
            mean, count = self.model.non_trainable_variables
            mean.assign(0.5 * mean + 0.5 * statistic)
            count.assign_add(tf.constant(1 + hvd.rank(), tf.int64))
        curved = [self.case.curvature * tf.convert_to_tensor(variable) for variable in variables]
        gradients = [x - b for x, b in zip(curved, targets, strict=True)]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(self, step: int) -> None:
        targets = [tf.constant(target) for target in self.case.targets(hvd.rank(), step)]
        self._train(targets, tf.constant(self.case.statistic(hvd.rank(), step)))

    def skip(self) -> None:
        self.optimizer.skip()

    def values(self) -> list[Array]:
        variables = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        return [np.array(variable) for variable in variables]

    def center(self) -> list[Array]:
        with self.optimizer.center():
            return self.values()

    def distance(self) -> float:
        return float(self.optimizer.synchronizer.distance())

    def counters(self) -> tuple[int, int, int]:
        counters = self.optimizer.synchronizer.counters
        return int(counters.local_steps), int(counters.rounds), int(counters.skipped_updates)

    def finalize(self) -> None:
        self.optimizer.finalize()

    def save(self, path: Path) -> None:
        if self.case.course != "state":
            self.model.save(path.with_suffix(".keras"))
            deflate(path.with_suffix(".keras"))
            return
        inner = [np.array(variable) for variable in self.optimizer.inner.variables]
        exchange = self.optimizer.synchronizer.state_dict()
        saved = {"weights": self.model.get_weights(), "inner": inner, "exchange": exchange}
        path.with_suffix(".pickle").write_bytes(pickle.dumps(saved))

    def load(self, path: Path) -> None:
        if self.case.course != "state":
            self.model = keras.models.load_model(path.with_suffix(".keras"))
            self.optimizer.attach(self.model)
            return
        saved = pickle.loads(path.with_suffix(".pickle").read_bytes())
        self.model.set_weights(saved["weights"])
        for variable, value in zip(self.optimizer.inner.variables, saved["inner"], strict=True):
            variable.assign(value)
        self.optimizer.synchronizer.load_state_dict(saved["exchange"])


def deflate(path: Path) -> None:
    """Compress an archive, most of which is zeros."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def optimizer(case: Case) -> keras.optimizers.Optimizer:
    """Return the local optimizer."""
    if case.local == "adam":
        return keras.optimizers.Adam(*cases.ADAM.values())
    return keras.optimizers.SGD(cases.RATE, momentum=cases.MOMENTUM if case.local == "momentum" else 0.0)


def planned(size: int) -> list[Case]:
    """Return the cases for some ranks."""
    found = [*cases.cases(size), *cases.statistics(), *cases.with_adam(size), *cases.around_horovod(size)]
    found = [case for case in found if is_kept(case, size)]
    states = [replace(case, course="state") for case in found if size == 2 and is_replicated(case, course="resume")]
    return [*found, *states, *(replace(case, loop="compiled") for case in found if is_compiled(case, size))]


def is_kept(case: Case, size: int) -> bool:
    """Return whether a case is worth its time: graphs cost more of it than arithmetic."""
    some, replicated = case.algorithm in SOME, case.center == "replicated"
    if size == 2:
        if case.algorithm in ("elastic", "agn_average"):
            return replicated and is_plain(case) and case.local == "momentum"
        return replicated or is_plain(case) or (some and case.center == "sharded" and case.dtype == "float32")
    special = case.kind in ("groups", "asynchronous", "statistics") or case.course == "uneven"
    return (replicated and (is_plain(case) or (some and special))) or (size > 1 and some and is_plain(case))


def is_compiled(case: Case, size: int) -> bool:
    """Return whether a case is run in a tf.function as well."""
    some, replicated = case.algorithm in SOME, case.center == "replicated"
    if is_plain(case) and case.local == "momentum":
        return some
    special = (
        case.kind in ("post_local", "statistics", "distributed") or case.course == "uneven" or case.local == "adam"
    )
    return size == 2 and special and replicated and case.algorithm == "agn"


def is_plain(case: Case) -> bool:
    """Return whether nothing is special but the optimizer and the place of the center."""
    return (case.dtype, case.course, case.kind) == ("float32", "even", "")


def is_replicated(case: Case, course: str) -> bool:
    """Return whether a case has this course, and SGD."""
    return (case.course, case.center, case.local) == (course, "replicated", "momentum")


def main(folder: Path, saving: bool) -> None:
    """Run all cases."""
    warnings.simplefilter("ignore")
    tf.get_logger().setLevel("ERROR")
    hvd.init(process_sets="dynamic")
    if hvd.size() == sum(map(len, cases.GROUPS)):
        GROUPS.append(hvdp.rank_groups(cases.GROUPS))
    course.run("keras", KerasTrainer, planned(hvd.size()), hvd.rank(), hvd.size(), folder, saving)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "save" in sys.argv)
