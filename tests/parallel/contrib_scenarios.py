"""What every rank does with the optimizers of TensorFlow 1 graphs; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.contrib_scenarios FOLDER v1

Under ``v1`` variables are reference variables and conditionals are Switch and Merge by default; under ``v2`` variables
are resources and conditionals are functions.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from hvd_periodic.tensorflow import Compression, contrib_opt
from tests import oracle
from tests.parallel.program import Scenarios, attempt, repeated, rotated
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()

GETTERS = {
    "easgd": contrib_opt.ElasticAverageCustomGetter,
    "average": contrib_opt.ModelAverageCustomGetter,
    "agn": contrib_opt.AGNCustomGetter,
}

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, g: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, 2, moving_rate=0.25, rho=0.0),
    "easgd_contrib": lambda o, g: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, 2, rho=0.0),
    "easgd_rho": lambda o, g: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, 2, moving_rate=0.25, rho=0.5),
    "average": lambda o, g: contrib_opt.ModelAverageOptimizer(o, hvd.size(), hvd.rank() == 0, g, 2),
    "agn": lambda o, g: contrib_opt.AGNOptimizer(o, hvd.size(), g, 4),
}


def getter_of(name: str) -> Any:
    return GETTERS[name.partition("_")[0]]("/job:worker/task:0")


def init_op(optimizer: Any) -> Any:
    if isinstance(optimizer, contrib_opt.ModelAverageOptimizer):
        return optimizer.get_init_op()
    return optimizer.get_init_op(hvd.rank())


def hook(optimizer: Any) -> Any:
    if isinstance(optimizer, contrib_opt.ModelAverageOptimizer):
        return optimizer.make_session_run_hook()
    return optimizer.make_session_run_hook(hvd.rank() == 0, hvd.rank())


def started(optimizer: Any) -> Any:
    """Return a session in which all ranks have started from the root's values."""
    start = init_op(optimizer)
    session = tf.Session()
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    session.run(start)
    return session


def centers() -> list[Any]:
    return [
        v
        for v in tf.global_variables()
        if v.op.name.startswith(contrib_opt.GLOBAL_VARIABLE_NAME) and "/center_" not in v.op.name
    ]


