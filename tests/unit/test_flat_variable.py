"""Centers of TensorFlow change in place: to the bit as by two operations, in the order in which they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import EASGD, Averaging, LocalCommunicator
from hvd_periodic.algorithms import Exchange
from hvd_periodic.tensorflow.flat_variable import FlatVariable
from hvd_periodic.tensorflow.space import TensorSpace
from hvd_periodic.tensorflow.store import CenterStore, VariableStore, layout_of
from tests.helpers import readable

SPACE = TensorSpace()


def compiled(function: Any) -> Any:
    """Return a function of TensorFlow."""
    return tf.function(function, autograph=False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("run", [compiled, lambda function: function], ids=["compiled", "eager"])
@pytest.mark.parametrize("rate", [1 / 3, 0.9, -0.1])
def test_it_is_rounded_as_in_two_operations(dtype: str, run: Any, rate: float) -> None:
    generator = np.random.default_rng(0)
    center, total = generator.standard_normal((2, 37, 5)).astype(dtype)
    variable = tf.Variable(center)
    returned = run(lambda: tf.identity(SPACE.axpy(rate, tf.constant(total.ravel()), FlatVariable(variable))))()
    expected = center + center.dtype.type(rate) * total
    np.testing.assert_array_equal(variable.numpy(), expected)
    np.testing.assert_array_equal(returned.numpy(), expected.ravel())


def test_what_was_read_before_stays_what_it_was() -> None:
    """In a compiled function too, where another replica may still be pulled to the center of before."""
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @compiled
    def exchange(total: Any) -> tuple[Any, ...]:
        flat = FlatVariable(variable)
        before = flat.value()
        SPACE.axpy(0.5, total, flat)
        between = SPACE.sub(flat, before)
        SPACE.axpy(1.0, total, flat)
        return (
            before,
            between,
            flat.value(),
            flat[1:3],
            2.0 * flat,
            flat - flat,
            1.0 - flat,
            -flat / 2.0,
            tf.maximum(flat, 4.5),
        )

    total = tf.constant([2.0, 4.0, 6.0, 8.0])
    before, between, after, part, *computed = (value.numpy().tolist() for value in exchange(total))
    assert before == [1, 2, 3, 4]
    assert between == [1, 2, 3, 4]
    assert after == [4, 8, 12, 16] == variable.numpy().ravel().tolist()
    assert part == [8, 12]
    assert computed == [[8, 16, 24, 32], [0] * 4, [-3, -7, -11, -15], [-2, -4, -6, -8], [4.5, 8, 12, 16]]


def test_a_center_shows_whole_variables_only() -> None:
    """A bucket of 16 bytes holds a variable; half of one; the rest, and a small one."""
    named = [("whole", tf.Variable(tf.zeros([2, 2]))), ("cut", tf.Variable(tf.zeros([6]))), ("b", tf.Variable(0.0))]
    layout = layout_of(named, bucket_bytes=16)
    center = CenterStore(layout, [variable for _, variable in named])
    views = [center.view(bucket) for bucket in layout.buckets]
    assert [view is not None for view in views] == [True, False, False]
    views[0].add(tf.constant(2.0), tf.constant([1.0, 2.0, 3.0, 4.0]))
    assert named[0][1].numpy().tolist() == [[2, 4], [6, 8]]
    assert all(VariableStore.view(center, bucket) is None for bucket in layout.buckets)


class WithoutVerbs(EASGD):
    """Elastic averaging by operators of tensors, as somebody may write it."""

    def move(self, space: Any, center: Any, total: Any, exchange: Exchange) -> Any:
        return {"center": 1.0 * center["center"] + self.rate(exchange) * total}


@pytest.mark.parametrize("run", [compiled, lambda function: function], ids=["compiled", "eager"])
def test_who_writes_an_algorithm_needs_no_verbs(run: Any) -> None:
    found = []
    for algorithm in (EASGD(0.3), WithoutVerbs(0.3)):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
        optimizer = hvdp.PeriodicOptimizer(
            keras.optimizers.SGD(0.1), model, algorithm, 2, process_set=LocalCommunicator()
        )
        optimizer.build(model.trainable_variables)
        step = run(lambda: optimizer.apply([tf.ones([3, 2]), tf.ones([2])]))  # noqa: B023
        for _ in range(5):
            step()
        with optimizer.center():
            center = [weight.numpy() for weight in model.trainable_variables]
        found.append([*center, *(weight.numpy() for weight in model.trainable_variables)])
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)
    assert np.abs(found[0][0] - 1).min() > 0.05, "the center has moved"


def test_operators_of_numpy_and_comparisons_are_those_of_tensors() -> None:
    flat = FlatVariable(tf.Variable([[1.0, 2.0]]))

    @compiled
    def computed() -> Any:
        return np.float32(0.5) * flat, tf.where(flat == 1.0, flat, 0.0), flat != 1.0

    product, chosen, other = (value.numpy().tolist() for value in computed())
    assert (product, chosen, other) == ([0.5, 1], [1, 0], [False, True])
    with pytest.raises(ValueError, match="float64"):
        tf.convert_to_tensor(flat, tf.float64)


def test_it_is_an_array_where_one_is_wanted() -> None:
    flat = FlatVariable(tf.Variable([[1.0, 2.0]]))
    assert np.asarray(flat).tolist() == [1, 2]
    assert flat.shape == (2,)


@pytest.mark.parametrize("algorithm", [EASGD(0.3), Averaging()], ids=readable)
def test_algorithms_move_it(algorithm: Any) -> None:
    """As they move a vector of numpy."""
    center, total = np.float32([1, -2, 3]), np.float32([0.1, 0.2, -0.3])
    exchange = Exchange(size=3, period=4)
    variable = tf.Variable(center)
    flat = FlatVariable(variable)
    moved = compiled(lambda: algorithm.move(SPACE, {"center": flat}, tf.constant(total), exchange))()
    rate = np.float32(0.3 if isinstance(algorithm, EASGD) else 1 / 3)
    np.testing.assert_array_equal(variable.numpy(), center + rate * total)
    assert moved["center"] is not None
