"""Edges of the Keras front end in one process: precision, gradients of every form, loading, callbacks of Keras."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import Communicator, LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.store import VariableStore, layout_of  # noqa: E402
from tests.conformance.test_front_ends import Delegate  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402

pytestmark = pytest.mark.timeout(90)

X = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")
Y = X[:, :1]

LOOPS: dict[str, Callable[[Any], Any]] = {"eager": lambda step: step, "function": tf.function}


def alone(cls: Any, inner: Any, model: Any = None, period: Any = 4, **options: Any) -> Any:
    options.setdefault("process_set", LocalCommunicator())
    return cls(inner, model, period, **options)


def easgd(inner: Any, model: Any = None, period: Any = 4, **options: Any) -> Any:
    return alone(hvdp.ElasticAverageOptimizer, inner, model, period, **{"moving_rate": 0.25, "rho": 0.5} | options)


def agn(inner: Any, model: Any = None, period: Any = 4, **options: Any) -> Any:
    return alone(hvdp.AGNOptimizer, inner, model, period, **options)


def average(inner: Any, model: Any = None, period: Any = 4, **options: Any) -> Any:
    return alone(hvdp.ModelAverageOptimizer, inner, model, period, **options)


def parameter(value: Any, dtype: str = "float32") -> Any:
    return keras.Variable(np.array(value), dtype=dtype, name="w")


def network() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def compiled(make: Any, inner: Any = None, **options: Any) -> Any:
    """Return a network that is compiled with an optimizer of period 3."""
    model = network()
    optimizer = make(keras.optimizers.Adam(0.1) if inner is None else inner, model, 3)
    model.compile(optimizer, loss="mse", jit_compile=False, **options)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> Any:
    return model.fit(X, Y, batch_size=6, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def same(a: Any, b: Any) -> bool:
    """Return whether weights and centers of two models are the same to the bit."""
    values = []
    for model in (a, b):
        with model.optimizer.center():
            centers = model.get_weights()
        values.append([*model.get_weights(), *centers])
    return all((x == y).all() for x, y in zip(*values, strict=True))


# Local optimizers and the center


OPTIMIZERS = ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb"]
OPTIMIZERS += ["Adafactor", "Muon"]

SOME = {"SGD", "Adam", "Ftrl", "Nadam", "Adafactor", "Muon"}
"""Of each kind of state one: none, moments, a sum under a power, a product of schedules, factors, and by matrix."""


@pytest.mark.parametrize("name", [name if name in SOME else thorough(name) for name in OPTIMIZERS])
def test_one_worker_and_period_1_is_the_local_optimizer(name: str) -> None:
    """The center takes the step that the local optimizer takes; matrix and bias."""
    cls = getattr(keras.optimizers, name)
    trajectories = []
    for wrap in (lambda inner: inner, lambda inner: agn(inner, period=1)):
        variables = [parameter(np.ones((3, 2))), parameter([1.0, -2.0])]
        optimizer, seen = wrap(cls(0.1)), []
        optimizer.build(variables)
        for step in range(3):
            optimizer.apply([tf.convert_to_tensor(v) * 0.5 + float(step) - 0.75 for v in variables])
            seen.append([v.numpy().tolist() for v in variables])
        trajectories.append(seen)
    assert trajectories[0] == trajectories[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gradient_accumulation_steps": 2}, [0.0, 4.0, 4.0, 8.0]),
        ({"use_ema": True, "ema_momentum": 0.5}, [4.0, 4.0, 8.0, 8.0]),
        ({"clipvalue": 0.5}, [0.5, 0.5, 1.0, 1.0]),
        ({"clipnorm": 1.0}, [1.0, 1.0, 2.0, 2.0]),
        ({"global_clipnorm": 2.0}, [2.0, 2.0, 4.0, 4.0]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_the_center_takes_over(options: dict[str, Any], expected: list[float]) -> None:
    """Gradient −4, rate 1, period 2. Clipping applies to the normalized sum; accumulation is of local steps only."""
    w, optimizer = parameter([0.0]), agn(keras.optimizers.SGD(1.0, **options), period=2)
    optimizer.build([w])
    seen = []
    for _ in range(4):
        optimizer.apply([tf.constant([-4.0])])
        seen.append(float(w.numpy()[0]))
    assert seen == expected


def test_a_center_optimizer_that_cannot_be_saved_warns_at_saving_only() -> None:
    w, rate = parameter([0.0]), tf.constant(0.5)
    optimizer = agn(keras.optimizers.SGD(1.0), period=1, outer_optimizer=keras.optimizers.SGD(lambda: rate))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.build([w])
        optimizer.apply([tf.constant([-1.0])])
    assert w.numpy().tolist() == [0.5]


def on_two_ranks(make: Callable[[Any], Any], steps: Callable[[int], int], overflow: int | None = None) -> list[Any]:
    """Return weight and center per rank, after gradients of −1; rank 1 may overflow at a step."""

    def work(communicator: Communicator) -> Any:
        w, optimizer = parameter([0.0]), make(Delegate(communicator))
        optimizer.build([w])
        for step in range(steps(communicator.rank)):
            lost = communicator.rank == 1 and step == overflow
            optimizer.apply([optimizer.scale_loss(tf.constant([np.inf if lost else -1.0]))])
        optimizer.synchronizer.finalize()
        return float(w.numpy()[0]), float(optimizer.synchronizer.center_tensors()[0].numpy()[0])

    return run_ranks(2, work)


def halving() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))


def test_a_scheduled_rate_of_the_center_after_uneven_data() -> None:
    """Rank 0 is done after 3 steps; its rate of then counts neither while rank 1 goes on nor at the end."""
    found = on_two_ranks(lambda ranks: agn(halving(), period=2, process_set=ranks), lambda rank: 3 + 6 * rank)
    rates = [0.5 ** (steps + 1) for steps in (2, 4, 6, 8, 9)]
    center = float(np.dot(rates, [2, 2, 1, 1, 1]))
    assert found == [(center, center)] * 2


def test_a_scheduled_rate_of_the_center_after_an_overflow_on_one_rank() -> None:
    """Rank 1 skips its first update, and is one iteration behind at both exchanges; both take rank 0's rate."""

    def make(ranks: Any) -> Any:
        inner = keras.optimizers.LossScaleOptimizer(halving(), initial_scale=1.0)
        return agn(inner, period=2, process_set=ranks)

    assert on_two_ranks(make, lambda rank: 4, overflow=0) == [(0.125 * 2 + 0.03125 * 2,) * 2] * 2


