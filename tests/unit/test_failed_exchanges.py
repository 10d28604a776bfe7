"""An exchange that fails is not counted: the counters are those of the last one that took place, on every front end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Averaging, Communicator, DiLoCo, LocalCommunicator
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import run_ranks
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.timeout(90)

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(0.25),
    "average": Averaging,
    "diloco": DiLoCo,
    "agn": AGN,
}
STEPS, PERIOD = 4, 2
"""The second exchange fails."""

OPTIONS: list[dict[str, Any]] = [{}, {"fragments": 2}, {"audit_every": 1}, {"nonfinite": "skip"}]


def cases(*options: dict[str, Any]) -> list[Any]:
    """Return algorithms, what fails, and options: values that are left out fail no exchange."""
    chosen = itertools.product(ALGORITHMS, ("wire", "values"), (*OPTIONS, *options))
    return [case for case in chosen if case[1] == "wire" or "nonfinite" not in case[2]]


class Broken(LocalCommunicator):
    """The only rank, whose reductions fail as long as ``broken`` is set; also in compiled functions."""

    broken = False

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Any:
        if isinstance(buffer, np.ndarray):
            return lambda: self._reduced(buffer)
        import tensorflow as tf

        return lambda: tf.ensure_shape(tf.py_function(self._reduced, [buffer], buffer.dtype), buffer.shape)

    def _reduced(self, buffer: Any) -> Any:
        if self.broken:
            raise ValueError("the wire is cut")
        return buffer


def counted(optimizer: Any) -> Any:
    """Return what counts exchanges; steps and their gradients are counted also where the exchange after them fails."""
    return replace(optimizer.synchronizer.counters, local_steps=0, gradients=0, exchange_seconds=0.0)


def in_every_run(name: str, fails: str, options: dict[str, Any]) -> bool:
    """Return whether every run has a case in Keras: each algorithm, each option, and each way to fail."""
    turn = list(ALGORITHMS).index(name) + OPTIONS.index(options)
    return turn % 4 == (0 if fails == "wire" else 3)


@pytest.mark.parametrize(
    ("name", "fails", "options"), cases({"overlap": 1}, {"overlap": "period", "fragments": 2}), ids=str
)
def test_on_arrays(name: str, fails: str, options: dict[str, Any]) -> None:
    wire, x, y = Broken(), np.ones(3), np.ones(2)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x, "y": y}, ALGORITHMS[name](), PERIOD, process_set=wire, **options)
    for _ in range(PERIOD):
        optimizer.step([x, y])
    optimizer.synchronizer.distance()  # What is under way has arrived.
    before = counted(optimizer)
    assert before.rounds == options.get("fragments", 1)
    wire.broken = fails == "wire"
    with pytest.raises((RuntimeError, ValueError), match="cut" if wire.broken else "not finite"):
        for _ in range(2 * PERIOD):
            optimizer.step([np.full(3, 1.0 if wire.broken else math.nan), y])
    assert counted(optimizer) == before


@pytest.mark.parametrize("name", ["easgd", "agn"])
def test_asynchronously_on_arrays(name: str) -> None:
    x = np.ones(3)
    optimizer = PeriodicOptimizer(
        SGD(0.1), {"x": x}, ALGORITHMS[name](), PERIOD, process_set=LocalCommunicator(), asynchronous=True
    )
    for _ in range(PERIOD):
        optimizer.step([x])
    before = counted(optimizer)
    with pytest.raises(RuntimeError, match="not finite"):
        for _ in range(PERIOD):
            optimizer.step([np.full(3, math.nan)])
    assert counted(optimizer) == before
    assert before.rounds == 1


def test_on_all_ranks_where_centers_differ() -> None:
    """The audit after the second exchange fails, in which all is sent."""

    def run(communicator: Communicator) -> Any:
        x = np.ones(3)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 1, process_set=communicator, audit_every=2)
        optimizer.step([x])
        optimizer.synchronizer.center_tensors()[0][0] += communicator.rank
        before = counted(optimizer)
        with pytest.raises(RuntimeError, match="differ between ranks"):
            optimizer.step([x])
        return before == counted(optimizer), before.rounds

    assert run_ranks(2, run) == [(True, 1)] * 2


@pytest.mark.parametrize(
    ("name", "fails", "options"),
    [
        *(case if in_every_run(*case) else thorough(*case) for case in cases()),
        *((name, "values", {"asynchronous": True}) for name in ("easgd", "agn")),
    ],
    ids=str,
)
def test_in_keras(name: str, fails: str, options: dict[str, Any]) -> None:
    """Compiled and not."""
    pytest.importorskip("horovod.tensorflow")
    keras, tf = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    import hvd_periodic.tensorflow as hvdp

    found = []
    for compiled in (False, True):
        wire, variables = Broken(), [keras.Variable(np.ones(size, np.float32), name=f"v{size}") for size in (3, 2)]
        inner = keras.optimizers.SGD(0.1)
        optimizer = hvdp.PeriodicOptimizer(inner, None, ALGORITHMS[name](), PERIOD, process_set=wire, **options)
        optimizer.build(variables)
        apply: Callable[[Any], None] = partial(_apply, optimizer, variables)
        step = tf.function(apply) if compiled else apply
        for _ in range(PERIOD):
            step([tf.ones(3), tf.ones(2)])
        before = counted(optimizer)
        wire.broken = fails == "wire"
        bad = (ValueError, RuntimeError, tf.errors.OpError)
        for _ in range(PERIOD // options.get("fragments", 1) - 1):
            step([tf.ones(3) * (1.0 if wire.broken else math.nan), tf.ones(2)])
        with pytest.raises(bad, match="cut" if wire.broken else "not finite"):
            step([tf.ones(3) * (1.0 if wire.broken else math.nan), tf.ones(2)])
        assert counted(optimizer) == before, compiled
        found.append((before, optimizer.synchronizer.local_steps))
    assert found[0] == found[1]
    assert found[0][0].rounds == options.get("fragments", 1)


def _apply(optimizer: Any, variables: Any, gradients: Any) -> None:
    optimizer.apply(gradients, variables)


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [
        *(("ElasticAverage", False), ("ModelAverage", False), ("AGN", False)),
        *(("ElasticAverage", True), ("AGN", True)),
    ],
)
def test_in_sessions(name: str, asynchronous: bool) -> None:
    """Nor does global_step count it."""
    tensorflow = pytest.importorskip("tensorflow")
    from hvd_periodic.tensorflow import contrib_opt

    tf = tensorflow.compat.v1
    with tf.Graph().as_default(), tf.Session() as session:
        getter = getattr(contrib_opt, f"{name}CustomGetter")("")
        with tf.variable_scope("", custom_getter=getter):
            w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
        step, factor = tf.train.get_or_create_global_step(), tf.placeholder(tf.float32, [])
        cls = getattr(contrib_opt, f"{name}Optimizer")
        options: dict[str, Any] = {"asynchronous": True} if asynchronous else {}
        arguments = (1, True, getter, PERIOD) if name == "ModelAverage" else (1, getter, PERIOD)
        optimizer = cls(tf.train.GradientDescentOptimizer(0.1), *arguments, **options)
        train = optimizer.minimize(tf.reduce_sum(w) * factor, global_step=step)
        initialize = optimizer.get_init_op(*([] if name == "ModelAverage" else [0]))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(initialize)
        counters = [v for v in tf.local_variables() if v.name.rpartition("/")[2].partition(":")[0] in _COUNTED]
        assert len(counters) == len(_COUNTED)
        for _ in range(PERIOD):
            session.run(train, {factor: 1.0})
        before = session.run([*counters, step])
        assert before[-1] == 1
        with pytest.raises(tensorflow.errors.OpError, match="not finite"):
            for _ in range(PERIOD):
                session.run(train, {factor: math.nan})
        assert session.run([*counters, step]) == before


_COUNTED = ("rounds", "bytes_sent", "last_exchange", "next_exchange")
