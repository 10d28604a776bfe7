"""Real-world graphs: job devices, partitions, shared getters, state of one worker; one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow").compat.v1

from hvd_periodic import LocalCommunicator, read_run_log  # noqa: E402
from hvd_periodic.cli.run_summary import summarize  # noqa: E402
from hvd_periodic.journal import base  # noqa: E402
from hvd_periodic.journal.runs import read_run  # noqa: E402
from hvd_periodic.tensorflow import contrib_opt  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as graph:
        yield graph


def elastic(getter: Any, period: int = 1, rho: float | None = 0.0, rate: Any = 0.5, **options: Any) -> Any:
    return contrib_opt.ElasticAverageOptimizer(
        tf.train.GradientDescentOptimizer(rate), 1, getter, period, 0.25, rho, **options
    )


def variable(getter: Any, name: str = "w", **options: Any) -> Any:
    with tf.variable_scope("", custom_getter=getter):
        return tf.get_variable(name, initializer=tf.constant([1.0, 2.0]), **options)


def start(session: Any, optimizer: Any) -> None:
    operation = optimizer.get_init_op(0)
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    session.run(operation)


def names(checkpoint: str) -> set[str]:
    return set(tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map())


def test_everything_may_be_created_under_the_devices_of_jobs(tmp_path: Any) -> None:
    """Before the variables, after the optimizer, in bodies of control flow, by the session itself."""
    with tf.device(tf.train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/replica:0/task:7")):
        step = tf.train.get_or_create_global_step()
        getter = contrib_opt.ElasticAverageCustomGetter("/job:worker/task:7")
        w = variable(getter)
        _, power = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * w), [0, tf.ones([2])])
        loss = tf.reduce_sum(tf.cond(tf.reduce_sum(w) > 0, lambda: 2.0 * power, lambda: power))
        optimizer = elastic(getter)
        train = optimizer.minimize(loss, global_step=step)
        accuracy = tf.reduce_mean(w)
        tf.summary.scalar("accuracy", accuracy)
        initialize = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
        hook = optimizer.make_session_run_hook(True, 0)
        with tf.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), hooks=[hook]) as session:
            before = session.run(accuracy)
            session.run(train)
            assert session.run([accuracy, step])[0] != before
    with tf.Session() as session:
        session.run(initialize)
        assert session.run(accuracy) == 1.5


def test_open_device_scopes_stay_as_they_are() -> None:
    with tf.device("/job:worker/device:CPU:0"):
        with tf.device("/job:ps"):
            variable(contrib_opt.AGNCustomGetter(""))
            assert tf.constant(0.0).device == "/device:CPU:0"
        assert tf.constant(0.0).device == "/device:CPU:0"
    assert tf.constant(0.0).device == ""


def test_names_of_partitioned_variables_in_checkpoints(tmp_path: Any) -> None:
    getter = contrib_opt.AGNCustomGetter("")
    with tf.variable_scope("", custom_getter=getter, partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable("w", [4, 3])
    optimizer = contrib_opt.AGNOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), 1, getter)
    optimizer.minimize(tf.reduce_sum(tf.convert_to_tensor(w)), global_step=tf.train.get_or_create_global_step())
    centers = {"global_center_variable/w", "global_center_variable/w/center_Momentum", "global_step"}
    default, both, swapping = tf.train.Saver(), tf.train.Saver([*tf.global_variables(), *w]), optimizer.swapping_saver()
    with tf.Session() as session:
        start(session, optimizer)
        assert names(default.save(session, str(tmp_path / "default"))) == centers
        assert names(both.save(session, str(tmp_path / "both"))) == centers | {"w"}
        assert names(swapping.save(session, str(tmp_path / "swapping"))) == {"w"}


def test_only_state_of_the_model_is_averaged() -> None:
    """Not what is in LOCAL_VARIABLES, has no fixed size or is no real number; parts are averaged one by one."""
    getter = contrib_opt.ModelAverageCustomGetter("")
    variable(getter)
    variable(getter, "carried", trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    unknown = tf.placeholder_with_default(tf.zeros([2]), [None])
    with tf.variable_scope("", custom_getter=getter):
        tf.get_variable("growing", initializer=unknown, trainable=False, validate_shape=False)
        tf.get_variable("count", initializer=tf.constant(0), trainable=False)
    for _ in range(2):
        with tf.variable_scope("", custom_getter=getter, reuse=tf.AUTO_REUSE, partitioner=tf.fixed_size_partitioner(2)):
            tf.get_variable("moving_mean", [2], trainable=False)
    assert [v.op.name for v in getter.statistics] == ["moving_mean/part_0", "moving_mean/part_1"]


def test_two_losses_of_one_optimizer_have_one_center_optimizer() -> None:
    getter = contrib_opt.AGNCustomGetter("")
    a, b = variable(getter, "a"), variable(getter, "b")
    optimizer = contrib_opt.AGNOptimizer(tf.train.MomentumOptimizer(0.1, 0.9), 1, getter, 1)
    trains = [optimizer.minimize(tf.reduce_sum(v), var_list=[v]) for v in (a, b)]
    slots = {f"global_center_variable/{name}/center_Momentum" for name in "ab"} | {"a/Momentum", "b/Momentum"}
    assert {v.op.name for v in optimizer.variables()} == slots
    with tf.Session() as session:
        start(session, optimizer)
        session.run(trains[0])
        assert session.run(a).tolist() == pytest.approx([0.9, 1.9])
        assert session.run(b).tolist() == [1.0, 2.0]
        session.run(trains)
        assert session.run(a).tolist() == pytest.approx([0.71, 1.71])
        assert session.run(b).tolist() == pytest.approx([0.9, 1.9])


def test_optimizers_that_share_a_getter_leave_the_center_of_others_as_it_was_read() -> None:
    getter = contrib_opt.ElasticAverageCustomGetter("")
    a, b = variable(getter, "a"), variable(getter, "b")
    first = elastic(getter).minimize(tf.reduce_sum(a), var_list=[a])
    optimizer = elastic(getter, rho=0.5)
    second = optimizer.minimize(tf.reduce_sum(b), var_list=[b])
    read = next(v for v in tf.local_variables() if v.op.name == "local_center_variable/b")
    with tf.Session() as session:
        start(session, optimizer)
        session.run(second)
        session.run(first)
        assert session.run(read).tolist() == [1.0, 2.0]


def test_the_init_op_comes_last() -> None:
    getter = contrib_opt.ElasticAverageCustomGetter("")
    w, optimizer = variable(getter), elastic(getter)
    optimizer.get_init_op(0)
    with pytest.raises(RuntimeError, match=r"Call get_init_op\(\) last"):
        optimizer.minimize(tf.reduce_sum(w))


def test_a_variable_of_others_is_refused_where_all_ranks_hear_of_it() -> None:
    """That is in apply_gradients(), also if compute_gradients() came upon it first."""
    getter = contrib_opt.ElasticAverageCustomGetter("")
    w, optimizer = variable(getter), elastic(getter, rho=0.5)
    foreign = tf.Variable([1.0, 2.0], name="foreign")
    pairs = optimizer.compute_gradients(tf.reduce_sum(w * foreign))
    assert [v.op.name for _, v in pairs] == ["w", "foreign"]
    with pytest.raises(ValueError, match="'foreign' was not created through"):
        optimizer.apply_gradients(pairs)


@pytest.mark.parametrize("rate", [np.float32(0.5), np.float64(0.5), 1])
def test_learning_rates_that_are_numbers(rate: Any) -> None:
    optimizer = elastic(contrib_opt.ElasticAverageCustomGetter(""), rho=None, rate=rate)
    assert optimizer._algorithm.rho == 0.25 / float(rate)


def test_eager_execution_is_refused() -> None:
    """A new thread is in no graph."""
    getter = contrib_opt.AGNCustomGetter("")
    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(variable, getter).exception()
    assert isinstance(error, RuntimeError)
    assert "tf.compat.v1.disable_v2_behavior()" in str(error)


def test_pairs_may_be_lists() -> None:
    getter = contrib_opt.ElasticAverageCustomGetter("")
    w, optimizer = variable(getter), elastic(getter, period=2)
    train = optimizer.apply_gradients([[tf.ones(2), w]])
    with tf.Session() as session:
        start(session, optimizer)
        session.run(train)
        assert session.run(w).tolist() == [0.5, 1.5]


@pytest.mark.parametrize("kind", [tf.float16, tf.float32, tf.float64])
def test_the_center_of_16_bits_has_32(kind: Any) -> None:
    getter = contrib_opt.ElasticAverageCustomGetter("")
    with tf.variable_scope("", custom_getter=getter):
        w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0], kind))
    optimizer = elastic(getter, rho=0.5)
    train = optimizer.minimize(tf.reduce_sum(w))
    (center,) = getter.centers.values()
    with tf.Session() as session:
        start(session, optimizer)
        for _ in range(2):
            session.run(train)
        # x = 1 → 0.5 → 0.625, c = 0.875; g = 1 + 0.5 (0.625 − 1): x → 0.21875 → 0.3828125, c = 0.7109375
        assert session.run(w).tolist() == pytest.approx([0.3828125, 1.3828125], rel=1e-3)
        assert session.run(center).tolist() == pytest.approx([0.7109375, 1.7109375])
    assert (w.dtype.base_dtype, center.dtype) == (kind, max(kind, tf.float32, key=lambda dtype: dtype.size))


def test_optimizers_count_from_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """One alone has no number in the log; of two, each has that of its exchanges."""
    caplog.set_level("INFO", logger="hvd_periodic")
    job = LocalCommunicator()
    for expected in (["EASGD"], ["Optimizer 2: EASGD", "Optimizer 3: EASGD"]):
        caplog.clear()
        with tf.Graph().as_default(), tf.Session() as session:
            getters = [contrib_opt.ElasticAverageCustomGetter("") for _ in expected]
            ws = [variable(getter, f"w{i}") for i, getter in enumerate(getters)]
            optimizers = [elastic(getter, process_set=job) for getter in getters]
            trains = [o.minimize(tf.reduce_sum(w), var_list=[w]) for o, w in zip(optimizers, ws, strict=True)]
            initialize = [optimizer.get_init_op(0) for optimizer in optimizers]
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(initialize)
            for train in trains:
                session.run(train)
        assert [line.partition("(")[0] for line in caplog.messages if "EASGD" in line] == expected


def test_two_optimizers_begin_under_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session runs their operations at once: under one name, what one sends would be taken for the other's."""
    used: list[str] = []
    broadcast = LocalCommunicator.broadcast

    def recorded(self: Any, buffer: Any, name: str, root: int) -> Any:
        used.append(name)
        return broadcast(self, buffer, name, root)

    monkeypatch.setattr(LocalCommunicator, "broadcast", recorded)
    begun = []
    for i in range(2):
        getter = contrib_opt.ElasticAverageCustomGetter("")
        w, optimizer = variable(getter, f"w{i}"), elastic(getter)
        optimizer.minimize(tf.reduce_sum(w), var_list=[w])
        begun.append(optimizer.get_init_op(0))
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(begun)
    assert used
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_run_log_of_sessions(asynchronous: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a beginning, though that is one of the graph; the gradient is 1, and the rate 0.5."""
    getter = contrib_opt.ElasticAverageCustomGetter("")
    w = variable(getter)
    monkeypatch.setenv("HVD_PERIODIC_RUN_LOG", str(tmp_path))
    monkeypatch.setattr(base, "MEASURING_SHARE", float("inf"))
    optimizer = elastic(getter, period=2, asynchronous=asynchronous)
    train = optimizer.minimize(tf.reduce_sum(w))
    with tf.Session() as session:
        start(session, optimizer)
        for _ in range(4):
            session.run(train)
    began, *exchanged = read_run_log(tmp_path)[0]
    assert (began["event"], began["step"], began["period"], began["elements"]) == ("began", 0, 2, 2)
    assert [(line["event"], line["step"], line["steps"]) for line in exchanged] == [("exchanged", s, 2) for s in (2, 4)]
    # An exchange takes half of the distance away: a quarter by the replica, and a quarter by the center.
    assert [line["distance"] for line in exchanged] == pytest.approx([2**0.5, 1.5 * 2**0.5])
    assert len(summarize([read_run(tmp_path)])) == 1


@pytest.mark.parametrize("kind", ["tensor", "function", "number"])
def test_the_center_optimizer_takes_the_rate_of_now(kind: str) -> None:
    """AGN of gradient 1 every two steps, with slots of momentum: c loses the rate of its round times the momentum."""
    getter, step = contrib_opt.AGNCustomGetter(""), tf.train.get_or_create_global_step()
    w = variable(getter)
    rate = tf.train.piecewise_constant(step, [0], [0.5, 0.25]) if kind != "number" else 0.5
    local = tf.train.MomentumOptimizer((lambda: rate) if kind == "function" else rate, 0.5)
    optimizer = contrib_opt.AGNOptimizer(local, 1, getter, 2)
    train = optimizer.minimize(tf.reduce_sum(w), global_step=step)
    center = next(v for v in tf.global_variables() if v.op.name == "global_center_variable/w")
    seen = []
    with tf.Session() as session:
        start(session, optimizer)
        for _ in range(3):
            session.run(train)
            session.run(train)
            seen.append(session.run(center).tolist()[0])
    rates, expected, momentum, c = [0.5, 0.25, 0.25] if kind != "number" else [0.5] * 3, [], 0.0, 1.0
    for rate_of_round in rates:
        momentum = 0.5 * momentum + 1.0
        c -= rate_of_round * momentum
        expected.append(c)
    assert seen == pytest.approx(expected)


def test_a_local_optimizer_that_has_been_used_moves_the_center() -> None:
    """What it has made of its hyper-parameters is made anew for the center."""
    getter = contrib_opt.AGNCustomGetter("")
    w, local = variable(getter), tf.train.AdamOptimizer(0.5, beta1=0.0, beta2=0.0)
    local.apply_gradients([(tf.constant([1.0, 1.0]), tf.get_variable("other", initializer=tf.constant([1.0, 2.0])))])
    optimizer = contrib_opt.AGNOptimizer(local, 1, getter, 1)
    train = optimizer.minimize(tf.reduce_sum(w), var_list=[w])
    with tf.Session() as session:
        start(session, optimizer)
        session.run(train)
        assert session.run(w).tolist() == pytest.approx([0.5, 1.5], abs=1e-5)


def test_complex_variables_are_refused() -> None:
    getter = contrib_opt.ElasticAverageCustomGetter("/job:worker/task:0")
    with tf.variable_scope("", custom_getter=getter):
        w = tf.get_variable("w", initializer=tf.constant([1j, 2.0]))
    with pytest.raises(TypeError, match=r"'w' must be float64, float32, bfloat16 or float16\. Received: complex128"):
        elastic(getter).apply_gradients([(w, w)])