def test_a_constant_rate_allows_both() -> None:
    """Sums of mean gradients, 2 per exchange of both ranks; a rank that has left adds nothing."""
    uneven = on_two_ranks(
        lambda ranks: agn(keras.optimizers.SGD(0.5), period=2, process_set=ranks), lambda rank: 3 + 2 * rank
    )
    assert uneven == [(2.5, 2.5)] * 2, "exchanges after 2, 4 and 5 steps; 0.5 (2 + 2 + 1)"


def test_a_rank_without_any_step_finalizes_with_the_others() -> None:
    """Rank 0 has no data and leaves at once; on Horovod it and the others would wait for each other forever."""
    found = on_two_ranks(lambda ranks: average(keras.optimizers.SGD(1.0), period=2, process_set=ranks), lambda r: 3 * r)
    assert found == [(1.5, 1.5)] * 2, "means of 0 and 2, then of 1 and 2"


# Gradients


@pytest.mark.parametrize(("make", "loop"), covering([agn, easgd], LOOPS, together=1))
def test_scaled_gradients_of_16_bits_do_not_vanish(make: Any, loop: str) -> None:
    """Neither the scale of 2¹⁷ nor a gradient of 2⁻²⁸ is a number of float16. Updates: 2⁻¹⁰; then zero, or ρ's −½."""
    w = parameter([0.0], "float16")
    plain = keras.optimizers.SGD(2.0**10)
    optimizer = make(keras.optimizers.LossScaleOptimizer(plain, initial_scale=2.0**17), period=10)
    optimizer.build([w])
    step = LOOPS[loop](lambda gradient: optimizer.apply([gradient]))
    for exponent in (-3, -11):
        step(tf.constant([-(2.0**exponent)], tf.float16))
    assert optimizer.synchronizer.counters.skipped_updates == 0
    assert w.numpy().tolist() == [2.0**-10 - (0.5 if make is easgd else 0.0)]
    if make is agn:
        (accumulated,) = optimizer.synchronizer.tensor_groups.parameters.worker["gradient"].tensors()
        assert accumulated.numpy().tolist() == [-(2.0**-20) - 2.0**-28]


