"""Options that sessions share with the other front ends; one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow").compat.v1

from hvd_periodic import AGN, BMUF, EASGD, DiLoCo, SlowMo  # noqa: E402
from hvd_periodic.comm.collective_tracker import CollectiveTracker  # noqa: E402
from hvd_periodic.tensorflow import contrib_opt  # noqa: E402
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402
from tests.unit.test_contrib_interface import SIGNATURES, make, variable  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as graph:
        yield graph


def minimized(name: str = "ModelAverageOptimizer", **options: Any) -> tuple[Any, Any, Any]:
    """Return a variable that starts at [1, 2], an optimizer of rate 0.5, and a step by a gradient of 1."""
    getter = getattr(contrib_opt, name.replace("Optimizer", "CustomGetter"))("")
    w, optimizer = variable(getter), make(name, getter, **options)
    return w, optimizer, optimizer.minimize(tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())


@pytest.mark.parametrize("name", SIGNATURES)
def test_an_unknown_keyword_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(name, center_device="cpu")
    text = str(caught.value)
    assert text.startswith(f"{name}() got an unexpected keyword argument 'center_device'. It takes ")
    assert text.endswith(", ".join(SessionOptions.__annotations__))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("ModelAverageOptimizer", {"weight": -1.0}, ValueError, "`weight`.*Received: -1.0"),
        ("ElasticAverageOptimizer", {"weight": 2.0}, ValueError, "`weight` is for algorithms that take the mean"),
        ("AGNOptimizer", {"weight": 2.0}, ValueError, r"AGN with op='average'. Received: AGN\(op='sum'\)"),
        ("AGNOptimizer", {"op": "mean"}, ValueError, r"`AGNOptimizer\(op=...\)` must be 'sum' or 'average'"),
        ("ModelAverageOptimizer", {"audit_every": -1}, ValueError, "`audit_every`.*Received: -1"),
        ("ModelAverageOptimizer", {"fragments": 2}, ValueError, "`fragments` must be at most 1.*Received: fragments=2"),
        ("AGNOptimizer", {"asynchronous": True, "fragments": 2}, ValueError, "`fragments` is for synchronous exchange"),
        ("AGNOptimizer", {"asynchronous": True, "audit_every": 2}, ValueError, "there is one center"),
        ("ModelAverageOptimizer", {"overlap": -1}, ValueError, "`overlap`.*Received: -1"),
        ("ModelAverageOptimizer", {"overlap": 1, "center": "root"}, ValueError, "`overlap` needs center='replicated'"),
        ("AGNOptimizer", {"asynchronous": True, "overlap": 1}, ValueError, "`overlap` is for synchronous exchange"),
        ("ModelAverageOptimizer", {"center": "sharded"}, ValueError, "`center='sharded'` is not for sessions"),
        ("ModelAverageOptimizer", {"center": "here"}, ValueError, "`center` must be one of .*center='here'"),
        ("ModelAverageOptimizer", {"timeout_seconds": "soon"}, TypeError, "`timeout_seconds`.*Received: 'soon'"),
    ],
)
def test_refused_options(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        minimized(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "ModelAverageOptimizer",
            {"parameters": "rows"},
            ValueError,
            r"'rows' for tensors of two axes and more.*Received: 'w' of shape \(2,\)",
        ),
        (
            "AGNOptimizer",
            {"parameters": {"w": "present"}, "asynchronous": True},
            ValueError,
            "'present' in asynchronous exchange with elastic averaging only",
        ),
        (
            "ModelAverageOptimizer",
            {"parameters": {"v": "local"}},
            ValueError,
            "matches no parameter: 'v'. There",
        ),
        (
            "ModelAverageOptimizer",
            {"parameters": "local"},
            ValueError,
            "0 variables, none of them with elements, without",
        ),
        ("ElasticAverageOptimizer", {"parameters": lambda *_: "sum"}, ValueError, r"parameters\('w', ...\)='sum'"),
        ("ElasticAverageOptimizer", {"parameters": 3}, TypeError, "`parameters` must be one of"),
    ],
)
def test_refused_policies(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        minimized(name, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["ElasticAverageOptimizer", "AGNOptimizer"])
def test_own_variables_have_no_center(name: str, asynchronous: bool, tmp_path: Any) -> None:
    """Initialization leaves them alone, exchanges and the elastic term too, and a swapping saver saves themselves."""
    getter = getattr(contrib_opt, name.replace("Optimizer", "CustomGetter"))("")
    a, b = (variable(getter, key) for key in ("a", "b"))
    options = {"parameters": {"b": "local"}, "communication_period": 2, "asynchronous": asynchronous}
    optimizer = make(name, getter, tf.train.GradientDescentOptimizer(0.5), **options)
    train = optimizer.minimize(tf.reduce_sum(a) + tf.reduce_sum(b))
    initialize, saver = optimizer.get_init_op(0), optimizer.swapping_saver()
    names = {each.op.name for each in tf.global_variables()}
    assert {"b", "global_center_variable/a"} <= names, "a plain saver saves these"
    assert not {"a", "global_center_variable/b"} & names
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(b.assign([7.0, 8.0]))
        session.run(initialize)
        assert session.run(b).tolist() == [7.0, 8.0]
        for _ in range(4):
            session.run(train)
        assert session.run(b).tolist() == [5.0, 6.0]
        path = saver.save(session, str(tmp_path / "saved"))
        assert tf.train.load_checkpoint(path).get_tensor("b").tolist() == [5.0, 6.0]
        center = getter.centers[a.ref()]
        assert tf.train.load_checkpoint(path).get_tensor("a").tolist() == session.run(center).tolist()
        assert len(getter.centers) == 1


def test_a_center_on_the_root_needs_a_getter() -> None:
    with pytest.raises(ValueError, match="`center='root'` needs a AGNCustomGetter"):
        contrib_opt.AGNOptimizer(tf.train.GradientDescentOptimizer(0.5), 1, None, center="root")


def test_how_long_ranks_wait_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(CollectiveTracker, "limit", lambda self, seconds: limits.append(seconds))
    minimized(timeout_seconds=1234.5)
    assert {*limits} >= {1234.5}


def test_a_weight_is_asked_for_once_per_exchange() -> None:
    """One that fails then is the error of the step."""
    weights = iter([2.0, 1.0, -1.0])
    w, optimizer, train = minimized(interval_steps=2, weight=lambda: next(weights))
    start = optimizer.get_init_op()
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(start)
        for _ in range(5):
            session.run(train)
        assert session.run(w).tolist() == [-1.5, -0.5]
        with pytest.raises(tf.errors.OpError, match="weight of this rank cannot be used"):
            session.run(train)


def of_two_variables(name: str, local: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    """Return a session, a step by gradients of 1, and the centers of variables that start at [1, 2]."""
    getter = getattr(contrib_opt, name.replace("Optimizer", "CustomGetter"))("")
    loss = tf.add_n([tf.reduce_sum(variable(getter, key)) for key in ("a", "b")])
    optimizer = make(name, getter, local, **options)
    train, initialize = optimizer.minimize(loss), optimizer.get_init_op(0)
    session = tf.Session()
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    session.run(initialize)
    return session, train, list(getter.centers.values())


def test_the_optimizer_of_each_fragment_has_a_state_of_its_own() -> None:
    """The first step of Adam has the length of its rate; powers of β that others advance would shorten it."""
    options = {"communication_period": 2, "fragments": 2}
    session, train, centers = of_two_variables("AGNOptimizer", tf.train.AdamOptimizer(0.5), **options)
    with session:
        seen = []
        for _ in range(2):
            session.run(train)
            seen.append([center.tolist()[0] for center in session.run(centers)])
        assert seen == [pytest.approx([0.5, 1.0], abs=1e-5), pytest.approx([0.5, 0.5], abs=1e-5)]
        powers = [v.op.name for v in tf.global_variables() if "decay1_power" in v.op.name]
        assert len(powers) == 2


def test_the_local_center_of_a_fragment_is_read_with_it() -> None:
    local, options = tf.train.GradientDescentOptimizer(0.5), {"communication_period": 2, "fragments": 2}
    options |= {"moving_rate": 0.25, "rho": 0.0}
    session, train, _ = of_two_variables("ElasticAverageOptimizer", local, **options)
    read = [v for v in tf.local_variables() if v.op.name.startswith(contrib_opt.LOCAL_VARIABLE_NAME)]
    with session:
        seen = []
        for _ in range(4):
            session.run(train)
            seen.append([value.tolist()[0] for value in session.run(read)])
    # a: c 1 → 0.875 at step 1, with x 0.5; b: c 1 → 0.75 at step 2, with x 0.
    assert seen == [[1.0, 1.0], [1.0, 1.0], [0.875, 1.0], [0.875, 0.75]]


def periodic(getter: Any, local: Any, algorithm: Any, period: int = 1, **options: Any) -> Any:
    return contrib_opt.PeriodicOptimizer(local, 1, getter, algorithm, period, **options)


@pytest.mark.parametrize(
    ("algorithm", "options", "error", "message"),
    [
        (AGN(), {}, ValueError, r"whose workers keep no vectors.*AGN\(op='sum'\)"),
        (EASGD(rho=0.5), {}, ValueError, "whose workers keep no vectors.*rho=0.5"),
        (SlowMo(), {"outer_optimizer": tf.train.AdamOptimizer(0.1)}, ValueError, "takes no outer optimizer"),
        (DiLoCo(), {"outer_optimizer": "sgd"}, TypeError, "`outer_optimizer` must be a .*Optimizer. Received: str"),
        (DiLoCo(), {"asynchronous": True}, TypeError, "unexpected keyword argument 'asynchronous'"),
    ],
)
def test_refused_algorithms(algorithm: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        periodic(None, tf.train.GradientDescentOptimizer(0.5), algorithm, **options)


def test_slowmo_needs_a_learning_rate() -> None:
    class Ours(tf.train.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "ours")

    with pytest.raises(ValueError, match=r"needs the learning rate of local steps\. Ours has none"):
        periodic(None, Ours(), SlowMo()).apply_gradients([(tf.ones(2), tf.get_variable("w", [2]))])


@pytest.mark.parametrize("kind", ["tensor", "function", "number"])
def test_slowmo_moves_by_the_rate_of_now(kind: str) -> None:
    """Of gradient 1, u ← u / 2 + 1, and the center moves by the rate of the round times u."""
    getter, step = contrib_opt.PeriodicCustomGetter(""), tf.train.get_or_create_global_step()
    w = variable(getter)
    rate = tf.train.piecewise_constant(step, [0], [0.5, 0.25]) if kind != "number" else 0.5
    optimizer = periodic(
        getter, tf.train.GradientDescentOptimizer((lambda: rate) if kind == "function" else rate), SlowMo()
    )
    train, initialize = optimizer.minimize(tf.reduce_sum(w), global_step=step), optimizer.get_init_op(0)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(initialize)
        seen = []
        for _ in range(3):
            session.run(train)
            seen.append(session.run(w).tolist()[0])
    rates = [0.5, 0.25, 0.25] if kind != "number" else [0.5] * 3
    moved = np.cumsum([rate * u for rate, u in zip(rates, [1.0, 1.5, 1.75], strict=True)])
    assert seen == pytest.approx((1 - moved).tolist())


@pytest.mark.parametrize(
    ("algorithm", "vector", "with_getter"),
    [
        *((DiLoCo(), "momentum", True), (BMUF(0.5), "block_update", False)),
        *(thorough(DiLoCo(), "momentum", False), thorough(BMUF(0.5), "block_update", True)),
    ],
)
def test_a_checkpoint_holds_what_an_algorithm_keeps(
    algorithm: Any, vector: str, with_getter: bool, tmp_path: Any
) -> None:
    """Training goes on exactly from the checkpoint of an ordinary saver."""
    getter = contrib_opt.PeriodicCustomGetter("") if with_getter else None
    with tf.variable_scope("", custom_getter=getter, partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable("w", [4], initializer=tf.ones_initializer())
    optimizer = periodic(getter, tf.train.GradientDescentOptimizer(0.5), algorithm)
    train = optimizer.minimize(tf.reduce_sum(tf.square(tf.convert_to_tensor(w))))
    initialize, saver, seen = optimizer.get_init_op(0), tf.train.Saver(), []
    for path in (None, f"{tmp_path}/c"):
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            if path is not None:
                saver.restore(session, path)
            session.run(initialize)
            for _ in range(3):
                session.run(train)
                seen.append(session.run(tf.convert_to_tensor(w)).tolist())
                if path is None and len(seen) == 1:
                    saver.save(session, f"{tmp_path}/c")
    assert seen[3:5] == seen[1:3]
    assert f"global_center_variable/w/{vector}" in tf.train.load_checkpoint(f"{tmp_path}/c").get_variable_to_shape_map()


def test_landing_is_for_a_step() -> None:
    with pytest.raises(RuntimeError, match=r"get_land_op\(\) needs a train op"):
        make("AGNOptimizer").get_land_op()


@pytest.mark.parametrize(("overlap", "with_getter"), covering([1, "period"], [True, False], together=1))
def test_a_session_takes_nothing_of_one_before(with_getter: bool, overlap: Any, tmp_path: Any) -> None:
    """The first ends while an exchange is in flight; the second is new, the third has the first one's checkpoint."""
    getter = contrib_opt.PeriodicCustomGetter("") if with_getter else None
    with tf.variable_scope("", custom_getter=getter):
        w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    local = tf.train.GradientDescentOptimizer(0.25)
    optimizer = periodic(getter, local, DiLoCo(), 3, overlap=overlap)
    train, saver = optimizer.minimize(tf.reduce_sum(tf.square(w))), tf.train.Saver()
    initialize, landed, seen = optimizer.get_init_op(0), optimizer.get_land_op(), []
    center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/w")
    for steps in (3, 7, 7):
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            if len(seen) == 2:
                saver.restore(session, f"{tmp_path}/c")
            session.run(initialize)
            of_session = []
            for _ in range(steps):
                session.run(train)
                of_session.append(session.run(w).tolist())
            if steps == 3:
                saver.save(session, f"{tmp_path}/c")
            else:
                session.run(landed)
                of_session.append(session.run(center).tolist())
            seen.append(of_session)
    assert seen[0] == seen[1][:3]
    assert np.isfinite(seen[2]).all()
    assert seen[1][-1] != [1.0, 2.0], "the center has moved"


