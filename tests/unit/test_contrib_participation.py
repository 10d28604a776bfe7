"""Variables of sessions to which only ranks with gradients contribute, and tables of which rows travel; one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow").compat.v1

from hvd_periodic import BMUF, Averaging, DiLoCo, SlowMo  # noqa: E402
from hvd_periodic.tensorflow import contrib_opt  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.unit.test_contrib_interface import make, variable  # noqa: E402

pytestmark = pytest.mark.timeout(120)

ROWS, WIDTH, STEPS = 6, 2, 7


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as graph:
        yield graph


def initialized(optimizer: Any, *task: int) -> Any:
    """Return a session that has run the initializers and the init op."""
    start, session = optimizer.get_init_op(*task), tf.Session()
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    session.run(start)
    return session


@pytest.mark.parametrize(
    ("which", "local"),
    covering(
        ["agn", "diloco", "slowmo", "bmuf", "average"],
        [tf.train.MomentumOptimizer(0.5, 0.5), tf.train.AdamOptimizer(0.5)],
        together=1,
    ),
)
def test_what_no_rank_trains_stays(which: str, local: Any) -> None:
    """A variable without gradients: its center, and what moves this, keep their values; it gets slots all the same."""
    algorithms: dict[str, Callable[[], Any]] = {"diloco": DiLoCo, "slowmo": SlowMo, "bmuf": BMUF, "average": Averaging}
    getter = contrib_opt.AGNCustomGetter("") if which == "agn" else contrib_opt.PeriodicCustomGetter("")
    a, b = variable(getter, "a"), variable(getter, "b")
    options = {"parameters": {"b": "present"}}
    if which == "agn":
        optimizer = contrib_opt.AGNOptimizer(local, 1, getter, 2, **options)
    else:
        optimizer = contrib_opt.PeriodicOptimizer(local, 1, getter, algorithms[which](), 2, **options)
    train = optimizer.minimize(tf.reduce_sum(tf.square(a)))
    of_b = [v for v in tf.global_variables() if "global_center_variable/b" in v.op.name]
    assert all(optimizer.get_slot(b, name) is not None for name in optimizer.get_slot_names())
    with initialized(optimizer, 0) as session:
        before = session.run([b, *of_b])
        for _ in range(4):
            session.run(train)
        for one, other in zip(session.run([b, *of_b]), before, strict=True):
            assert one.tolist() == other.tolist()
        assert (session.run(getter.centers[a.ref()]) != [1.0, 2.0]).all()


def test_who_is_absent_does_not_move_an_asynchronous_center() -> None:
    """It is pulled, and the copy of the center in the session is that of the file or memory, which has not moved."""
    getter = contrib_opt.ElasticAverageCustomGetter("")
    a, b = variable(getter, "a"), variable(getter, "b")
    local = tf.train.GradientDescentOptimizer(0.5)
    options = {"parameters": {"b": "present"}, "asynchronous": True, "communication_period": 1}
    optimizer = make("ElasticAverageOptimizer", getter, local, moving_rate=0.25, rho=0.0, **options)
    train = optimizer.minimize(tf.reduce_sum(a))
    centers = [getter.centers[v.ref()] for v in (a, b)]
    final = optimizer.get_final_op()
    with initialized(optimizer, 0) as session:
        session.run(b.assign([5.0, 6.0]))
        session.run(train)
        assert [c.tolist() for c in session.run([*centers, b])] == [[0.875, 1.875], [1.0, 2.0], [4.0, 5.0]]
        session.run(final)
        assert [c.tolist() for c in session.run(centers)] == [[0.875, 1.875], [1.0, 2.0]]


def test_patterns_see_variables_without_gradients() -> None:
    a, b = (tf.get_variable(name, initializer=tf.constant([1.0, 2.0])) for name in "ab")
    local = tf.train.GradientDescentOptimizer(0.5)
    optimizer = contrib_opt.PeriodicOptimizer(local, 1, None, DiLoCo(), 2, parameters={"b": "present"})
    optimizer.apply_gradients([(tf.ones(2), a), (None, b)])
    (synchronizer,) = optimizer._synchronizers
    assert [spec.name for spec in synchronizer.replica.parameters.layout.specs] == ["a", "b"]
    assert synchronizer.replica.present == ["b"]


@pytest.mark.parametrize("policy", ["average", "broadcast", "rows"])
def test_patterns_for_variables_without_gradients_alone_are_refused(policy: str) -> None:
    """These variables take no part; with a getter they have centers, and with ``"local"`` they are the rank's own."""

    def pass_pairs(getter: Any, parameters: Any) -> None:
        with tf.Graph().as_default(), tf.variable_scope("", custom_getter=getter):
            gradient = tf.ones([2, 2])
            a, b, c = (tf.get_variable(name, initializer=gradient) for name in "abc")
            local = tf.train.GradientDescentOptimizer(0.5)
            optimizer = contrib_opt.PeriodicOptimizer(local, 1, getter, DiLoCo(), 2, parameters=parameters)
            optimizer.apply_gradients([(gradient, a), (None, b), (gradient, c)])

    with pytest.raises(ValueError, match=r"without a gradient in this graph: 'b' matches b.*use 'present' if"):
        pass_pairs(None, {"b": policy})
    with pytest.raises(ValueError, match=r"matches no parameter: 'd'\. There are a, c, b"):
        pass_pairs(None, {"b": policy, "d": "local"})
    pass_pairs(None, {"[ab]": policy})
    pass_pairs(None, {"b": "local"})
    pass_pairs(contrib_opt.PeriodicCustomGetter(""), {"b": policy})