@pytest.mark.parametrize(("make", "loop"), covering([agn, easgd], LOOPS, together=1))
def test_sparse_gradients_under_a_loss_scale(make: Any, loop: str) -> None:
    """As without the scale, apart from the step that overflows."""
    tables = []
    for scale in (None, 8.0):
        table, inner = parameter(np.ones((5, 2))), keras.optimizers.SGD(0.5)
        if scale is not None:
            inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)
        optimizer = make(inner, period=3)
        optimizer.build([table])

        def step(factor: Any, optimizer: Any = optimizer, table: Any = table) -> None:
            with tf.GradientTape() as tape:
                rows = tf.gather(table.value, [1, 1, 3])
                loss = optimizer.scale_loss(tf.reduce_sum(rows * rows) * factor)
            optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])

        taken = LOOPS[loop](lambda factor, step=step: step(factor))
        for factor in (0.25, np.inf, 0.25, 0.25, 0.25):
            if scale is not None or np.isfinite(factor):
                taken(tf.constant(factor))
            else:  # the iteration counts
                optimizer.synchronizer.step(updated=False)
        tables.append(table.numpy())
        assert optimizer.synchronizer.counters.skipped_updates == 1
    assert tables[1] == pytest.approx(tables[0], rel=1e-6)
    assert (tables[0][[0, 2, 4]] == 1).all()
    assert (tables[0][[1, 3]] != 1).all()


