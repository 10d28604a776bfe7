"""The interface of ``tf.contrib.opt``, and the arguments that its optimizers refuse; one process."""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow").compat.v1

from hvd_periodic.tensorflow import contrib_opt  # noqa: E402
from hvd_periodic.tensorflow.contrib_opt import devices  # noqa: E402

pytestmark = pytest.mark.timeout(60)

SIGNATURES = {
    "ElasticAverageOptimizer": (
        "opt, num_worker, ea_custom_getter, communication_period=10, moving_rate=None, rho=None, use_locking=True, "
        "synchronous=False, name='ElasticAverageOptimizer'"
    ),
    "ModelAverageOptimizer": (
        "opt, num_worker, is_chief, ma_custom_getter, interval_steps=100, use_locking=True, "
        "name='ModelAverageOptimizer'"
    ),
    "AGNOptimizer": (
        "optimizer, num_worker, custom_getter, communication_period=10, use_locking=True, name='AGNOptimizer'"
    ),
}

METHODS = [
    "apply_gradients",
    "compute_gradients",
    "get_init_op",
    "get_name",
    "get_slot",
    "get_slot_names",
    "make_session_run_hook",
    "minimize",
    "swapping_saver",
    "variables",
]


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as graph:
        yield graph


def getter_of(name: str) -> Any:
    return getattr(contrib_opt, name.replace("Optimizer", "CustomGetter"))("")


def make(name: str, getter: Any = None, opt: Any = None, workers: Any = 1, **options: Any) -> Any:
    getter = getter_of(name) if getter is None else getter
    opt = tf.train.GradientDescentOptimizer(0.5) if opt is None else opt
    chief = (True,) if name == "ModelAverageOptimizer" else ()
    return getattr(contrib_opt, name)(opt, workers, *chief, getter, **options)


def variable(getter: Any, name: str = "w", **options: Any) -> Any:
    with tf.variable_scope("", custom_getter=getter):
        return tf.get_variable(name, initializer=tf.constant([1.0, 2.0]), **options)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = list(inspect.signature(getattr(contrib_opt, name)).parameters.values())
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional)
    assert shown == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_and_members(name: str) -> None:
    optimizer = make(name)
    assert isinstance(optimizer, tf.train.Optimizer)
    for method in METHODS:
        assert callable(getattr(optimizer, method))
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)
    assert optimizer.get_name() == name
    assert contrib_opt.ElasticAverageOptimizer.BETA == 0.9
    of_round = ["is_chief", "task_index"] if name != "ModelAverageOptimizer" else []
    assert list(inspect.signature(optimizer.make_session_run_hook).parameters) == of_round
    assert list(inspect.signature(optimizer.get_init_op).parameters) == of_round[1:]


