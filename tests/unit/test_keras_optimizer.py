"""The Keras optimizers as Keras optimizers: what any other optimizer can do, they can. One process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from tests.conftest import PATIENCE  # noqa: E402

pytestmark = pytest.mark.timeout(90)

WRAPPERS: dict[str, Any] = {
    "easgd": lambda o, m=None, p=4, **k: hvdp.ElasticAverageOptimizer(o, m, p, moving_rate=0.4, **k),
    "easgd_rho": lambda o, m=None, p=4, **k: hvdp.ElasticAverageOptimizer(o, m, p, moving_rate=0.4, rho=0.5, **k),
    "average": lambda o, m=None, p=4, **k: hvdp.ModelAverageOptimizer(o, m, p, **k),
    "agn": lambda o, m=None, p=4, **k: hvdp.AGNOptimizer(o, m, p, **k),
}


def wrap(name: str, inner: Any, model: Any = None, period: Any = 4, **options: Any) -> Any:
    options.setdefault("process_set", LocalCommunicator())
    return WRAPPERS[name](inner, model, period, **options)


def network() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def parameter(value: Any = (1.0, -2.0), dtype: str = "float32") -> Any:
    return keras.Variable(np.array(value), dtype=dtype, name="w")


def descend(optimizer: Any, variable: Any, steps: int) -> list[list[float]]:
    """Return a trajectory on a quadratic; gradients differ from step to step."""
    if not optimizer.built:
        optimizer.build([variable])
    seen = []
    for step in range(steps):
        optimizer.apply([tf.convert_to_tensor(variable) * 3.0 + float(step)])
        seen.append(variable.numpy().ravel().tolist())
    return seen


LOCAL: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.5),
    "weight_decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "use_ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=4.0),
}


@pytest.mark.parametrize("local", LOCAL)
def test_between_exchanges_it_is_the_wrapped_optimizer(local: str) -> None:
    plain, wrapped = LOCAL[local](), LOCAL[local]()
    optimizer = wrap("agn", wrapped, period=100)
    expected = descend(plain, parameter(), 5)
    assert descend(optimizer, parameter(), 5) == expected
    assert int(optimizer.iterations) == int(plain.iterations)
    assert float(optimizer.learning_rate) == float(plain.learning_rate)


def test_it_is_a_keras_optimizer() -> None:
    inner = keras.optimizers.SGD(0.1)
    optimizer = wrap("easgd", inner)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert keras.optimizers.get(optimizer) is optimizer
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    w = parameter()
    optimizer.build([w])
    assert optimizer.apply_gradients([(tf.ones(2), w)]) == 1
    assert w.numpy().tolist() == [0.75, -2.25]
    assert {v.path for v in inner.variables} < {v.path for v in optimizer.variables}


def test_the_final_values_of_moving_averages() -> None:
    plain, wrapped = (keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5) for _ in range(2))
    optimizer, expected, found = wrap("average", wrapped, period=100), parameter(), parameter()
    descend(plain, expected, 3)
    descend(optimizer, found, 3)
    plain.finalize_variable_values([expected])
    optimizer.finalize_variable_values([found])
    assert found.numpy().tolist() == expected.numpy().tolist()


def test_the_center_steps_with_the_current_rate_of_the_local_optimizer() -> None:
    """One worker, SGD: the center takes one step of the rate at the exchange on the mean gradient."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])
    w, optimizer = parameter([0.0]), wrap("agn", keras.optimizers.SGD(schedule), period=2)
    optimizer.build([w])
    centers = []
    for _ in range(4):
        optimizer.apply([tf.constant([-1.0])])
        with optimizer.center():
            centers.append(float(w.numpy()[0]))
    assert centers == [0.0, 0.5, 0.5, 0.75], "the iteration counter has moved on when the center steps"


