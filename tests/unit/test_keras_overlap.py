"""Keras exchanges in flight, on one rank: files, loads, constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import LocalCommunicator
from hvd_periodic.tensorflow.coding import GraphCoding

pytestmark = pytest.mark.timeout(120)


def made(*values: float, outer: Any = None, constraint: Any = None) -> tuple[Any, Any]:
    """Return an optimizer of DiLoCo whose exchanges are in flight for three of four steps, and its variable."""
    x = keras.Variable(list(values), name="x")
    x.constraint = constraint
    outer = keras.optimizers.SGD(0.5) if outer is None else outer
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.25),
        None,
        hvdp.DiLoCo(),
        4,
        outer_optimizer=outer,
        overlap=3,
        process_set=LocalCommunicator(),
    )
    optimizer.build([x])
    return optimizer, x


def train(optimizer: Any, x: Any, steps: int) -> None:
    """Descend along a gradient of ones, by a compiled step."""
    step = tf.function(lambda: optimizer.apply([tf.ones_like(x.value)], [x]))
    for _ in range(steps):
        step()


def center_of(optimizer: Any, x: Any) -> list[float]:
    with optimizer.center():
        return list(x.numpy().tolist())


def test_a_load_forgets_what_is_in_flight() -> None:
    """It would move the center that is loaded."""
    optimizer, x = made(1.0, 2.0)
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    train(optimizer, x, 4)
    optimizer.load_own_variables(saved)
    assert optimizer.synchronizer.local_steps == 0
    assert optimizer.synchronizer.state_dict()["under_way"] is None
    assert optimizer.synchronizer.center_tensors()[0].numpy().tolist() == [1.0, 2.0]


def test_what_is_in_flight_is_in_the_file_unless_the_model_holds_the_center() -> None:
    optimizer, x = made(1.0, 2.0)
    train(optimizer, x, 4)
    replica, center, before = dict[str, Any](), dict[str, Any](), x.numpy().tolist()
    with optimizer.center():
        optimizer.save_own_variables(center)
    optimizer.save_own_variables(replica)
    in_flight = {name for name in replica if name.startswith("in_flight")}
    assert in_flight == {"in_flight", "in_flight.0"}
    assert replica["in_flight.0"].tolist() == before, "the replica that the message was formed from"
    assert center.keys() == replica.keys() - in_flight

    other, y = made(*before)
    other.load_own_variables(replica)
    train(optimizer, x, 3)
    train(other, y, 3)
    assert x.numpy().tolist() == y.numpy().tolist()
    assert center_of(other, y) == center_of(optimizer, x) == [0.5, 1.5]


def test_the_file_of_an_optimizer_that_has_not_started_keeps_what_was_in_flight() -> None:
    optimizer, x = made(1.0, 2.0)
    train(optimizer, x, 4)
    first, again = dict[str, Any](), dict[str, Any]()
    optimizer.save_own_variables(first)
    other, _ = made(*x.numpy().tolist())
    other.load_own_variables(first)
    other.save_own_variables(again)
    assert {name: np.asarray(value).tolist() for name, value in again.items()} == {
        name: np.asarray(value).tolist() for name, value in first.items()
    }


@pytest.mark.parametrize("look", [False, True])
def test_constraints_hold_once_the_exchange_has_landed(look: bool) -> None:
    """The outer optimizer takes a step that is twenty times as long as the local ones."""
    optimizer, x = made(2.0, 4.0, outer=keras.optimizers.SGD(20.0), constraint=keras.constraints.NonNeg())
    train(optimizer, x, 4)
    if look:
        assert center_of(optimizer, x) == [0.0, 0.0]
    train(optimizer, x, 3)
    assert center_of(optimizer, x) == [0.0, 0.0]
    assert x.numpy().min() >= 0


def test_a_quotient_is_zero_where_the_divisor_is() -> None:
    """As in numpy and PyTorch."""
    x, y = tf.constant([[5.0, -3.0], [5.0, -3.0], [0.0, 0.0]]), tf.constant([[0.0], [2.0], [0.0]])
    assert GraphCoding().quotient(x, y).numpy().tolist() == [[0.0, 0.0], [2.0, -2.0], [0.0, 0.0]]
