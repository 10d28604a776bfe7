"""Centers of TensorFlow change in place: to the bit as by two operations, in the order in which they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from hvd_periodic import EASGD, Averaging
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
    def exchange(total: Any) -> Any:
        flat = FlatVariable(variable)
        before = flat.value()
        SPACE.axpy(0.5, total, flat)
        between = SPACE.sub(flat, before)
        SPACE.axpy(1.0, total, flat)
        return before, between, flat.value(), flat[1:3], flat * 2.0, flat + 1.0, tf.maximum(flat, 4.5)

    total = tf.constant([2.0, 4.0, 6.0, 8.0])
    before, between, after, part, product, added, largest = (value.numpy().tolist() for value in exchange(total))
    assert before == [1, 2, 3, 4]
    assert between == [1, 2, 3, 4]
    assert after == [4, 8, 12, 16] == variable.numpy().ravel().tolist()
    assert part == [8, 12]
    assert product == [8, 16, 24, 32]
    assert added == [5, 9, 13, 17]
    assert largest == [4.5, 8, 12, 16]


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