def test_weight_decay_of_the_center_spares_what_the_local_optimizer_spares() -> None:
    found = {}
    for spared in ([], ["kernel"]):
        model, inner = network(), keras.optimizers.SGD(0.0 + 0.1, weight_decay=0.5)
        inner.exclude_from_weight_decay(var_names=spared)
        optimizer = wrap("agn", inner, model, 1)
        optimizer.apply([tf.zeros_like(v) for v in model.trainable_variables])
        with optimizer.center():
            found[bool(spared)] = float(np.abs(model.weights[0].numpy()).sum())
    assert found[False] == pytest.approx(0.95 * found[True])


def test_a_center_optimizer_of_ones_own() -> None:
    w, center = parameter([0.0]), keras.optimizers.SGD(10.0)
    optimizer = wrap("agn", keras.optimizers.SGD(1.0), period=2, outer_optimizer=center)
    optimizer.build([w])
    for _ in range(2):
        optimizer.apply([tf.constant([-1.0])])
    assert w.numpy().tolist() == [10.0]
    with pytest.raises(ValueError, match="must be an optimizer of its own that has not been used"):
        wrap("agn", keras.optimizers.SGD(1.0), outer_optimizer=center)
    with pytest.raises(TypeError, match=r"`outer_optimizer` must be a Keras optimizer. Received: str"):
        wrap("agn", keras.optimizers.SGD(1.0), outer_optimizer="sgd")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_algorithm_sees_unscaled_gradients(compiled: bool) -> None:
    """An overflow at the third step: it counts, and its gradients do not."""
    w = parameter([0.0])
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=16.0)
    optimizer = wrap("agn", inner, period=4)
    optimizer.build([w])

    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(-tf.reduce_sum(w) * factor)
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])

    taken = tf.function(step) if compiled else step
    for i in range(4):
        taken(tf.constant(np.inf if i == 2 else 1.0))
    counters = optimizer.synchronizer.counters
    assert (counters.local_steps, counters.rounds, counters.skipped_updates) == (4, 1, 1)
    assert w.numpy().tolist() == [1.0], "the mean of three gradients of one"
    assert float(inner.dynamic_scale) == 8.0


def test_the_elastic_term_under_a_loss_scale() -> None:
    plain, scaled = (parameter([0.0]) for _ in range(2))
    for w, inner in (
        (plain, keras.optimizers.SGD(0.5)),
        (scaled, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=16.0)),
    ):
        optimizer = wrap("easgd_rho", inner, period=2)
        optimizer.build([w])
        for _ in range(3):
            optimizer.apply([tf.constant([-1.0]) * optimizer.scale_loss(tf.constant(1.0))])
    assert scaled.numpy().tolist() == plain.numpy().tolist() != [1.5]


def test_keras_must_not_wrap_it_in_a_loss_scale() -> None:
    model = network()
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(ValueError, match=r"must not be inside a LossScaleOptimizer.*auto_scale_loss=False"):
        model.compile(wrap("easgd", keras.optimizers.SGD(0.1), model), loss="mse")