def bits(values: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


@scenario
def constant_gradients() -> Any:
    """Gradient −1 − 2 rank, of every kind of variable in one graph: x, c and global_step after each step."""
    results: dict[str, Any] = {}
    for name in ("easgd", "easgd_contrib", "average", "agn"):
        with tf.Graph().as_default():
            getter, weights = getter_of(name), {}
            for use_resource in (None, True, False):
                with tf.variable_scope("", custom_getter=getter, use_resource=use_resource):
                    start = tf.constant([float(hvd.rank())], tf.float64)
                    weights[use_resource] = tf.get_variable(f"w{use_resource}", initializer=start)
            global_step = tf.train.get_or_create_global_step()
            local = tf.train.GradientDescentOptimizer(0.1 if name == "agn" else 1.0)
            optimizer = OPTIMIZERS[name](local, getter)
            loss = tf.reduce_sum(tf.concat(list(weights.values()), 0) * (-1.0 - 2.0 * hvd.rank()))
            train = optimizer.minimize(loss, global_step=global_step)
            results |= {f"{name} {use_resource}": [] for use_resource in weights}
            with started(optimizer) as session:
                for _ in range(8):
                    session.run(train)
                    *values, rounds = session.run([*weights.values(), *centers(), global_step])
                    for use_resource, x, c in zip(weights, values[:3], values[3:], strict=True):
                        results[f"{name} {use_resource}"].append((float(x[0]), float(c[0]), int(rounds)))
    return results


@scenario
def compressed() -> Any:
    """The losses of the oracle with its momentum, as 8 bits and as the largest two: x after every step, and c."""
    results: dict[str, Any] = {}
    wires = {"int8": Compression.int8, "topk": Compression.topk(0.5), "bf16": Compression.bf16}
    for name, wire in rotated(("easgd", "average", "agn", *repeated("easgd", "average")), tuple(wires)):
        with tf.Graph().as_default():
            getter = getter_of(name)
            with tf.variable_scope("", custom_getter=getter):
                w = tf.get_variable("w", initializer=tf.constant(oracle.START, tf.float64))
            optimizer = {
                "easgd": lambda o, g, c: contrib_opt.ElasticAverageOptimizer(
                    o, hvd.size(), g, 3, moving_rate=0.25, rho=0.0, compression=c
                ),
                "average": lambda o, g, c: contrib_opt.ModelAverageOptimizer(
                    o, hvd.size(), hvd.rank() == 0, g, 3, compression=c
                ),
                "agn": lambda o, g, c: contrib_opt.AGNOptimizer(o, hvd.size(), g, 3, compression=c),
            }[name](tf.train.MomentumOptimizer(oracle.RATE, oracle.MOMENTUM), getter, wires[wire])
            gradient = tf.placeholder(tf.float64, [len(oracle.START)])
            step = tf.train.get_or_create_global_step()
            train = optimizer.apply_gradients([(gradient, w)], step)
            seen = []
            with started(optimizer) as session:
                for _ in range(oracle.STEPS):
                    session.run(train, {gradient: oracle.gradient(hvd.rank(), session.run(w).tolist())})
                    seen.append(session.run(w).tolist())
                results[f"{name} {wire}"] = [seen, session.run(centers()[0]).tolist()]
    return results


@scenario
def not_finite_on_the_last_rank() -> Any:
    """The error of a message in 8 bits, and the center after it."""
    with tf.Graph().as_default():
        getter = getter_of("average")
        with tf.variable_scope("", custom_getter=getter):
            w = tf.get_variable("w", initializer=tf.zeros([2]))
        optimizer = contrib_opt.ModelAverageOptimizer(
            tf.train.GradientDescentOptimizer(0.1), hvd.size(), hvd.rank() == 0, getter, 2, compression=Compression.int8
        )
        gradient = tf.placeholder(tf.float32, [2])
        train = optimizer.apply_gradients([(gradient, w)], tf.train.get_or_create_global_step())
        with started(optimizer) as session:
            session.run(train, {gradient: [1.0, 1.0]})
            last = hvd.rank() == hvd.size() - 1
            bad = {gradient: [np.nan if last else 1.0, 1.0]}
            error = attempt(lambda: session.run(train, bad), tf.errors.OpError)
            return [error, session.run(centers()[0]).tolist()]


@scenario
def default_rho() -> Any:
    """``rho = moving_rate / learning_rate``, through minimize: x and c after each step."""
    with tf.Graph().as_default():
        getter = getter_of("easgd")
        with tf.variable_scope("", custom_getter=getter):
            w = tf.get_variable("w", initializer=tf.constant([0.0], tf.float64))
        optimizer = contrib_opt.ElasticAverageOptimizer(
            tf.train.GradientDescentOptimizer(1.0), hvd.size(), getter, 2, moving_rate=0.25
        )
        train = optimizer.minimize(tf.reduce_sum(-w))
        trajectory = []
        with started(optimizer) as session:
            for _ in range(4):
                session.run(train)
                trajectory.append([float(value[0]) for value in session.run([w, centers()[0]])])
    return trajectory


def quadratic(w: Any) -> Any:
    """Return the oracle's loss of this rank; ½ h x² − h m x."""
    size = len(oracle.START)
    zero = oracle.gradient(hvd.rank(), [0.0] * size)
    one = oracle.gradient(hvd.rank(), [1.0] * size)
    curvature = tf.constant(np.subtract(one, zero))
    return tf.reduce_sum(0.5 * curvature * tf.square(w) + tf.constant(zero, tf.float64) * w)


@scenario
def quadratics() -> Any:
    """The losses of the oracle, with momentum; x and c at the end."""
    results = {}
    for name in ("easgd_rho", "agn", *repeated("easgd", "easgd_contrib", "average")):
        with tf.Graph().as_default():
            getter = getter_of(name)
            with tf.variable_scope("scope", custom_getter=getter):
                w = tf.get_variable("w", initializer=tf.constant(oracle.START, tf.float64))
            rate, momentum = tf.constant(oracle.RATE, tf.float64), tf.constant(oracle.MOMENTUM, tf.float64)
            optimizer = OPTIMIZERS[name](tf.train.MomentumOptimizer(rate, momentum), getter)
            train = optimizer.minimize(quadratic(w), global_step=tf.train.get_or_create_global_step())
            with started(optimizer) as session:
                for _ in range(oracle.STEPS):
                    session.run(train)
                x, c = session.run([w, centers()[0]])
        results[name] = (x.tolist(), c.tolist())
    return results


def network(inputs: Any, partitioner: Any = None) -> Any:
    """A model with a partitioned and a reused variable, an embedding, and a moving average."""
    weights = tf.get_variable(
        "weights", [3, 4], initializer=tf.random_normal_initializer(seed=hvd.rank()), partitioner=partitioner
    )
    hidden = tf.matmul(inputs, weights)
    with tf.variable_scope("normalization"):
        average = tf.get_variable("average", [4], initializer=tf.zeros_initializer(), trainable=False)
    mean = tf.reduce_mean(hidden, 0)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, 0.9 * average + 0.1 * mean))
    table = tf.get_variable("table", [7, 4], initializer=tf.random_normal_initializer(seed=hvd.rank() + 10))
    hidden += tf.nn.embedding_lookup(table, tf.cast(tf.abs(inputs[:, 0]) * 2, tf.int32) % 7) - mean
    last = tf.get_variable("last", [4, 1], initializer=tf.random_normal_initializer(seed=hvd.rank() + 20))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        again = tf.get_variable("last", [4, 1])
    return tf.matmul(hidden, 0.5 * last + 0.5 * again)