@pytest.mark.parametrize("kind", [bool, np.bool_, tf.constant])
def test_a_step_counts_whatever_kind_of_boolean_says_whether_it_was_an_update(kind: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    synchronizer = hvdp.Synchronizer(model, hvdp.Averaging(), 2)
    for updated in (True, False, True, True):
        synchronizer.step(updated=kind(updated))
    counters = synchronizer.counters
    assert (counters.local_steps, counters.skipped_updates, counters.rounds) == (4, 1, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_gradients_than_of_variables(count: int) -> None:
    a, b = parameter([0.0]), parameter([0.0])
    optimizer = average(keras.optimizers.SGD(1.0))
    optimizer.build([a, b])
    for arguments in ([], [[a, b]]):
        with pytest.raises(ValueError, match=rf"2 variables take as many gradients. Received: {count}"):
            optimizer.apply([tf.ones(1)] * count, *arguments)
    assert (a.numpy()[0], b.numpy()[0], optimizer.synchronizer.local_steps) == (0.0, 0.0, 0)


def test_no_gradients_at_all_is_no_step() -> None:
    optimizer = average(keras.optimizers.SGD(1.0))
    optimizer.build([parameter([0.0])])
    optimizer.apply([])
    assert optimizer.synchronizer.local_steps == 0


def test_steps_in_a_loop_of_the_graph() -> None:
    """The trajectory of one worker, α 0.25, τ 2, as steps of Python."""
    w = parameter([0.0])
    optimizer = easgd(keras.optimizers.SGD(1.0), period=2, rho=0.0)
    optimizer.build([w])

    @tf.function
    def train(steps: Any) -> None:
        for _ in tf.range(steps):
            optimizer.apply([tf.constant([-1.0])], [w])

    seen = []
    for steps in (2, 3, 1):
        train(tf.constant(steps))
        seen.append(float(w.numpy()[0]))
    assert seen == [1.5, 3.75, 3.875]
    assert optimizer.synchronizer.rounds == 3


@pytest.mark.parametrize("kind", ["optimizer", "synchronizer"])
def test_xla_is_refused_in_a_loop_of_ones_own(kind: str) -> None:
    w = tf.Variable([0.0])
    if kind == "optimizer":
        optimizer = average(keras.optimizers.SGD(1.0))
        optimizer.build([w])
        step = tf.function(lambda: optimizer.apply([tf.ones(1)], [w]), jit_compile=True)
    else:
        synchronizer = hvdp.Synchronizer([w], hvdp.Averaging(), 2, process_set=LocalCommunicator())
        step = tf.function(lambda: synchronizer.step(), jit_compile=True)
    with pytest.raises(ValueError, match="Exchanges cannot be compiled by XLA"):
        step()


# The center in the model


@pytest.mark.parametrize("kind", [thorough("optimizer"), "synchronizer", "fit"])
def test_a_compiled_step_inside_the_center_block_is_an_error(kind: str) -> None:
    """Also one that was traced before; nothing is counted, and training goes on after the block."""
    w = parameter([0.0])
    owner: Any
    step: Callable[[], Any]
    if kind == "fit":
        model = compiled(average)
        owner, step = model.optimizer, lambda: fit(model)
    elif kind == "optimizer":
        owner = average(keras.optimizers.SGD(1.0))
        owner.build([w])
        step = tf.function(lambda: owner.apply([tf.ones(1)], [w]))
    else:
        owner = hvdp.Synchronizer([w], hvdp.Averaging(), 100, process_set=LocalCommunicator())
        step = tf.function(lambda: owner.step())
    synchronizer = owner if kind == "synchronizer" else owner.synchronizer
    step()
    steps, local = synchronizer.local_steps, w.numpy().tolist()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"inside the center\(\) block"), owner.center():
        step()
    assert (synchronizer.local_steps, w.numpy().tolist()) == (steps, local)
    step()
    assert synchronizer.local_steps == 2 * steps


@pytest.mark.parametrize(("make", "loop"), covering([agn, easgd], LOOPS, together=1))
def test_training_starts_from_weights_that_were_set_after_the_optimizer_was_built(make: Any, loop: str) -> None:
    model = compiled(make, keras.optimizers.SGD(0.1))
    model.set_weights([np.full(weight.shape, 5.0) for weight in model.get_weights()])
    variables = model.trainable_variables
    step = LOOPS[loop](lambda: model.optimizer.apply([tf.zeros_like(variable) for variable in variables], variables))
    for _ in range(3):
        step()
    assert all((weight == 5.0).all() for weight in model.get_weights())
    assert model.optimizer.synchronizer.distance() == 0
    assert model.optimizer.synchronizer.rounds == 1


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_the_distance_before_the_first_step(center: str) -> None:
    """All ranks start from the root's values first, as they do before they read the center."""

    def work(communicator: Communicator) -> Any:
        w = parameter([0.0, 1.0])
        options: dict[str, Any] = {"center": center, "process_set": Delegate(communicator)}
        optimizer = easgd(keras.optimizers.SGD(0.1), **options)
        optimizer.build([w])
        w.assign([3.0 * communicator.rank, 1.0])
        return optimizer.synchronizer.distance(), w.numpy().tolist()

    assert run_ranks(2, work) == [(0.0, [0.0, 1.0])] * 2


# Saving and loading


def test_configurations_of_numpy_numbers_are_plain() -> None:
    optimizers = [
        easgd(keras.optimizers.SGD(1.0), period=np.int64(3), moving_rate=np.float32(0.25), rho=np.float64(0.5)),
        average(keras.optimizers.SGD(1.0), period=hvdp.PostLocal(np.int64(3), np.int32(4))),
    ]
    for optimizer in optimizers:
        text = json.dumps(keras.optimizers.serialize(optimizer))
        assert keras.optimizers.deserialize(json.loads(text)).get_config() == optimizer.get_config()


@keras.saving.register_keras_serializable("tests")
class Halfway(hvdp.Averaging):
    """An algorithm of the user's own."""

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Halfway:
        return cls(**config)


def test_a_registered_algorithm_of_ones_own_is_saved() -> None:
    made = hvdp.PeriodicOptimizer(keras.optimizers.SGD(1.0), None, Halfway(), 3, process_set=LocalCommunicator())
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert type(again._algorithm) is Halfway


def test_the_process_set_of_a_loaded_optimizer_is_kept_until_it_is_given_one(tmp_path: Path) -> None:
    saved = keras.optimizers.serialize(average(keras.optimizers.SGD(1.0), period=2))
    saved["config"]["process_set"] = [0, 2]
    loaded = keras.optimizers.deserialize(saved)
    tf.train.Checkpoint(optimizer=loaded).write(str(tmp_path / "checkpoint"))
    assert json.loads(json.dumps(loaded.get_config()))["process_set"] == [0, 2]
    w = parameter([0.0])
    loaded.build([w])
    with pytest.raises(ValueError, match=r"trained on the process set of ranks 0 and 2.*attach\(process_set=...\)"):
        loaded._lifecycle.binding.refuse_other_ranks(loaded.gradient_group)
    loaded.attach(process_set=LocalCommunicator())
    for _ in range(2):
        loaded.apply([tf.constant([-1.0])])
    assert (w.numpy()[0], loaded.synchronizer.rounds) == (2.0, 1)


@pytest.mark.parametrize("make", [thorough(easgd), agn])
def test_a_model_that_was_saved_before_training_trains_as_the_original(make: Any, tmp_path: Path) -> None:
    model = compiled(make)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, process_set=LocalCommunicator())
    for trained in (model, loaded):
        fit(trained)
    assert same(model, loaded)
    assert loaded.optimizer.synchronizer.rounds == 1