def test_mixed_precision_with_the_loss_scale_inside() -> None:
    """The scale starts so high that the first steps overflow: they count, and training goes on."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy(before)
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**20)
    optimizer = wrap("agn", inner, model, 3)
    model.compile(optimizer, loss="mse", auto_scale_loss=False, jit_compile=False)
    data = np.random.default_rng(0).standard_normal((32, 3)).astype("float32")
    history = model.fit(data, data[:, :1], batch_size=4, epochs=4, verbose=0, shuffle=False).history["loss"]
    counters = optimizer.synchronizer.counters
    assert (counters.local_steps, counters.rounds) == (32, 10)
    assert 0 < counters.skipped_updates < 16
    assert history[-1] < history[0]
    assert all(v.dtype == "float32" and np.isfinite(v.numpy()).all() for v in model.trainable_variables)


def test_xla_is_refused() -> None:
    model = network()
    model.compile(wrap("average", keras.optimizers.SGD(0.1), model), loss="mse", jit_compile=True)
    with pytest.raises(ValueError, match=r"pass jit_compile=False to model.compile"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


@keras.saving.register_keras_serializable("tests")
def own_schedule(clock: hvdp.Clock) -> int:
    return 1 if clock.step < 3 else 5


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda **k: hvdp.ElasticAverageOptimizer(keras.optimizers.Adam(0.1), None, 7, beta=0.3, rho=0.1, **k),
        lambda **k: hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), None, hvdp.PostLocal(5, 6), **k),
        lambda **k: hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), None, own_schedule, **k),
        lambda **k: hvdp.AGNOptimizer(keras.optimizers.SGD(0.1), None, 3, keras.optimizers.Adam(0.5), "average", **k),
        lambda **k: hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), None, hvdp.EASGD(0.2), hvdp.Every(3), **k),
    ],
)
def test_configuration_round_trip(optimizer: Any) -> None:
    made = optimizer(process_set=LocalCommunicator(), name="mine")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert type(again) is type(made)
    assert again.get_config() == made.get_config()
    for attribute in ("_algorithm", "_schedule", "name"):
        assert getattr(again, attribute) == getattr(made, attribute)
    assert type(again.inner) is type(made.inner)


def test_a_loaded_model_needs_no_horovod(tmp_path: Path) -> None:
    """In a new process, without hvd.init(): predict, evaluate the center, save again."""
    model = network()
    model.compile(wrap("agn", keras.optimizers.Adam(0.1), model, 3), loss="mse", jit_compile=False)
    data = np.random.default_rng(0).standard_normal((10, 3)).astype("float32")
    model.fit(data, data[:, :1], batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    with model.optimizer.center():
        expected = model.predict(data[:1], verbose=0)[0, 0]
    program = f"""
import keras, numpy as np
import hvd_periodic.tensorflow
for file, other in (("model", "again"), ("again", "unused")):
    model = keras.models.load_model(r"{tmp_path}/" + file + ".keras")
    model.save(r"{tmp_path}/" + other + ".keras")
with model.optimizer.center():
    print("center", float(model.predict(np.array({data[:1].tolist()}), verbose=0)[0, 0]))
print("steps", model.optimizer.synchronizer.local_steps)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(hvdp.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert float(words[1]) == pytest.approx(expected, rel=1e-5)
    assert words[2:] == ["steps", "5"]


def test_what_a_loaded_optimizer_has_to_be_told(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(wrap("average", keras.optimizers.SGD(0.1), model), loss="mse", jit_compile=False)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    with pytest.raises(RuntimeError, match=r"was loaded: call optimizer.attach\(\), or train"):
        _ = loaded.synchronizer
    with pytest.raises(ValueError, match=r"call optimizer.attach\(model\) after loading"):
        loaded.attach()
    again = keras.models.load_model(tmp_path / "model.keras")
    again.optimizer.attach(again)
    assert again.optimizer.synchronizer.rounds == 1
    with pytest.raises(RuntimeError, match="has to come before the first use"):
        again.optimizer.attach(again)


@pytest.mark.parametrize("name", ["easgd", "average", "agn"])
def test_sparse_gradients_stay_sparse(name: str) -> None:
    table = keras.Variable(np.ones((5, 2)), name="table")
    inner = keras.optimizers.SGD(1.0)
    seen: list[Any] = []
    apply = inner.apply
    inner.apply = lambda gradients, variables: (seen.extend(gradients), apply(gradients, variables))
    optimizer = wrap(name, inner, period=2)
    optimizer.build([table])
    for row in (1, 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, [row, row]))
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in seen)
    expected = np.ones((5, 2))
    expected[1] += {"easgd": -4.0 * 0.6, "average": -4.0, "agn": -2.0}[name]
    assert table.numpy() == pytest.approx(expected)


