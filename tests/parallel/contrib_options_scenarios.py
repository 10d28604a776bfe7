"""Options of the optimizers for TensorFlow 1 graphs, compared with numpy's; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.contrib_options_scenarios FOLDER v1
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import hvd_periodic.numpy as hvdn
from hvd_periodic import BMUF, Compression, DiLoCo, Piecewise, SlowMo
from hvd_periodic.tensorflow import contrib_opt
from hvd_periodic.tensorflow.private import eager
from tests import oracle
from tests.parallel import contrib_differences
from tests.parallel.program import Scenarios, attempt, repeated
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()
scenario.include(contrib_differences.scenario)

SIZES = {"a": 2, "b": 1}
"""Elements of the variables."""
RATE, MOMENTUM = 0.125, 0.5
"""Numbers that a float32 holds."""

Values = list[list[float]]

GRAPHS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, g, p, **k: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, p, 0.25, 0.0, **k),
    "easgd_rho": lambda o, g, p, **k: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, p, 0.25, 0.5, **k),
    "average": lambda o, g, p, **k: contrib_opt.ModelAverageOptimizer(o, hvd.size(), hvd.rank() == 0, g, p, **k),
    "agn": lambda o, g, p, **k: contrib_opt.AGNOptimizer(o, hvd.size(), g, p, **k),
    "diloco": lambda o, g, p, **k: contrib_opt.PeriodicOptimizer(o, hvd.size(), g, DiLoCo(), p, **k),
    "slowmo": lambda o, g, p, **k: contrib_opt.PeriodicOptimizer(o, hvd.size(), g, SlowMo, p, **k),
    "bmuf": lambda o, g, p, **k: contrib_opt.PeriodicOptimizer(o, hvd.size(), g, BMUF(), p, **k),
}
ARRAYS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, x, p, **k: hvdn.ElasticAverageOptimizer(o, x, p, 0.25, **k),
    "easgd_rho": lambda o, x, p, **k: hvdn.ElasticAverageOptimizer(o, x, p, 0.25, rho=0.5, **k),
    "average": lambda o, x, p, **k: hvdn.ModelAverageOptimizer(o, x, p, **k),
    "agn": lambda o, x, p, **k: hvdn.AGNOptimizer(o, x, p, **k),
    "diloco": lambda o, x, p, **k: hvdn.PeriodicOptimizer(o, x, DiLoCo(), p, **k),
    "slowmo": lambda o, x, p, **k: hvdn.PeriodicOptimizer(o, x, SlowMo(), p, **k),
    "bmuf": lambda o, x, p, **k: hvdn.PeriodicOptimizer(o, x, BMUF(), p, **k),
}
GETTERS: dict[str, Callable[[str], Any]] = {
    "easgd": contrib_opt.ElasticAverageCustomGetter,
    "average": contrib_opt.ModelAverageCustomGetter,
    "agn": contrib_opt.AGNCustomGetter,
}


def parts(x: Any) -> list[np.ndarray]:
    """Return a vector of all elements as the values of the variables."""
    return np.split(np.asarray(x), np.cumsum(list(SIZES.values()))[:-1])


def gradients(values: Any) -> list[np.ndarray]:
    """Return the oracle's gradients of this rank."""
    return parts(oracle.gradient(hvd.rank(), np.concatenate(values).tolist()))


