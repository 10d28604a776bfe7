"""Python code for which a compiled function waits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.algorithms import Exchange  # noqa: E402
from hvd_periodic.tensorflow.host_values import HostValues, as_array, as_tensor, empty  # noqa: E402
from hvd_periodic.tensorflow.hosted import hosted, keeping_errors, original_errors  # noqa: E402
from hvd_periodic.tensorflow.space import HostSpace  # noqa: E402
from hvd_periodic.tensorflow.store import ArrayStore, layout_of  # noqa: E402
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES  # noqa: E402
from tests.conftest import PATIENCE  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402


def store_of(values: HostValues, *variables: Any) -> ArrayStore:
    layout = layout_of([(str(i), variable) for i, variable in enumerate(variables)], DEFAULT_BUCKET_BYTES)
    return ArrayStore(layout, variables, values)


def test_a_compiled_function_waits_for_python_and_python_for_it() -> None:
    values, x, c, seen = HostValues(), tf.Variable([0, 0]), tf.Variable(0), []

    def run() -> None:
        seen.append((values.read(x).tolist(), int(c)))
        values.write(x, values.read(x) + 10)
        c.assign_add(100)
        assert values.read(x).tolist() == [seen[-1][0][0] + 10] * 2

    @tf.function
    def steps() -> Any:
        for _ in range(2):
            x.assign_add([1, 1])
            c.assign_add(1)
            hosted(run, values, [store_of(values, x)], [c])()
        return x.read_value()

    assert steps().numpy().tolist() == [22, 22]
    assert seen == [([1, 1], 1), ([12, 12], 102)]
    assert int(c) == 202
    assert not values.holds(x)


def test_python_is_in_order_in_a_loop_of_a_graph() -> None:
    """Where it does not run every time; what the loop reads after it is what it has assigned."""
    values, x, y = HostValues(), tf.Variable(0.0), tf.Variable(1.0)
    wait = hosted(lambda: values.write(x, values.read(x) * 10), values, [store_of(values, x, y)])

    @tf.function
    def steps(count: Any) -> Any:
        for i in tf.range(count):
            x.assign_add(y)
            wait(i % 2 == 1)
            y.assign(x + 1)

    steps(4)
    assert (float(x), float(y)) == (1230.0, 1231.0)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "bool", "uint8", "float64"])
def test_small_variables_are_read_and_assigned_together(kind: str) -> None:
    """In the dtype of their center, and rounded as TensorFlow rounds."""
    values, variables = HostValues(), [tf.Variable(tf.cast([[0, 1, 1]] * i, kind)) for i in (1, 2, 3)]
    store = store_of(values, *variables)
    (bucket,) = store.layout.buckets

    def run() -> None:
        assert store.read(bucket).tolist() == [0, 1, 1] * 6
        store.write(bucket, (store.read(bucket) * 1.7).astype(bucket.kind))

    tf.function(hosted(run, values, [store]))()
    expected = tf.cast(np.array([0, 1.7, 1.7]).astype(bucket.kind), kind).numpy()
    assert all((variable.numpy() == expected).all() for variable in variables)


def distinct(array: Any) -> set[Any]:
    return set(np.unique(array).tolist())


@pytest.mark.parametrize("size", [3, 100_000, 6_000_000], ids=["a block", "of several blocks", "of several buckets"])
def test_buckets_and_variables_are_read_and_written(size: int) -> None:
    values = HostValues()
    variables = [tf.Variable(np.full(size, i, np.float32)) for i in range(3)] + [tf.Variable(7, dtype=tf.int64)]
    store = store_of(values, *variables)

    def run() -> None:
        for bucket in store.layout.buckets:
            if bucket.kind == "float32":
                store.write(bucket, store.read(bucket) + 1)
        values.write(variables[0], values.read(variables[2]) * 10)
        assert [distinct(values.read(variable)) for variable in variables] == [{30}, {2}, {3}, {7}]
        bucket = store.layout.buckets[0]
        middle = bucket.part(1, 3)
        store.write(middle, np.full(2, 50, np.float32))
        assert store.read(bucket)[:4].tolist() == [30, 50, 50, store.read(bucket)[3]]

    tf.function(hosted(run, values, [store]))()
    found = [variable.numpy() for variable in variables]
    assert found[0][:3].tolist() == [30, 50, 50]
    assert (distinct(found[0][3:]) | {30}, distinct(found[1]), distinct(found[2])) == ({30}, {2}, {3})
    assert found[3] == 7


def test_what_python_does_not_change_stays() -> None:
    values, x, y = HostValues(), tf.Variable([1.0]), tf.Variable([2.0])
    stores = [store_of(values, x), store_of(values, y)]
    tf.function(hosted(lambda: values.write(y, values.read(x)), values, stores))()
    assert (float(x[0]), float(y[0])) == (1.0, 1.0)


def test_code_that_knows_the_variables_alone() -> None:
    """It sees what was written before, and what it assigns is read and written after it."""
    values, x, y, seen = HostValues(), tf.Variable([1.0]), tf.Variable([2.0]), []

    def run() -> None:
        values.write(x, values.read(y))
        values.release()
        seen.append((float(x[0]), float(y[0])))
        x.assign([5.0])
        values.write(y, values.read(x) + 1)

    tf.function(hosted(run, values, [store_of(values, x), store_of(values, y)]))()
    assert seen == [(2.0, 2.0)]
    assert (float(x[0]), float(y[0])) == (5.0, 6.0)


def test_arrays_that_are_lent() -> None:
    """They stand for variables that have their values; what is written then reaches the variables."""
    values, x = HostValues(), tf.Variable([1.0, 2.0])
    store = store_of(values, x)
    (bucket,) = store.layout.buckets

    def run() -> None:
        values.lend(store, bucket, np.array([3.0, 4.0], np.float32))
        assert store.read(bucket).tolist() == [3.0, 4.0]
        if float(x[0]) == 3.0:
            store.write(bucket, np.array([5.0, 6.0], np.float32))

    step = tf.function(hosted(run, values, [store]))
    step()
    assert x.numpy().tolist() == [1.0, 2.0]
    x.assign([3.0, 4.0])
    step()
    assert x.numpy().tolist() == [5.0, 6.0]


def test_two_variables_may_get_the_same_array() -> None:
    values, x, c = HostValues(), tf.Variable(tf.zeros(1000)), tf.Variable(tf.zeros(1000))

    def run() -> None:
        both = empty(1000, np.float32)
        both[:] = 1
        values.write(x, both)
        for store in stores:
            store.write(store.layout.buckets[0], both)

    stores = [store_of(values, x), store_of(values, c)]

    @tf.function
    def step() -> None:
        hosted(run, values, stores)()
        x.assign_add(tf.ones(1000))

    step()
    assert (float(x[0]), float(c[0])) == (2.0, 1.0)


def test_an_error_of_python_is_cited() -> None:
    def run() -> None:
        raise LookupError("There is none")

    with pytest.raises(tf.errors.OpError, match="LookupError: There is none"):
        tf.function(hosted(run, HostValues(), []))()


def test_an_array_of_a_variable_must_not_be_changed() -> None:
    values, x = HostValues(), tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        values.read(x)[0] = 3.0

    def run() -> None:
        values.read(x)[0] = 3.0

    with pytest.raises(tf.errors.OpError, match="read-only"):
        tf.function(hosted(run, values, [store_of(values, x)]))()


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
def test_a_tensor_of_an_array(shift: int) -> None:
    array = empty(1000, np.float32)[shift:]
    array[:] = np.arange(array.size)
    tensor = as_tensor(array)
    assert np.array_equal(tensor, array)
    array[0] = 7
    assert float(tensor[0]) == (0 if shift else 7)
    array.flags.writeable = False
    assert np.array_equal(as_tensor(array), array)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float32", "complex64"])
def test_an_array_that_cannot_be_shared_is_copied_once(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into aligned memory: TensorFlow would copy a constant in other memory a second time."""
    array = np.ones((50, 20), dtype)
    array.flags.writeable = False
    monkeypatch.setattr(tf, "constant", None)
    tensor = as_tensor(array)
    assert (tensor.dtype.name, tensor.shape.as_list()) == (dtype, [50, 20])
    assert np.array_equal(tensor, array)
    assert not np.shares_memory(np.asarray(tensor), array)
    assert np.asarray(tensor).ctypes.data % 64 == 0