@pytest.mark.parametrize("make", [easgd, thorough(agn)])
def test_weights_files_hold_the_exchanges_too(make: Any, tmp_path: Path) -> None:
    """``load_weights`` in mid-period, and training goes on to the bit."""
    model, other = compiled(make), compiled(make)
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    for trained in (model, other):
        fit(trained)
    assert same(model, other)
    assert other.optimizer.synchronizer.local_steps == 8


def test_weights_that_another_optimizer_has_trained(tmp_path: Path) -> None:
    """Keras warns, and loads the model."""
    plain, model = network(), compiled(average)
    plain.compile("adam", loss="mse", jit_compile=False)
    fit(plain)
    plain.save_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="Skipping") as seen:
        model.load_weights(tmp_path / "model.weights.h5")
    assert any("another optimizer than ModelAverageOptimizer" in str(warning.message) for warning in seen)
    assert all((a == b).all() for a, b in zip(model.get_weights(), plain.get_weights(), strict=True))
    assert model.optimizer.synchronizer.local_steps == 0


@pytest.mark.parametrize("make", [thorough(easgd), agn])
def test_a_copy_by_configuration_trains_as_the_original(make: Any) -> None:
    model = compiled(make)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.attach(copy, process_set=LocalCommunicator())
    copy.compile(optimizer, loss="mse", jit_compile=False)
    for trained in (model, copy):
        fit(trained, epochs=2)
    assert same(model, copy)