def test_sparse_gradients_under_rho() -> None:
    dense, sparse = parameter([1.0, 2.0]), parameter([1.0, 2.0])
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), tf.constant([2]))
    for w, gradient in ((dense, tf.constant([0.0, 1.0])), (sparse, slices)):
        optimizer = wrap("easgd_rho", keras.optimizers.SGD(0.5), period=10)
        optimizer.build([w])
        for _ in range(3):
            optimizer.apply([gradient])
    assert sparse.numpy().tolist() == dense.numpy().tolist()


def test_missing_and_reordered_gradients() -> None:
    a, b = parameter([1.0]), parameter([2.0])
    optimizer = wrap("agn", keras.optimizers.SGD(1.0), period=2)
    optimizer.build([a, b])
    optimizer.apply_gradients([(tf.constant([10.0]), b), (tf.constant([1.0]), a)])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients([(None, a), (tf.constant([10.0]), b)])
    assert (a.numpy()[0], b.numpy()[0]) == (0.5, -8.0), "sums of 1 and 20 over two steps"


@pytest.mark.parametrize("name", WRAPPERS)
def test_variables_of_tensorflow_and_of_any_shape(name: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (1, 2, 1, 3), (7,)]
    variables = [tf.Variable(np.ones(shape), dtype=tf.float32, name=f"v{i}") for i, shape in enumerate(shapes)]
    optimizer = wrap(name, keras.optimizers.SGD(0.5), period=1)
    optimizer.build(variables)
    optimizer.apply([tf.ones_like(v) for v in variables])
    values = [float(value) for v in variables for value in v.numpy().ravel()]
    assert values == pytest.approx([0.7 if name.startswith("easgd") else 0.5] * 14)


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")])
def test_the_center_of_16_bit_variables_has_32(dtype: str, kept: str) -> None:
    w, optimizer = parameter([1.0, 2.0], dtype), wrap("easgd", keras.optimizers.SGD(0.01), period=1)
    optimizer.build([w])
    optimizer.apply([tf.ones(2, dtype)])
    (center,) = optimizer.synchronizer.center_tensors()
    assert center.dtype.name == kept
    assert w.dtype == dtype
    assert 0.99 < float(center[0]) < 1.0


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_block_of_the_center(name: str) -> None:
    w, optimizer = parameter([1.0]), wrap(name, keras.optimizers.SGD(0.5), period=4)
    descend(optimizer, w, 1)
    local = w.numpy().tolist()
    with pytest.raises(ZeroDivisionError), optimizer.center():
        assert w.numpy().tolist() == [1.0] != local
        with pytest.raises(RuntimeError, match=r"step\(\) inside the center\(\) block"):
            optimizer.apply([tf.ones(1)])
        with pytest.raises(RuntimeError, match=r"center\(\) inside the center\(\) block"):
            optimizer.center().__enter__()
        raise ZeroDivisionError
    assert w.numpy().tolist() == local
    assert optimizer.synchronizer.local_steps == 1


def test_before_it_is_built() -> None:
    optimizer = wrap("average", keras.optimizers.SGD(0.1))
    for use in (lambda: optimizer.synchronizer, optimizer.center, optimizer.start):
        with pytest.raises(RuntimeError, match="not built"):
            use()
    with pytest.raises(ValueError, match=r"is not built: call optimizer.build"):
        optimizer.apply([tf.ones(2)])
    optimizer.build([parameter()])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.ones(2)], [parameter()])


def test_fit_builds_an_optimizer_that_was_not_given_the_model() -> None:
    model = network()
    optimizer = wrap("average", keras.optimizers.SGD(0.1), None, 3)
    model.compile(optimizer, loss="mse", jit_compile=False)
    assert not optimizer.built
    model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=1, verbose=0)
    assert optimizer.synchronizer.rounds == 2