def test_constants() -> None:
    names = contrib_opt.GLOBAL_VARIABLE_NAME, contrib_opt.LOCAL_VARIABLE_NAME, contrib_opt.GRAD_VARIABLE_NAME
    assert names == ("global_center_variable", "local_center_variable", "grad_variable")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("ElasticAverageOptimizer", {"moving_rate": -0.1}, ValueError, r"moving_rate=...\)` must be positive"),
        ("ElasticAverageOptimizer", {"moving_rate": 1.01}, ValueError, r"must be in \(0, 2/\(n\+1\)\]"),
        ("ElasticAverageOptimizer", {"rho": -1.0}, ValueError, r"rho=...\)` must be zero or positive"),
        ("ElasticAverageOptimizer", {"rho": "a"}, TypeError, "must be a number. Received: 'a'"),
        ("ElasticAverageOptimizer", {"communication_period": 0}, ValueError, "must be an int >= 1. Received: 0"),
        ("ElasticAverageOptimizer", {"workers": 4}, ValueError, "ranks that exchange, 1.*num_worker=4"),
        ("ElasticAverageOptimizer", {"opt": "sgd"}, TypeError, "wraps a tf.compat.v1.train.Optimizer.*Received: str"),
        ("ElasticAverageOptimizer", {"buffers": "all"}, ValueError, "buffers='all'"),
        ("ModelAverageOptimizer", {"interval_steps": 2.5}, TypeError, "`interval_steps`, unless.*Received: 2.5"),
        ("AGNOptimizer", {"communication_period": -3}, ValueError, "`communication_period`, unless.*Received: -3"),
        ("AGNOptimizer", {"workers": True}, TypeError, "`num_worker` must be an int"),
    ],
)
def test_refused_arguments(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(name, **options)


def test_the_getter_of_another_optimizer() -> None:
    getter = contrib_opt.AGNCustomGetter("")
    with pytest.raises(TypeError, match=r"needs a ModelAverageCustomGetter. Received: AGNCustomGetter"):
        make("ModelAverageOptimizer", getter)
    with pytest.raises(TypeError, match=r"`worker_device` must be a string. Received: 3"):
        contrib_opt.AGNCustomGetter(3)  # type: ignore[arg-type]


def test_rho_needs_a_numeric_rate() -> None:
    rate = tf.train.exponential_decay(0.1, tf.train.get_or_create_global_step(), 10, 0.5)
    with pytest.raises(ValueError, match=r"has no default.*GradientDescentOptimizer is not a positive number: pass"):
        make("ElasticAverageOptimizer", opt=tf.train.GradientDescentOptimizer(rate))
    assert make("ElasticAverageOptimizer", opt=tf.train.GradientDescentOptimizer(rate), rho=0.0) is not None


@pytest.mark.parametrize(
    ("opt", "rate"), [("AdamOptimizer", 0.2), ("RMSPropOptimizer", 0.2), ("AdagradOptimizer", 0.2)]
)
def test_the_default_rho_is_over_the_rate_of_any_optimizer(opt: str, rate: float) -> None:
    getter = getter_of("ElasticAverageOptimizer")
    w = variable(getter)
    with pytest.warns(UserWarning, match=rf"learning_rate = 2.5, .* {opt} rescales .*: pass rho=0.0") as told:
        optimizer = make("ElasticAverageOptimizer", getter, getattr(tf.train, opt)(rate), moving_rate=0.5)
    assert len(told) == 1
    ((gradient, _),) = optimizer.compute_gradients(tf.reduce_sum(w))
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(w.assign([3.0, 2.0]))
        assert session.run(gradient).tolist() == pytest.approx([1 + 2.5 * 2, 1.0])


@pytest.mark.parametrize("rho", [None, 0.25])
@pytest.mark.parametrize(
    "opt",
    [
        tf.train.GradientDescentOptimizer(0.1),
        tf.train.MomentumOptimizer(0.1, 0.9),
        tf.train.AdamOptimizer(0.1),
        tf.train.GradientDescentOptimizer(lambda: 0.1),
    ],
    ids=["descent", "momentum", "adam", "callable rate"],
)
def test_without_a_getter_there_is_no_elastic_term_unless_asked_for(opt: Any, rho: float | None) -> None:
    """Nor a warning: it is no script for contrib, which relies on contrib's default."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = contrib_opt.ElasticAverageOptimizer(opt, 1, None, 2, 0.25, rho)
    assert optimizer._algorithm.rho == (rho or 0.0)


@pytest.mark.parametrize(
    ("opt", "rho"),
    [
        (tf.train.GradientDescentOptimizer(0.1), None),
        (tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), None),
        (tf.train.AdamOptimizer(0.1), 0.0),
        (tf.train.AdamOptimizer(0.1), 2.5),
    ],
    ids=["descent", "momentum", "adam 0", "adam 2.5"],
)
def test_an_elastic_term_that_suits_or_was_asked_for_is_not_warned_of(opt: Any, rho: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("ElasticAverageOptimizer", opt=opt, moving_rate=0.25, rho=rho)


@pytest.mark.parametrize("name", SIGNATURES)
def test_gradients_that_cannot_be_applied(name: str) -> None:
    getter = getter_of(name)
    w, optimizer, step = variable(getter), make(name, getter), tf.train.get_or_create_global_step()
    with pytest.raises(ValueError, match="`grads_and_vars` is empty"):
        optimizer.apply_gradients([], global_step=step)
    with pytest.raises(ValueError, match=r"no gradient for any variable: \['w:0'\]"):
        optimizer.apply_gradients([(None, w)], global_step=step)
    with pytest.raises(TypeError, match=r"must hold \(gradient, variable\) pairs"):
        optimizer.apply_gradients([w], global_step=step)
    with pytest.raises(ValueError, match=f"'foreign' was not created through the {type(getter).__name__}"):
        optimizer.apply_gradients([(tf.ones(2), tf.Variable([1.0, 2.0], name="foreign"))], global_step=step)


def test_model_averaging_needs_a_global_step() -> None:
    getter = getter_of("ModelAverageOptimizer")
    w = variable(getter)
    with pytest.raises(ValueError, match="`global_step` is needed for model averaging"):
        make("ModelAverageOptimizer", getter).minimize(tf.reduce_sum(w))


@pytest.mark.parametrize("name", SIGNATURES)
def test_there_is_nothing_to_swap_without_the_getter(name: str) -> None:
    tf.get_variable("plain", [2])
    with pytest.raises(RuntimeError, match="No variable was created through the"):
        make(name).swapping_saver()


def test_a_saver_of_chosen_variables(tmp_path: Any) -> None:
    getter = getter_of("ElasticAverageOptimizer")
    v, w = variable(getter, "v"), variable(getter, "w")
    plain = tf.get_variable("plain", initializer=tf.constant(5.0))
    optimizer = make("ElasticAverageOptimizer", getter)
    saver = optimizer.swapping_saver({"renamed": v, "plain": plain}, max_to_keep=1)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run([v.assign([7.0, 7.0]), w.assign([7.0, 7.0])])
        path = saver.save(session, str(tmp_path / "model"))
    reader = tf.train.load_checkpoint(path)
    assert sorted(reader.get_variable_to_shape_map()) == ["plain", "renamed"]
    assert reader.get_tensor("renamed").tolist() == [1.0, 2.0], "the center, which has not moved"
    assert reader.get_tensor("plain") == 5.0


def test_devices_of_jobs_are_ignored_with_one_line(
    graph: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_told", False)
    caplog.set_level(logging.INFO, logger="hvd_periodic")
    setter = tf.train.replica_device_setter(ps_tasks=1, worker_device="/job:worker/task:0/device:CPU:0")
    getter = contrib_opt.ElasticAverageCustomGetter("/job:worker/task:0")
    with tf.device(setter):
        w = variable(getter)
        optimizer = make("ElasticAverageOptimizer", getter, communication_period=1)
        train = optimizer.minimize(tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())
    assert not any("/job:" in operation.device for operation in graph.get_operations())
    assert any("CPU:0" in operation.device for operation in graph.get_operations()), "the device itself is kept"
    with tf.train.MonitoredTrainingSession(hooks=[optimizer.make_session_run_hook(True, 0)]) as session:
        session.run(train)
    assert len([text for text in caplog.messages if "no parameter servers" in text]) == 1


def test_a_rank_that_is_not_chief_waits_for_nobody() -> None:
    getter = getter_of("AGNOptimizer")
    w = variable(getter)
    optimizer = make("AGNOptimizer", getter)
    train = optimizer.minimize(tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())
    hook = optimizer.make_session_run_hook(is_chief=False, task_index=3)
    with tf.train.MonitoredTrainingSession(is_chief=False, hooks=[hook], max_wait_secs=10) as session:
        session.run(train)
        assert session.run(w).tolist() == [0.5, 1.5]


UNUSED = "created without the hook that `AGNOptimizer.make_session_run_hook.* made.*pass it"


@pytest.mark.parametrize("is_chief", [True, False], ids=["chief", "not chief"])
@pytest.mark.parametrize("getter", [True, False], ids=["getter", "no getter"])
def test_a_hook_that_was_not_passed_is_named(is_chief: bool, getter: bool) -> None:
    """Instead of a wait for variables that nothing initializes. Without a getter training needs the chief alone."""
    given = getter_of("AGNOptimizer") if getter else None
    w = variable(given) if getter else tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
    optimizer = contrib_opt.AGNOptimizer(tf.train.GradientDescentOptimizer(0.5), 1, given)
    train = optimizer.minimize(tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())
    optimizer.make_session_run_hook(is_chief, 0)
    if is_chief and not getter:
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train)
            assert session.run(w).tolist() == [0.5, 1.5]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=UNUSED):
            tf.train.MonitoredTrainingSession(is_chief=is_chief)


@pytest.mark.parametrize("first", ["ModelAverageOptimizer", "ElasticAverageOptimizer"])
def test_each_of_several_hooks_has_to_be_passed(first: str) -> None:
    """On a rank that is not chief, also beside a hook that is passed and knows of that."""
    optimizers = []
    for name in (first, "AGNOptimizer"):
        w = variable(getter := getter_of(name), name)
        optimizers.append(optimizer := make(name, getter))
        step = tf.train.get_or_create_global_step()
        optimizer.minimize(tf.reduce_sum(w), global_step=step, var_list=[w])
    of_first = () if first == "ModelAverageOptimizer" else (False, 1)
    passed, _ = optimizers[0].make_session_run_hook(*of_first), optimizers[1].make_session_run_hook(False, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=UNUSED):
        tf.train.MonitoredTrainingSession(hooks=[passed], is_chief=False)


def test_get_init_op_may_take_the_place_of_the_hook() -> None:
    w = variable(getter := getter_of("AGNOptimizer"))
    optimizer = make("AGNOptimizer", getter)
    train = optimizer.minimize(tf.reduce_sum(w))
    optimizer.make_session_run_hook(True, 0)
    slow = tf.py_func(lambda: time.sleep(0.1), [], [])  # The operation has to wait for the slowest initializer.
    for local in tf.local_variables():
        local.initializer._add_control_input(slow)
    with tf.control_dependencies([tf.local_variables_initializer()]):
        initialize = optimizer.get_init_op(0)
    with tf.train.MonitoredSession(
        tf.train.ChiefSessionCreator(tf.train.Scaffold(local_init_op=initialize))
    ) as session:
        session.run(train)
        assert session.run(w).tolist() == [0.5, 1.5]


def test_a_moving_rate_that_overshoots_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        w = variable(getter := getter_of("ElasticAverageOptimizer"))
        make("ElasticAverageOptimizer", getter, moving_rate=0.75).minimize(tf.reduce_sum(w))
    told = [str(each.message) for each in caught if "overshoot" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("`ElasticAverageOptimizer(moving_rate=0.75)` makes the center overshoot")


def test_the_local_center_is_what_was_read_at_the_last_exchange() -> None:
    """Also where rho = 0 and nothing of ours needs it."""
    getter = getter_of("ElasticAverageOptimizer")
    w = variable(getter)
    optimizer = make("ElasticAverageOptimizer", getter, communication_period=1, moving_rate=0.25, rho=0.0)
    train = optimizer.minimize(tf.reduce_sum(w))
    start = optimizer.get_init_op(0)
    by_name = {v.op.name: v for v in (*tf.global_variables(), *tf.local_variables())}
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(start)
        for _ in range(2):
            before = session.run(by_name["global_center_variable/w"]).tolist()
            session.run(train)
            assert session.run(by_name["local_center_variable/w"]).tolist() == before
            assert session.run(by_name["global_center_variable/w"]).tolist() != before


def test_names_in_scopes_and_reuse() -> None:
    getter = getter_of("AGNOptimizer")
    with tf.variable_scope("outer", custom_getter=getter):
        first = tf.get_variable("w", [2])
        with tf.name_scope("elsewhere"):
            tf.get_variable("v", [2])
    with tf.variable_scope("outer", custom_getter=getter, reuse=True):
        assert tf.get_variable("w", [2]) is first
    with tf.variable_scope("outer", custom_getter=getter, reuse=tf.AUTO_REUSE):
        assert tf.get_variable("w", [2]) is first
    assert [v.op.name for v in tf.global_variables()] == [
        "global_center_variable/outer/w",
        "global_center_variable/outer/v",
    ]
    assert [v.op.name for v in tf.trainable_variables()] == ["outer/w", "outer/v"]


@pytest.mark.parametrize("rate", [-0.1, 3.0])
def test_a_refused_rate_is_named_as_it_was_typed(rate: float) -> None:
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"`ElasticAverageOptimizer\(moving_rate=...\)` must be"),
    ):
        contrib_opt.ElasticAverageOptimizer(tf.train.GradientDescentOptimizer(0.1), 1, None, moving_rate=rate, rho=0.0)