class Session:
    """Two variables, which start at other values on each rank, and an optimizer with momentum.

    Args:
        name: of the algorithm.
        with_getter: as a script of tf.contrib.opt, or as one of Horovod.
        period: of the exchanges.
        trains_b: the ranks that have a gradient of b; None: all.
        options: of the optimizer.
    """

    def __init__(
        self, name: str, with_getter: bool, period: Any, trains_b: Collection[int] | None = None, **options: Any
    ) -> None:
        trained = ["a", "b"] if trains_b is None or hvd.rank() in trains_b else ["a"]
        self.graph = tf.Graph()
        self.holds = options.get("center") != "root" or hvd.rank() == 0
        with self.graph.as_default():
            made = GETTERS.get(name.partition("_")[0], contrib_opt.PeriodicCustomGetter)
            getter = made("") if with_getter else None
            start = parts(np.array(oracle.START) + hvd.rank())
            with tf.variable_scope("", custom_getter=getter):
                self.x = [
                    tf.get_variable(key, initializer=value, dtype=tf.float64)
                    for key, value in zip(SIZES, start, strict=True)
                ]
            local = tf.train.MomentumOptimizer(RATE, MOMENTUM)
            self.optimizer = GRAPHS[name](local, getter, period, **options)
            self.fed = [tf.placeholder(tf.float64, [size]) for size in SIZES.values()]
            of = zip(SIZES, self.fed, self.x, strict=True)
            loss = tf.add_n([tf.reduce_sum(g * x) for key, g, x in of if key in trained])
            self.global_step = tf.train.get_or_create_global_step()
            self.train = self.optimizer.minimize(loss, global_step=self.global_step)
            by_name = {v.op.name: v for v in tf.global_variables()}
            policies = options.get("parameters", {})
            averaged = [key for key in SIZES if policies.get(key) not in ("local", "broadcast")]
            self.centers = [by_name[f"{contrib_opt.GLOBAL_VARIABLE_NAME}/{key}"] for key in averaged]
            initialize = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
            task = [] if isinstance(self.optimizer, contrib_opt.ModelAverageOptimizer) else [hvd.rank()]
            common = [v for v in tf.global_variables() if policies.get(v.op.name) != "local"]
            start = self.optimizer.get_init_op(*task) if with_getter else hvd.broadcast_variables(common, 0)
            self.landed = self.optimizer.get_land_op()
            self.session = tf.Session()
            self.session.run(initialize)
            self.session.run(start)

    def step(self) -> None:
        """Take a local step."""
        fed = gradients(self.session.run(self.x))
        self.session.run(self.train, dict(zip(self.fed, fed, strict=True)))

    def land(self) -> None:
        """Take what is in flight."""
        self.session.run(self.landed)

    def values(self) -> Values:
        """x and c, where that is on this rank."""
        read = (self.x, self.centers if self.holds else [])
        return [np.concatenate([[], *self.session.run(of)]).tolist() for of in read]


class Arrays:
    """The same with an optimizer of numpy."""

    def __init__(self, name: str, period: Any, trains_b: Collection[int] | None = None, **options: Any) -> None:
        self.trains_b = trains_b is None or hvd.rank() in trains_b
        self.x = dict(zip(SIZES, parts(np.array(oracle.START) + hvd.rank()), strict=True))
        local = hvdn.SGD(RATE, MOMENTUM)
        self.optimizer = ARRAYS[name](local, self.x, period, **options)

    def step(self) -> None:
        """Take a local step."""
        of_a, of_b = gradients(list(self.x.values()))
        self.optimizer.step([of_a, of_b if self.trains_b else None])

    def land(self) -> None:
        """Take what is in flight."""
        self.optimizer.synchronizer.land()

    def values(self) -> Values:
        """x and c, where that is on this rank."""
        center = self.optimizer.synchronizer.center_tensors()
        return [np.concatenate([[], *of]).tolist() for of in (self.x.values(), center)]


def course(training: Session | Arrays, overlap: bool) -> list[Values]:
    """Return x and c after each of the oracle's steps; with overlap, c once everything has landed."""
    seen = []
    for _ in range(oracle.STEPS):
        training.step()
        seen.append([training.values()[0], []] if overlap else training.values())
    if overlap:
        training.land()
        seen.append(training.values())
    return seen


def beside(
    name: str, with_getter: bool, period: Any, outer: tuple[float, float] | None = None, **options: Any
) -> list[list[Values]]:
    """Return the courses of a session and of arrays; ``outer`` is rate and momentum of what moves the center."""
    own = {} if outer is None else {"outer_optimizer": tf.train.MomentumOptimizer(*outer)}
    of_session = course(Session(name, with_getter, period, **own, **options), "overlap" in options)
    own = {} if outer is None else {"outer_optimizer": hvdn.SGD(*outer)}
    with eager():
        return [of_session, course(Arrays(name, period, **own, **options), "overlap" in options)]


def all_beside(*cases: tuple[str, str, bool, Any, dict[str, Any]]) -> dict[str, list[list[Values]]]:
    """Return the courses of cases, by their names: the algorithm, with a getter or not, the period, and options."""
    return {case: beside(name, with_getter, period, **options) for case, name, with_getter, period, options in cases}


@scenario
def weights_and_audits() -> Any:
    """Ranks that count differently, also by a function of the exchange; centers that ranks compare."""
    own = 1.0 + 2.0 * hvd.rank()
    asked = iter(range(1, 100))
    return all_beside(
        ("function", "average", True, 5, {"weight": lambda: own + (next(asked) % 2)}),
        *repeated(
            ("no getter", "average", False, 3, {"weight": own, "audit_every": 1}),
            ("agn", "agn", True, 4, {"op": "average", "weight": own}),
            ("easgd", "easgd", True, 2, {"audit_every": 2}),
            ("average", "average", True, 3, {"weight": own}),
        ),
    )


@scenario
def a_center_that_went_astray() -> Any:
    """Of the last rank, before the second exchange, after which ranks compare: the errors of two steps."""
    training, last = Session("easgd", True, 1, audit_every=2), hvd.rank() == hvd.size() - 1
    with training.graph.as_default():
        astray = training.centers[1].assign([7.0])
    errors = []
    for step in range(2):
        if step == 1 and last:
            training.session.run(astray)
        errors.append(attempt(training.step, tf.errors.OpError))
    return errors