def table_of(getter: Any) -> Any:
    start = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    with tf.variable_scope("", custom_getter=getter):
        return tf.get_variable("t", initializer=start)


def elastic(parameters: Any, with_getter: bool, local: Any = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Return an optimizer, its step, what to feed this, and what to read: a table and its center."""
    getter = contrib_opt.ElasticAverageCustomGetter("") if with_getter else None
    table, rows = table_of(getter), tf.placeholder(tf.int32, [None])
    local = tf.train.GradientDescentOptimizer(0.25) if local is None else local
    options = {"moving_rate": 0.25, "rho": 0.0, "communication_period": 2, "parameters": parameters} | options
    optimizer = contrib_opt.ElasticAverageOptimizer(local, 1, getter, **options)
    train = optimizer.minimize(tf.reduce_sum(tf.square(tf.gather(table, rows))))
    center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/t")
    return optimizer, train, rows, [table, center]


@pytest.mark.parametrize("with_getter", [True, False], ids=["getter", "no getter"])
def test_a_table_in_the_session_after_a_checkpoint(with_getter: bool, tmp_path: Any) -> None:
    """The dense exchange, although marks and sums of rows in a checkpoint may be those of another rank."""
    found = []
    for parameters in ("rows", None):
        with tf.Graph().as_default():
            optimizer, train, rows, read = elastic(parameters, with_getter)
            saver, start, seen = tf.train.Saver(), optimizer.get_init_op(0), []
            for restores in (False, True):
                with tf.Session() as session:
                    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                    if restores:
                        saver.restore(session, f"{tmp_path}/c")
                    if with_getter:
                        session.run(start)
                    elif restores and parameters:
                        synchronizer = optimizer._synchronizers[0]
                        stores = synchronizer.tensor_groups.parameters.error_feedback.untouched.stores()
                        session.run([v.assign(tf.zeros_like(v)) for s in stores.values() for v in s.tensors()])
                    for step in range(STEPS):
                        session.run(train, {rows: [step % 4, (3 * step) % 4]})
                        seen.append(session.run(read))
                    saver.save(session, f"{tmp_path}/c")
            found.append(seen)
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


def decaying() -> Any:
    class Decaying(tf.train.GradientDescentOptimizer):
        pass

    return Decaying(0.5)


@pytest.mark.parametrize(
    ("local", "options", "message"),
    [
        (lambda: tf.train.MomentumOptimizer(0.5, 0.5), {}, "Received: MomentumOptimizer, which moves all rows"),
        (decaying, {}, "Received: Decaying, which moves all rows, or is not known"),
        (lambda: tf.train.AdagradOptimizer(0.5), {"rho": 0.5}, "with rho=0 only"),
        (lambda: tf.train.AdagradOptimizer(0.5), {"center": "root"}, "center='replicated' only"),
        (lambda: tf.train.AdagradOptimizer(0.5), {"asynchronous": True}, "`parameters` can be 'rows'|asynchronous"),
    ],
)
def test_refused_tables(local: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elastic("rows", True, local(), **options)


def test_a_table_with_a_constraint_is_refused_in_elastic_averaging() -> None:
    table = tf.get_variable("t", [ROWS, WIDTH], constraint=tf.abs, use_resource=True)
    local = tf.train.GradientDescentOptimizer(0.5)
    optimizer = contrib_opt.ElasticAverageOptimizer(local, 1, None, moving_rate=0.25, parameters="rows")
    with pytest.raises(ValueError, match="Received: the constraint of 't'"):
        optimizer.minimize(tf.reduce_sum(table))