def test_the_hook_lands_at_the_end() -> None:
    """Model averaging of one rank: the center becomes the replica as it was at the exchange."""

    class AtEnd(tf.train.SessionRunHook):
        def end(self, session: Any) -> None:
            seen.append(session.run(center).tolist())

    getter, seen = contrib_opt.ModelAverageCustomGetter(""), []
    w, step = variable(getter), tf.train.get_or_create_global_step()
    optimizer = make("ModelAverageOptimizer", getter, interval_steps=2, overlap="period")
    train, (center,) = optimizer.minimize(tf.reduce_sum(w), global_step=step), getter.centers.values()
    hooks = [optimizer.make_session_run_hook(), AtEnd()]
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        for _ in range(3):
            session.run(train)
        assert session.run(center).tolist() == [1.0, 2.0], "in flight"
    assert seen == [[0.0, 1.0]]


def test_values_restored_in_a_session_take_nothing_of_what_is_in_flight(tmp_path: Any) -> None:
    """The step after the initialization is that of a new session; it used to apply an exchange of the values before."""
    getter = contrib_opt.PeriodicCustomGetter("")
    with tf.variable_scope("", custom_getter=getter):
        w = tf.get_variable("w", initializer=tf.constant([1.0]))
    optimizer = periodic(getter, tf.train.GradientDescentOptimizer(0.25), DiLoCo(), 4, overlap=2)
    train, initialize = optimizer.minimize(tf.reduce_sum(w)), optimizer.get_init_op(0)
    center, saver = next(iter(getter.centers.values())), tf.train.Saver()
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(initialize)
        saver.save(session, f"{tmp_path}/c")
        for _ in range(5):
            session.run(train)
        saver.restore(session, f"{tmp_path}/c")
        session.run(initialize)
        session.run(train)
        assert session.run([w, center]) == [[0.75], [1.0]]


def test_a_rank_that_fails_to_land_tells_the_others_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for that turn; a handshake outside of it would wait for them."""
    called: list[str] = []
    _, optimizer, train = minimized(interval_steps=2, overlap=1)
    (synchronizer,) = optimizer._synchronizers
    turn, meet = synchronizer.exchanger.turn, synchronizer.handshake.meet

    @contextmanager
    def noted() -> Iterator[None]:
        called.append("turn")
        with turn():
            yield
        called.append("end")

    monkeypatch.setattr(synchronizer.exchanger, "turn", noted)
    monkeypatch.setattr(synchronizer.handshake, "meet", lambda *of: (called.append("handshake"), meet(*of))[1])
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(optimizer.get_init_op())
        for _ in range(2):
            session.run(train)
        (part,) = synchronizer.exchanger._in_flight
        monkeypatch.setattr(part, "apply_to_replica", lambda *_: 1 / 0)
        with pytest.raises(tf.errors.OpError, match="division by zero"):
            session.run(train)
    assert called[:2] == ["turn", "handshake"]