def build(name: str, inner: Any, partitioned: bool, parameter_servers: bool) -> tuple[Any, ...]:
    """Build a training graph as scripts for contrib did."""
    getter = getter_of(name)
    device = tf.train.replica_device_setter(ps_tasks=1, worker_device=f"/job:worker/task:{hvd.rank()}")
    partitioner = tf.fixed_size_partitioner(2) if partitioned else None
    with tf.device(device if parameter_servers else None), tf.variable_scope("", custom_getter=getter):
        global_step = tf.train.get_or_create_global_step()
        inputs = tf.placeholder(tf.float32, [None, 3])
        loss = tf.reduce_mean(tf.square(network(inputs, partitioner) - inputs[:, :1]))
        optimizer = OPTIMIZERS[name](inner, getter)
        gradients = optimizer.compute_gradients(loss)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = optimizer.apply_gradients(gradients, global_step=global_step)
    return inputs, gradients, train, optimizer, global_step


@scenario
def networks() -> Any:
    """Adam and momentum inside, other data on each rank: bits of centers, averages and replicas after an exchange."""
    results = {}
    inner = {"adam": lambda: tf.train.AdamOptimizer(0.05), "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9)}
    cases = (("easgd_rho", "momentum"), ("average", "adam"))
    for name, kind in (*cases, *repeated(("agn", "momentum"), ("easgd", "adam"), ("agn", "adam"))):
        with tf.Graph().as_default():
            inputs, gradients, train, optimizer, _ = build(name, inner[kind](), kind == "adam", kind == "momentum")
            random = np.random.default_rng(hvd.rank())
            statistics = [v for v in tf.global_variables() if v.op.name == "normalization/average"]
            seen = []
            with started(optimizer) as session:
                start = bits(session.run(tf.trainable_variables()))
                for step in range(1, 9):
                    session.run(train, {inputs: random.standard_normal((8, 3))})
                    if step % 4 == 0:
                        seen.append([bits(session.run(centers())), bits(session.run(statistics))])
                session.run(train, {inputs: random.standard_normal((8, 3))})
                results[f"{name} {kind}"] = {
                    "start": start,
                    "exchanged": seen,
                    "local": bits(session.run(tf.trainable_variables())),
                    "sparse": [isinstance(g, tf.IndexedSlices) for g, _ in gradients],
                    "slots": optimizer.get_slot_names(),
                    "slot": optimizer.get_slot(gradients[0][1], optimizer.get_slot_names()[0]).op.name,
                    "variables": len(optimizer.variables()),
                }
    return results


@scenario
def collections() -> Any:
    """Names of the variables in every collection."""
    results = {}
    for name in ("easgd", "average", "agn"):
        with tf.Graph().as_default():
            build(name, tf.train.MomentumOptimizer(0.1, 0.9), False, False)
            results[name] = {
                key: sorted(v.op.name for v in tf.get_collection(getattr(tf.GraphKeys, key)))
                for key in ("GLOBAL_VARIABLES", "LOCAL_VARIABLES", "TRAINABLE_VARIABLES")
            }
    return results


def outside_of_hooks(session: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with the session behind a monitored one."""

    def step(step_context: Any) -> Any:
        return function(step_context.session)

    return session.run_step_fn(step)


def train_and_save(name: str, folder: str) -> dict[str, Any]:
    """Train for eight steps, from the root's checkpoint if there is one; save the center under the original names."""
    root = hvd.rank() == 0
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as own:
        inputs, _, train, optimizer, global_step = build(name, tf.train.AdamOptimizer(0.05), True, True)
        saver = optimizer.swapping_saver()
        random = np.random.default_rng(hvd.rank())
        read = [*centers(), global_step]
        with tf.train.MonitoredTrainingSession(
            is_chief=root, checkpoint_dir=folder if root else None, hooks=[hook(optimizer)]
        ) as session:
            first = outside_of_hooks(session, lambda plain: plain.run(read))
            for _ in range(8):
                session.run(train, {inputs: random.standard_normal((8, 3))})
            path = outside_of_hooks(session, lambda plain: saver.save(plain, f"{own}/center"))
            last = outside_of_hooks(session, lambda plain: plain.run(read))
        reader = tf.train.load_checkpoint(path)
        parts = [value for v, value in zip(centers(), last, strict=False) if "weights" in v.name]
        return {
            "first": bits(first[:-1]),
            "last": bits(last[:-1]),
            "steps": [int(first[-1]), int(last[-1])],
            "names": sorted(reader.get_variable_to_shape_map()),
            "saved the center": bool((reader.get_tensor("weights") == np.concatenate(parts)).all()),
        }


@scenario
def monitored_session() -> Any:
    """Train, save on the root alone, and go on in a new session: steps, and what all ranks start from."""
    results = {}
    for name in ("average", "agn"):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = [train_and_save(name, folder) for _ in range(2)]
    return results


@scenario
def first_center_step_of_adam() -> Any:
    """A gradient of one sign: Adam's first step is its rate, if its powers of β are those of a first step."""
    with tf.Graph().as_default():
        getter = getter_of("agn")
        with tf.variable_scope("", custom_getter=getter):
            w = tf.get_variable("w", initializer=tf.constant([0.0]))
        optimizer = contrib_opt.AGNOptimizer(tf.train.AdamOptimizer(0.1), hvd.size(), getter, 3)
        train = optimizer.minimize(-tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())
        with started(optimizer) as session:
            for _ in range(3):
                session.run(train)
            return [float(value[0]) for value in session.run([w, centers()[0]])]


@scenario
def two_optimizers() -> Any:
    """Two parts of a model, each with an optimizer and a period of its own; x and c of both after six steps."""
    with tf.Graph().as_default():
        trains, variables, optimizers = [], [], []
        for name, kind in (("a", "average"), ("b", "easgd")):
            getter = getter_of(kind)
            with tf.variable_scope(name, custom_getter=getter):
                variables.append(tf.get_variable("w", initializer=tf.constant([0.0], tf.float64)))
            optimizer = OPTIMIZERS[kind](tf.train.GradientDescentOptimizer(1.0), getter)
            loss = tf.reduce_sum(variables[-1] * (-1.0 - 2.0 * hvd.rank()))
            step = tf.train.get_or_create_global_step()
            trains.append(optimizer.minimize(loss, global_step=step, var_list=[variables[-1]]))
            optimizers.append(optimizer)
        starts = [init_op(optimizer) for optimizer in optimizers]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for start in starts:  # Collectives in one order on all ranks.
                session.run(start)
            for _ in range(6):
                for train in trains:
                    session.run(train)
            return [
                float(value[0])
                for value in session.run(
                    [
                        *variables,
                        *centers(),
                    ]
                )
            ] + [int(session.run(step))]


@scenario
def two_initializations_at_once() -> Any:
    """One run starts the operations of two optimizers, in another order on each rank; returns the replicas."""
    with tf.Graph().as_default():
        starts, variables = [], []
        for i, name in enumerate("ab"):
            getter = getter_of("easgd")
            with tf.variable_scope(name, custom_getter=getter):
                variables.append(tf.get_variable("w", initializer=tf.constant([1.0 + hvd.rank() + 10 * i])))
            optimizer = OPTIMIZERS["easgd"](tf.train.GradientDescentOptimizer(1.0), getter)
            optimizer.minimize(tf.reduce_sum(variables[-1]), var_list=[variables[-1]])
            late = tf.py_func(lambda: time.sleep(0.2), [], [])
            with tf.control_dependencies([late] if i == hvd.rank() % 2 else []):
                starts.append(init_op(optimizer))
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(starts)
            return [float(value[0]) for value in session.run(variables)]


@scenario
def variables_in_another_order() -> Any:
    """``var_list`` reordered and a subset of the variables: the elastic term of each belongs to it."""
    with tf.Graph().as_default():
        getter = getter_of("easgd")
        with tf.variable_scope("", custom_getter=getter):
            a, b, c = (
                tf.get_variable(name, initializer=tf.constant(value))
                for name, value in (("a", 1.0), ("b", 10.0), ("c", 100.0))
            )
        optimizer = OPTIMIZERS["easgd_rho"](tf.train.GradientDescentOptimizer(1.0), getter)
        pairs = optimizer.compute_gradients(a * b * c, var_list=[c, a])
        optimizer.apply_gradients(pairs)
        with started(optimizer) as session:
            session.run([a.assign(3.0), c.assign(400.0)])
            return [[variable.op.name for _, variable in pairs], [float(g) for g in session.run([g for g, _ in pairs])]]


def of_contribs_tests(name: str, make: Callable[[Any], Any], starts: tuple[float, float], gradient: float) -> Any:
    """Yield what tensors that are found by name hold, in a monitored session: at the start and after every step.

    Reference variables, as contrib had; one of them in two parts, pairs that are lists in a tuple, an int32 step.
    """
    getter = getter_of(name)
    with tf.variable_scope("", custom_getter=getter, use_resource=False):
        step = tf.Variable(0, name="global_step", trainable=False, collections=["global_step", "variables"])
        variables = [tf.get_variable(f"v{i}", initializer=start) for i, start in enumerate(starts)]
        partitioner = tf.fixed_size_partitioner(2)
        variables += tf.get_variable("w", [2, 4], initializer=tf.ones_initializer(), partitioner=partitioner)
    optimizer = make(getter)
    pairs = tuple([tf.fill(variable.shape, gradient), variable] for variable in variables)
    train = [optimizer.apply_gradients(pairs, step)]
    graph = tf.get_default_graph()
    names = ["v0:0", "v1:0", "w/part_1:0"]
    read = [graph.get_tensor_by_name(prefix + name) for prefix in ("", "global_center_variable/") for name in names]
    saver = optimizer.swapping_saver()
    found = {"global": sorted(v.op.name for v in tf.global_variables()), "seen": []}
    with tf.train.MonitoredTrainingSession(hooks=[hook(optimizer)]) as session, tempfile.TemporaryDirectory() as folder:

        def look() -> None:
            *values, steps = session.run([*read, tf.train.get_global_step()])
            found["seen"].append([*(float(np.unique(value).item()) for value in values), int(steps)])

        look()
        for _ in range(8):
            session.run(train)
            look()
        path = saver.save(session._sess._sess._sess._sess, f"{folder}/center")
        reader = tf.train.load_checkpoint(path)
        saved = {key: np.unique(reader.get_tensor(key)).tolist() for key in sorted(reader.get_variable_to_shape_map())}
    return found | {"saved": saved}


@scenario
def contribs_tests() -> Any:
    """The facts of contrib's own tests: elastic averaging and AGN with one worker, averaging with several."""

    def descent() -> Any:
        return tf.train.GradientDescentOptimizer(1.0)

    def adam() -> Any:
        return tf.train.AdamOptimizer(learning_rate=0.1, beta1=0.0, beta2=0.0)

    n, rank = hvd.size(), hvd.rank()
    makes: dict[str, tuple[Callable[[Any], Any], tuple[float, float], float]] = {
        "easgd": (
            lambda getter: contrib_opt.ElasticAverageOptimizer(
                opt=descent(), num_worker=n, moving_rate=2 / (n + 1), communication_period=2, ea_custom_getter=getter
            ),
            (0.0, 1.0),
            -1.0,
        ),
        "average": (
            lambda getter: contrib_opt.ModelAverageOptimizer(
                opt=descent(), num_worker=n, ma_custom_getter=getter, is_chief=rank == 0, interval_steps=2
            ),
            (0.0, 1.0),
            -1.0 if rank == 0 else -2.0,
        ),
        "agn": (
            lambda getter: contrib_opt.AGNOptimizer(adam(), num_worker=n, communication_period=4, custom_getter=getter),
            (0.0, 0.5),
            -1.0,
        ),
    }
    results = {}
    for name, case in makes.items():
        with tf.Graph().as_default():
            results[name] = of_contribs_tests(name, *case)
    return results


@scenario
def initializers_built_too_early() -> Any:
    """Before minimize: what a session says, with reference variables and resources."""
    results = {}
    cases = [(name, with_getter) for name in ("easgd", "average", "agn") for with_getter in (True, False)]
    for (name, with_getter), use_resource in rotated(cases, (True, True, False, False)):
        with tf.Graph().as_default(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            getter = getter_of(name) if with_getter else None
            with tf.variable_scope("", custom_getter=getter, use_resource=use_resource):
                w = tf.get_variable("w", initializer=tf.constant([1.0]))
                step = tf.get_variable("global_step", initializer=0, trainable=False)
            early = [tf.global_variables_initializer(), tf.local_variables_initializer()]
            if not with_getter:
                early.append(hvd.broadcast_global_variables(0))
            optimizer = OPTIMIZERS[name](tf.train.AdamOptimizer(0.1), getter)
            train = optimizer.minimize(tf.reduce_sum(w), global_step=step)
            then = [init_op(optimizer)] if with_getter else []
            late = [tf.global_variables_initializer(), tf.local_variables_initializer()]
            session = tf.Session()
            for operation in early:
                session.run(operation)
            errors = [attempt(lambda: session.run([*then, train]), tf.errors.OpError)]  # noqa: B023
            for operation in (*late, *then):
                session.run(operation)
            errors.append(attempt(lambda: session.run(train), tf.errors.OpError))  # noqa: B023
            warned = [str(one.message) for one in told if "initializer" in str(one.message)]
        results[f"{name} {with_getter} {use_resource}"] = [errors, warned]
    return results


@scenario
def disagreements() -> Any:
    """Arguments and models that differ on the last rank only."""
    last = hvd.rank() == hvd.size() - 1

    def make(
        period: int = 2,
        rate: float = 0.25,
        shape: tuple[int, ...] = (2,),
        workers: int = hvd.size(),
        buffers: str = "average",
        foreign: bool = False,
        used: bool = True,
    ) -> None:
        with tf.Graph().as_default():
            getter = getter_of("easgd")
            with tf.variable_scope("", custom_getter=getter):
                w = tf.get_variable("w", shape, initializer=tf.zeros_initializer())
                more = tf.get_variable("more", initializer=tf.constant([0.0]))
                tf.get_variable("average", initializer=tf.constant([0.0]), trainable=False)
            optimizer = contrib_opt.ElasticAverageOptimizer(
                tf.train.GradientDescentOptimizer(1.0), workers, getter, period, rate, 0.5, buffers=buffers
            )
            trained = [w, more, *([tf.Variable([1.0])] if foreign else [])]
            loss = tf.add_n([tf.reduce_sum(v) for v in trained if used or v is not more])
            optimizer.minimize(loss, var_list=trained)

    def make_agn(local: Any = tf.train.MomentumOptimizer, rate: float = 0.1) -> None:
        with tf.Graph().as_default():
            getter = getter_of("agn")
            with tf.variable_scope("", custom_getter=getter):
                w = tf.get_variable("w", initializer=tf.constant([0.0]))
            inner = local(rate) if local is tf.train.AdamOptimizer else local(rate, 0.9)
            OPTIMIZERS["agn"](inner, getter).minimize(tf.reduce_sum(w))

    cases: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
        "none": (make, {}),
        "period": (make, {"period": 3}),
        "rate": (make, {"rate": 0.05}),
        "shape": (make, {"shape": (3,)}),
        "refused": (make, {"rate": 7.0}),
        "workers": (make, {"workers": 17}),
        "foreign": (make, {"foreign": True}),
        "without gradient": (make, {"used": False}),
        "buffers": (make, {"buffers": "local"}),
        "agn": (make_agn, {}),
        "class of the center optimizer": (make_agn, {"local": tf.train.AdamOptimizer}),
        "rate of the center optimizer": (make_agn, {"rate": 0.2}),
    }
    return {name: attempt(lambda case=case: case[0](**(case[1] if last else {}))) for name, case in cases.items()}


def main(folder: Path, mode: str) -> None:
    """Run all scenarios."""
    if mode == "v1":
        tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    getter = getter_of("average")
    before = attempt(lambda: OPTIMIZERS["average"](tf.train.GradientDescentOptimizer(1.0), getter))
    hvd.init()
    scenario.run(folder, hvd.rank(), not_initialized=before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