@scenario
def fragments() -> Any:
    """Two parts, one after another within a period; also in 8 bits, and of ranks that count differently."""
    two = {"fragments": 2}
    return all_beside(
        ("weighed", "average", True, Piecewise({0: 2, 4: 5}), {**two, "weight": 1.0 + hvd.rank()}),
        *repeated(
            ("average", "average", False, 5, {**two, "compression": Compression.int8}),
            ("easgd_rho", "easgd_rho", False, 3, two),
            *(("easgd", "easgd", True, 4, two), ("agn", "agn", True, 4, two)),
        ),
    )


@scenario
def other_algorithms() -> Any:
    """With their own vectors beside the center, an optimizer that moves it, and options."""
    return all_beside(
        ("outer", "diloco", False, 4, {"outer": (0.5, 0.25), "fragments": 2}),
        *repeated(
            ("slowmo", "slowmo", True, 3, {"fragments": 2}),
            ("bmuf", "bmuf", False, 2, {"weight": 1.0 + hvd.rank()}),
            *(("agn", "agn", True, 4, {"outer": (0.25, 0.5)}), ("diloco", "diloco", True, 3, {})),
        ),
    )


@scenario
def participation() -> Any:
    """A variable that every rank keeps for itself, or that follows the root."""
    own, following = {"parameters": {"b": "local"}}, {"parameters": {"b": "broadcast"}}
    return all_beside(
        ("agn", "agn", True, 4, own),
        ("easgd, broadcast", "easgd", False, 3, {**following, "audit_every": 1}),
        *repeated(
            ("average, broadcast", "average", True, 4, {**following, "overlap": 1}),
            ("average", "average", False, 3, {**own, "weight": 1.0 + hvd.rank()}),
            *(("easgd", "easgd", True, 3, own), ("easgd_rho", "easgd_rho", False, 2, own)),
            ("diloco, broadcast", "diloco", True, 3, following),
            ("easgd_rho, broadcast", "easgd_rho", True, 3, following),
            ("agn, broadcast", "agn", False, 4, following),
        ),
    )


@scenario
def presence() -> Any:
    """A variable that only some ranks train, or none: the others, too, take what these have learned."""
    only = {"parameters": {"b": "present"}}
    first, none, last = {**only, "trains_b": [0]}, {**only, "trains_b": []}, {**only, "trains_b": [hvd.size() - 1]}
    return all_beside(
        ("diloco, root", "diloco", True, 3, {**first, "center": "root", "outer": (0.5, 0.25)}),
        ("slowmo, in flight", "slowmo", True, 4, {**last, "overlap": 1}),
        ("bmuf, none", "bmuf", False, 2, none),
        *repeated(
            *(
                ("easgd", "easgd", True, 3, first),
                ("average", "average", True, 3, {**last, "weight": 1.0 + hvd.rank()}),
            ),
            ("easgd_rho", "easgd_rho", False, 2, {**first, "audit_every": 1}),
            ("agn", "agn", True, 4, {**first, "outer": (0.25, 0.5), "op": "average"}),
            ("agn, none", "agn", False, 3, {**none, "outer": (0.25, 0.5)}),
            ("diloco", "diloco", False, 3, {**last, "fragments": 2}),
            ("agn, in flight", "agn", True, 4, {**last, "overlap": "period"}),
            ("agn, root", "agn", True, 4, {**none, "center": "root", "outer": (0.25, 0.5), "fragments": 2}),
            ("bmuf", "bmuf", True, 3, first),
        ),
    )