def test_two_optimizers_on_parts_of_a_model() -> None:
    a, b = parameter([0.0]), parameter([0.0])
    first, second = wrap("average", keras.optimizers.SGD(1.0), period=2), wrap("easgd", keras.optimizers.SGD(1.0))
    first.build([a])
    second.build([b])
    for _ in range(4):
        first.apply([tf.constant([-1.0])])
        second.apply([tf.constant([-1.0])])
    assert (a.numpy()[0], b.numpy()[0]) == (4.0, pytest.approx(4 * 0.6))
    assert (first.synchronizer.rounds, second.synchronizer.rounds) == (2, 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda **k: hvdp.ModelAverageOptimizer("sgd", **k),
            TypeError,
            "must be a keras.optimizers.Optimizer. Rec.*str",
        ),
        (
            lambda **k: wrap("average", keras.optimizers.SGD(0.1), "model", **k),
            TypeError,
            "`model` must be a keras.Model",
        ),
        (lambda **k: wrap("average", keras.optimizers.SGD(0.1), buffers="all", **k), ValueError, "buffers='all'"),
        (
            lambda **k: wrap("average", keras.optimizers.SGD(0.1), buffers="average", **k),
            ValueError,
            "needs the model, which knows its statistics",
        ),
        (lambda **k: wrap("average", keras.optimizers.SGD(0.1), center="here", **k), ValueError, "must be one of"),
        (
            lambda **k: wrap("average", keras.optimizers.SGD(0.1), root_rank=1, **k),
            ValueError,
            "`root_rank` must be one",
        ),
        (lambda **k: wrap("average", keras.optimizers.SGD(0.1), period=0, **k), ValueError, "`interval_steps`, unless"),
        (
            lambda **k: hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), moving_rate=2, asynchronous=True, **k),
            ValueError,
            "in asynchronous exchange",
        ),
        (
            lambda **k: hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), moving_rate=1.5, **k),
            ValueError,
            "must be in .0, 2/",
        ),
        (lambda **k: hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), rho=-1, **k), ValueError, "rho=..."),
        (lambda **k: hvdp.AGNOptimizer(keras.optimizers.SGD(0.1), op="max", **k), ValueError, "op='max'"),
    ],
)
def test_refused_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(process_set=LocalCommunicator())


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(1)]), {}, ValueError, "The model is not built"),
        (lambda: [], {}, ValueError, "At least one trainable variable"),
        (lambda: [tf.Variable([1])], {}, TypeError, "must be float64, float32, bfloat16 or float16. Received: int32"),
        (lambda: [tf.Variable([1j])], {}, TypeError, r"must be float64, .* or float16. Received: complex128"),
        (lambda: [parameter()], {"algorithm": hvdp.AGN()}, ValueError, "pass `outer_optimizer`"),
        (lambda: [parameter()], {"period": 0}, ValueError, "`period`, unless it is a schedule"),
        (lambda: [parameter()], {"buffers": "average"}, ValueError, "needs the model"),
    ],
)
def test_what_a_synchronizer_refuses(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"algorithm": hvdp.Averaging(), "period": 2, "process_set": LocalCommunicator()} | options
    with pytest.raises(error, match=message):
        hvdp.Synchronizer(model(), **arguments)


def test_a_synchronizer_counts_gradients_and_misses_them() -> None:
    w = tf.Variable([0.0])
    synchronizer = hvdp.Synchronizer(
        [w], hvdp.AGN(), 2, outer_optimizer=keras.optimizers.SGD(1.0), process_set=LocalCommunicator()
    )
    with pytest.raises(RuntimeError, match=r"call prepare_gradients\(\) before each local update"):
        synchronizer.step()
    with pytest.raises(ValueError, match=r"1 parameters take as many gradients. Received: 2"):
        synchronizer.prepare_gradients([tf.ones(1), tf.ones(1)])
    for _ in range(2):
        synchronizer.prepare_gradients([tf.constant([-3.0])])
        synchronizer.step()
    assert w.numpy().tolist() == [3.0]


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ImportError, match="set the environment variable KERAS_BACKEND=tensorflow") as caught:
        runpy.run_path(hvdp.__file__)
    assert "Received: KERAS_BACKEND=torch" in str(caught.value)