def test_an_array_of_a_tensor() -> None:
    array = as_array(tf.range(5) + 1)
    array[0] = 7
    assert (array.tolist(), as_tensor(array).numpy().tolist()) == ([7, 2, 3, 4, 5], [7, 2, 3, 4, 5])
    assert as_array(tf.zeros([0])).size == 0


TWO_DEVICES = """
import tensorflow as tf
from hvd_periodic.tensorflow.host_values import HostValues
from hvd_periodic.tensorflow.hosted import hosted

(processor,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
values, variables, seen = HostValues(), [], []
for device in ("CPU:0", "CPU:1"):
    with tf.device(device):
        variables.append(tf.Variable(0))

def run():
    seen.append([int(variable) for variable in variables])
    for variable in variables:
        variable.assign_add(10)

@tf.function
def steps(due):
    for _ in range(2):
        for variable in variables:
            variable.assign_add(1)
        tf.cond(due, hosted(run, values, [], variables), lambda: tf.constant(False))
    return [variable.read_value() for variable in variables]

print([int(value) for value in steps(tf.constant(True))], seen)
"""


def test_variables_may_be_on_another_device() -> None:
    found = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], capture_output=True, text=True, check=False, timeout=PATIENCE * 60
    )
    assert found.stdout.splitlines()[-1:] == ["[22, 22] [[1, 1], [12, 12]]"], found.stderr