def test_a_checkpoint_holds_every_variable(tmp_path: Path) -> None:
    found = []
    for value in (0.0, 7.0):
        w, optimizer = parameter([value]), agn(keras.optimizers.Adam(1.0), period=2)
        optimizer.build([w])
        found.append((w, optimizer, tf.train.Checkpoint(w=w, optimizer=optimizer)))
    (w, optimizer, checkpoint), (other_w, other, other_checkpoint) = found
    for _ in range(3):
        optimizer.apply([tf.ones(1)])
    status = other_checkpoint.read(checkpoint.write(str(tmp_path / "checkpoint")))
    status.assert_consumed().assert_existing_objects_matched()
    assert other_w.numpy() == w.numpy()
    assert other.synchronizer.counters == optimizer.synchronizer.counters
    assert [v.numpy().tolist() for v in other.variables] == [v.numpy().tolist() for v in optimizer.variables]


def test_the_state_after_an_exchange_fits_a_new_optimizer() -> None:
    """The center optimizer has as many variables after its steps as before."""
    w, other_w = parameter([0.0]), parameter([0.0])
    optimizer, other = (agn(keras.optimizers.Adam(0.1), period=2) for _ in range(2))
    optimizer.build([w])
    other.build([other_w])
    for _ in range(3):
        optimizer.apply([tf.ones(1)])
    other.synchronizer.load_state_dict(optimizer.synchronizer.state_dict())
    assert len(other.variables) == len(optimizer.variables)
    for own, loaded in zip(optimizer._center.optimizer.variables, other._center.optimizer.variables, strict=True):
        assert own.numpy() == loaded.numpy()
    assert other.synchronizer.counters == optimizer.synchronizer.counters


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop(), "it has 3 variables, and 4 here"),
        (lambda state: state.append(np.zeros(1)), "it has 5 variables, and 4 here"),
        (lambda state: state.__setitem__(3, np.zeros(5)), r"variable 3 has shape \(5,\), and \(1,\) here"),
    ],
)
def test_a_damaged_state_of_the_center_optimizer_is_refused(damage: Any, message: str) -> None:
    w, optimizer = parameter([0.0]), agn(keras.optimizers.Adam(0.1), period=2)
    optimizer.build([w])
    for _ in range(3):
        optimizer.apply([tf.ones(1)])
    synchronizer = optimizer.synchronizer
    state = synchronizer.state_dict()
    damage(state["center_optimizer"])
    steps = synchronizer.local_steps
    with pytest.raises(ValueError, match=f"does not fit Adam: {message}"):
        synchronizer.load_state_dict(state)
    assert synchronizer.local_steps == steps


def test_a_write_that_broke_off_leaves_nothing_behind() -> None:
    """A variable over several buckets, of which the first only was written when an exchange failed."""
    variable = tf.Variable(np.zeros(7))
    store = VariableStore(layout_of([("v", variable)], bucket_bytes=24), [variable])
    first, *_ = store.layout.buckets
    store.write(first, tf.constant([9.0, 9.0, 9.0], tf.float64))
    for bucket in store.layout.buckets:
        store.write(bucket, tf.range(bucket.start, bucket.stop, dtype=tf.float64))
    assert variable.numpy().tolist() == [0, 1, 2, 3, 4, 5, 6]


# Keras around the optimizer


def test_the_rate_that_a_callback_sets_is_that_of_the_center() -> None:
    model = compiled(agn, keras.optimizers.SGD(0.5))
    history = fit(model, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), epochs=2)
    assert history.history["learning_rate"] == [0.25, 0.125]
    assert float(model.optimizer._center.optimizer.learning_rate) == 0.125


def test_eager_and_compiled_fit_do_the_same() -> None:
    models = [compiled(easgd, run_eagerly=eager) for eager in (True, False)]
    for model in models:
        fit(model, epochs=2)
    assert same(*models)
    assert models[0].optimizer.synchronizer.counters.rounds == 2