class TableSession:
    """A table of which each step touches some rows, as in ``oracle.of_table``, and an optimizer without momentum.

    Args:
        name: of the algorithm.
        with_getter: as a script of tf.contrib.opt, or as one of Horovod.
        sparse: whether gradients are ``tf.IndexedSlices``.
        options: of the optimizer.
    """

    def __init__(self, name: str, with_getter: bool, sparse: bool, **options: Any) -> None:
        with tf.Graph().as_default():
            made = GETTERS.get(name.partition("_")[0], contrib_opt.PeriodicCustomGetter)
            getter, start = made("") if with_getter else None, np.repeat(np.array(oracle.START)[:, None], WIDTH, 1)
            with tf.variable_scope("", custom_getter=getter):
                self.table = tf.get_variable("t", initializer=start, dtype=tf.float64)
            make = {**GRAPHS, **TABLES}[name]
            self.optimizer = make(tf.train.GradientDescentOptimizer(oracle.RATE), getter, TABLE_PERIOD, **options)
            self.rows, self.fed = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.float64, [None, WIDTH])
            g = tf.IndexedSlices(self.fed, self.rows, tf.constant(start.shape))
            pairs = [(g if sparse else tf.convert_to_tensor(g), self.table)]
            self.train = self.optimizer.apply_gradients(pairs, tf.train.get_or_create_global_step())
            by_name = {v.op.name: v for v in tf.global_variables()}
            self.center = by_name[f"{contrib_opt.GLOBAL_VARIABLE_NAME}/t"]
            initialize = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
            task = [] if isinstance(self.optimizer, contrib_opt.ModelAverageOptimizer) else [hvd.rank()]
            self.initialized = self.optimizer.get_init_op(*task) if with_getter else tf.no_op()
            self.sent = self.optimizer._synchronizers[0].progress.variables["bytes_sent"]
            self.session = tf.Session()
            self.session.run(initialize)
            self.session.run(self.initialized)

    def run(self, begin: int = 1) -> list[Any]:
        """Return the table and its center after each step from ``begin`` on, and the bytes sent."""
        seen = []
        for step in range(begin, oracle.STEPS + 1):
            g = oracle.of_table(hvd.rank(), step, self.session.run(self.table)[:, 0].tolist())
            rows = [k for k, element in enumerate(g) if element]
            fed = np.reshape([g[k] for k in rows], (-1, 1)).repeat(WIDTH, 1)
            self.session.run(self.train, {self.rows: rows, self.fed: fed})
            seen.append([values[:, 0].tolist() for values in self.session.run([self.table, self.center])])
        return [seen, int(self.session.run(self.sent))]


TABLE_PERIOD, WIDTH = 2, 8
TABLES: dict[str, Callable[..., Any]] = {
    "easgd_decaying": lambda o, g, p, **k: contrib_opt.ElasticAverageOptimizer(o, hvd.size(), g, p, 0.1, 0.0, **k),
}
"""With α(n + 1) other than 1, so that rows which nobody has touched move."""


@scenario
def tables() -> Any:
    """Of which only touched rows travel, and whole ones; two ranks add 16 bits in one order only."""
    found, two = {}, hvd.size() == 2
    for name, with_getter, sparse, options in (
        ("easgd_decaying", True, True, {}),
        ("diloco", False, True, {"overlap": 1}),
        *repeated(
            ("average", True, False, {"compression": Compression.fp16} if two else {}),
            *(("easgd_decaying", False, False, {"overlap": 1}), ("bmuf", True, True, {"audit_every": 1})),
            *(("slowmo", False, False, {}), ("agn", False, False, {}), ("agn", True, True, {})),
        ),
    ):
        found[f"{name} {with_getter} {sparse}"] = [
            TableSession(name, with_getter, sparse, parameters=parameters, **options).run()
            for parameters in ({"t": "rows"}, None)
        ]
    return found


@scenario
def tables_that_are_initialized_again() -> Any:
    """In the middle of training: all replicas are equal to the center, so that nothing is known of rows any more."""
    found = []
    for parameters in ({"t": "rows"}, None):
        training = TableSession("easgd_decaying", True, True, parameters=parameters)
        before = training.run(begin=oracle.STEPS - 4)
        training.session.run(training.initialized)
        found.append([before, training.run()])
    return found


@scenario
def on_the_root() -> Any:
    """The center is on one rank, with what moves it."""
    root = {"center": "root"}
    return all_beside(
        ("easgd_rho", "easgd_rho", True, 3, {**root, "fragments": 2}),
        *repeated(
            ("agn", "agn", True, 4, root),
            ("average", "average", True, 3, {**root, "weight": 1.0 + hvd.rank()}),
            ("outer", "diloco", True, 4, {**root, "outer": (0.5, 0.25), "fragments": 2}),
            *(("easgd", "easgd", True, 3, root), ("diloco", "diloco", True, 3, root)),
        ),
    )


@scenario
def in_flight() -> Any:
    """Exchanges that local steps do not wait for: some steps, or a whole period."""
    return all_beside(
        ("easgd_rho", "easgd_rho", False, 3, {"overlap": "period", "fragments": 2}),
        ("average", "average", True, 4, {"overlap": 1, "weight": 1.0 + hvd.rank(), "compression": Compression.int8}),
        *repeated(
            ("agn", "agn", False, 5, {"overlap": 3}),
            ("outer", "diloco", True, 4, {"outer": (0.5, 0.25), "overlap": "period"}),
            ("easgd", "easgd", True, 4, {"overlap": 2}),
            ("slowmo", "slowmo", False, 4, {"overlap": 1, "fragments": 2}),
        ),
    )


def main(folder: Path, mode: str) -> None:
    """Run all scenarios."""
    if mode == "v1":
        tf.disable_v2_behavior()
    else:
        tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