ONE_THREAD = """
import numpy as np
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
from tests.unit.test_hosted import HostValues, hosted, store_of

values, variables = HostValues(), [tf.Variable([float(i)]) for i in range(3)]
store = store_of(values, *variables)
(bucket,) = store.layout.buckets
tf.function(hosted(lambda: store.write(bucket, store.read(bucket) + np.float32(1)), values, [store]))()
print([float(variable[0]) for variable in variables])
"""


def test_small_variables_need_no_other_thread() -> None:
    """Python has the only thread of TensorFlow, which waits for it."""
    found = subprocess.run(
        [sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, check=False, timeout=PATIENCE * 60
    )
    assert found.stdout.splitlines()[-1:] == ["[1.0, 2.0, 3.0]"], found.stderr


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


def trained(algorithm: Any, rate: Any, compiled: bool) -> tuple[list[Any], Any]:
    """Return the weights after every step, and the optimizer."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    made = hvdp.PeriodicOptimizer(inner, model, algorithm, 2, process_set=LocalCommunicator(), buffers="average")

    def descend(gradient: tf.Tensor) -> None:
        made.apply([tf.fill(variable.shape, gradient) for variable in model.trainable_variables])
        model.layers[-1].moving_mean.assign_add([gradient] * 3)

    step = tf.function(descend) if compiled else descend
    weights = []
    for number in range(6):
        if number == 3 and isinstance(rate, float):
            made.learning_rate = rate / 2
        step(tf.constant(1.0 + number))
        weights.append([np.array(weight) for weight in model.weights])
    return weights, made


TRAINED = {
    "elastic": (lambda: hvdp.EASGD(0.3), 0.1),
    "AGN": (hvdp.AGN, 0.1),
    "AGN scheduled": (hvdp.AGN, SCHEDULE),
    "SlowMo": (lambda: hvdp.SlowMo(0.5), 0.1),
    "DiLoCo": (hvdp.DiLoCo, 0.1),
}
"""Algorithms and rates."""


@pytest.mark.parametrize(
    ("name", "number_of_threads"),
    [
        *(("elastic", ["of this process"]), ("AGN", ["of this process", "one"])),
        *(("AGN scheduled", ["one"]), ("DiLoCo", ["of this process"])),
        *(thorough(name, [threads]) for name, threads in [("elastic", "one"), ("DiLoCo", "one")]),
        thorough("SlowMo", ["of this process", "one"]),
        thorough("AGN scheduled", ["of this process"]),
    ],
    ids=str,
)
def test_compiled_steps_go_where_eager_ones_go(
    name: str, number_of_threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whether the optimizer of the center is compiled or not; a rate that changes is none compiled in."""
    algorithm, rate = TRAINED[name]
    eager, _ = trained(algorithm(), rate, compiled=False)
    for threads in number_of_threads:
        if threads == "one":  # so that the optimizer of the center runs single operations
            monkeypatch.setattr("hvd_periodic.tensorflow.outer.several_threads", lambda: False)
        compiled, made = trained(algorithm(), rate, compiled=True)
        for ours, theirs in zip(compiled, eager, strict=True):
            assert all(map(np.array_equal, ours, theirs))
        assert made.synchronizer.counters.rounds == 3


def test_the_optimizer_of_the_center_is_compiled_again_only_if_its_settings_change() -> None:
    _, made = trained(hvdp.AGN(), 0.1, compiled=True)
    first = made._center.constants()
    made.apply([tf.ones(variable.shape) for variable in made._trainable_variables])
    assert made._center.constants() == first
    made._center.optimizer.momentum = 0.5
    assert made._center.constants() != first


def test_the_message_of_agn_is_formed_in_its_buffer() -> None:
    gradient, out = np.array([2.0, 4.0], np.float32), empty(2, np.float32)
    space, exchange = HostSpace(HostValues()), Exchange(size=1, period=2, gradients=2)
    message, _ = hvdp.AGN().message(space, gradient, {"gradient": gradient}, gradient, exchange, out=out)
    assert message is out
    assert out.tolist() == [1.0, 2.0]
    out.flags.writeable = False
    message, _ = hvdp.AGN().message(space, gradient, {"gradient": gradient}, gradient, exchange, out=out)
    assert message is not out
    assert message.tolist() == [1.0, 2.0]


def test_large_gradients_are_passed_one_by_one_to_the_optimizer_of_the_center() -> None:
    """In one vector, they would have to be split, which copies them."""
    made = hvdp.AGNOptimizer(keras.optimizers.SGD(0.1), None, 2, process_set=LocalCommunicator())
    made.build([tf.Variable(tf.zeros(200_000), name=f"p{i}") for i in range(2)])
    tf.function(made.synchronizer.sync, autograph=False)()
    _, compiled = made.synchronizer.exchanged.center_optimizer._compiled
    assert [len(tensor.shape) for tensor in compiled.inputs[:2]] == [1, 1]
    assert not [each for each in compiled.graph.get_operations() if each.type.startswith("Split")]


class WithoutTextError(Exception):
    """Says everything by its type."""


@pytest.mark.parametrize("original", [WithoutTextError(), RuntimeError("two\nlines"), ValueError("of a value")])
def test_errors_keep_their_type(original: Exception) -> None:
    """Also where TensorFlow has an error of its own for the type."""

    def run() -> None:
        raise original

    @tf.function
    def step(values: Any) -> Any:
        return tf.cond(tf.reduce_all(values > 0), hosted(keeping_errors(run), HostValues(), []), lambda: False)

    with pytest.raises(type(original)) as raised, original_errors():
        step(tf.ones(2))
    assert raised.value is original
    assert isinstance(raised.value.__cause__, tf.errors.OpError)
    with pytest.raises(tf.errors.OpError):
        step(tf.ones(2))


def test_other_errors_stay_as_they_are() -> None:
    """Also after an error that the code in the block has handled."""

    def run() -> None:
        raise WithoutTextError

    step = tf.function(lambda: hosted(keeping_errors(run), HostValues(), [])())
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"), original_errors():
        with pytest.raises(tf.errors.OpError):
            step()
        tf.raw_ops.AddV2(x=tf.ones(2), y=tf.ones(3))
    with pytest.raises(KeyError), original_errors():
        raise KeyError


def test_another_error_of_the_same_type_stays_as_it_is() -> None:
    """Such as one of the data, after one of an exchange that the code in the block has handled."""

    def run() -> None:
        raise ValueError("exchange")

    def read() -> None:
        raise ValueError("bad record 7")

    step = tf.function(lambda: hosted(keeping_errors(run), HostValues(), [])())
    with pytest.raises(tf.errors.OpError, match="bad record 7"), original_errors():
        with pytest.raises(tf.errors.OpError):
            step()
        tf.py_function(read, [], [])