def test_an_interrupted_fit_goes_on_from_its_backup(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    straight, interrupted, resumed = (compiled(easgd) for _ in range(3))
    fit(straight, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, keras.callbacks.BackupAndRestore(tmp_path / "backup"), Stop(), epochs=3)
    fit(resumed, keras.callbacks.BackupAndRestore(tmp_path / "backup"), epochs=3)
    assert same(straight, resumed)
    assert resumed.optimizer.synchronizer.local_steps == 12


def test_mixed_bfloat16_needs_no_loss_scale() -> None:
    model = network()
    for layer in model.layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    model.compile(agn(keras.optimizers.Adam(0.1), model, 3), loss="mse", jit_compile=False)
    before = model.get_weights()
    fit(model)
    assert model.optimizer.synchronizer.rounds == 1
    assert {center.dtype.name for center in model.optimizer.synchronizer.center_tensors()} == {"float32"}
    assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_which_variables_of_a_model_take_part() -> None:
    """Nested models, a layer used twice, statistics of batch normalization, Normalization, a frozen layer."""
    inputs, shared = keras.Input((3,)), keras.layers.Dense(3)
    inner = keras.Sequential([keras.Input((3,)), shared, keras.layers.BatchNormalization()])
    normalization = keras.layers.Normalization()
    normalization.adapt(X)
    frozen = keras.layers.Dense(1)
    model = keras.Model(inputs, frozen(keras.layers.Dropout(0.5)(inner(shared(normalization(inputs))))))
    frozen.trainable = False
    optimizer = average(keras.optimizers.SGD(0.1), model)
    named = optimizer.synchronizer.replica.named
    roles = (named.parameters, named.averaged, named.counted, named.constants)
    assert [[name.rpartition("/")[2] for name, _ in role] for role in roles] == [
        ["kernel", "bias", "gamma", "beta"],
        ["moving_mean", "moving_variance"],
        [],
        ["mean", "variance", "count", "kernel", "bias"],
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32", "int64", "uint64", "bool"])
def test_integers_travel_in_a_type_that_horovod_has(dtype: str) -> None:
    variable = tf.Variable(tf.ones([2], dtype))
    layout = layout_of([("count", variable)], 2**20)
    store = VariableStore(layout, [variable])
    value = store.read(layout.buckets[0])
    assert value.dtype.name in ("int32", "int64")
    store.write(layout.buckets[0], tf.zeros_like(value))
    assert variable.dtype.name == dtype
    assert not variable.numpy().any()


# Refused


def twice() -> Any:
    w = parameter([0.0])
    return [w, w.value]


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: ["w"], TypeError, "Exchanged objects must be variables. Received: str"),
        (lambda: [tf.ones(2)], TypeError, "Exchanged objects must be variables. Received: EagerTensor"),
        (twice, ValueError, "A variable must be given once. Received: 2 variables, 1 of them different"),
    ],
)
def test_what_cannot_be_exchanged(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hvdp.Synchronizer(model(), hvdp.Averaging(), 2, process_set=LocalCommunicator())


def test_weights_that_were_frozen_when_the_optimizer_was_built() -> None:
    model = network()
    model.layers[0].trainable = False
    optimizer = average(keras.optimizers.SGD(0.1), model)
    model.layers[0].trainable = True
    model.compile(optimizer, loss="mse", jit_compile=False)
    with pytest.raises(ValueError, match="Unknown variable"):
        fit(model)


def test_exchanges_in_a_graph_leave_nothing_in_memory() -> None:
    """TensorFlow keeps every Python scalar that has become a tensor, such as the time of an exchange."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 1, process_set=LocalCommunicator())
    optimizer.build(model.trainable_variables)
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]

    @tf.function
    def step() -> None:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def blocks(exchanges: int) -> int:
        for _ in range(exchanges):
            step()
        gc.collect()
        return sys.getallocatedblocks()

    # A collection takes seconds if it looks at all that earlier tests have left.
    gc.collect()
    gc.freeze()
    # What else the process keeps comes once, and ends soon; what exchanges keep, every time.
    counts = map(blocks, [100] * 8)
    assert any(after - before < 100 for before, after in pairwise(counts))
