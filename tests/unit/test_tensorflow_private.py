"""What the package asks of names of TensorFlow and Keras that are not public. Fails where an upgrade changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hvd_periodic.keras import private as of_keras  # noqa: E402
from hvd_periodic.tensorflow import private  # noqa: E402

pytestmark = pytest.mark.timeout(90)


def test_a_variable_is_made_where_a_function_is_compiled_again() -> None:
    made: list[Any] = []

    @tf.function
    def double(x: Any) -> Any:
        with tf.init_scope(), tf.variable_creator_scope(lambda _, **options: private.create_variable(**options)):
            made.append(tf.Variable(3.0, trainable=False))
        return 2.0 * x

    assert [double(tf.ones(size)).numpy().sum() for size in (1, 2)] == [2.0, 4.0]
    assert [float(variable) for variable in made] == [3.0] * len(made)
    assert len(made) > 1


@pytest.mark.parametrize("compiled", [False, True])
def test_xla_is_noticed_in_what_it_compiles(compiled: bool) -> None:
    found: list[bool] = []

    def inside() -> Any:
        found.append(private.compiles_with_xla())
        return tf.constant(1.0)

    tf.function(lambda: tf.cond(tf.constant(True), inside, lambda: tf.constant(0.0)), jit_compile=compiled)()
    assert found == [compiled]
    assert not private.compiles_with_xla()


def test_operations_run_at_once_inside_of_a_graph() -> None:
    with tf.Graph().as_default():
        with private.eager():
            assert float(tf.constant(2.0) + 1.0) == 3.0
        assert not tf.executing_eagerly()


def test_variables_of_an_optimizer_are_replaced(tmp_path: Path) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable([1.0, 2.0])])
    old, new = (optimizer.add_variable((size,), name="own") for size in (2, 3))
    private.list_variables(optimizer, [old, new], [new])
    assert [variable.name for variable in optimizer.variables] == ["iteration", "learning_rate", "own"]
    assert optimizer.variables[-1] is new
    later = optimizer.add_variable((4,), name="later")
    assert optimizer.variables[-1] is later
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
    shapes = [shape for name, shape in tf.train.list_variables(path) if name.startswith("optimizer/_variables/")]
    assert sorted(shapes) == [[3], [4]]


def test_a_part_is_in_checkpoints_and_not_in_files_of_keras(tmp_path: Path) -> None:
    owner, part = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)
    private.track(owner, part, "part")
    path = tf.train.Checkpoint(owner=owner).save(str(tmp_path / "saved"))
    assert any(name.startswith("owner/part/") for name, _ in tf.train.list_variables(path))
    assert not hasattr(owner, "part")


def test_layers_at_any_depth_and_what_they_make_as_not_trainable() -> None:
    normalization, dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)
    inner = keras.Sequential([keras.Input((2,)), normalization])
    model = keras.Sequential([keras.Input((2,)), inner, dense])
    dense.trainable = False
    layers = of_keras.all_layers(model)
    assert all(any(each is layer for each in layers) for layer in (model, inner, normalization, dense))
    names = [variable.name for layer in layers for variable in of_keras.made_untrainable(layer)]
    assert sorted(names) == ["moving_mean", "moving_variance"]


def test_weight_decay_spares_what_it_was_told_to() -> None:
    kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
    optimizer, other = (keras.optimizers.AdamW(0.1, weight_decay=0.1) for _ in range(2))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    private.exclude_same_names(other, optimizer)
    for each in (optimizer, other):
        assert [private.decays(each, variable) for variable in (kernel, bias)] == [True, False]


def test_an_optimizer_keeps_its_variables_in_the_order_of_those_that_it_is_built_on() -> None:
    variables = [keras.Variable(np.zeros(size, np.float32)) for size in (2, 3)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(variables)
    assert list(map(id, of_keras.built_on(optimizer))) == list(map(id, variables))
    assert [tuple(kept.shape) for kept in optimizer.momentums] == [(2,), (3,)]


def test_an_optimizer_is_built_again() -> None:
    stays, leaves, comes = (keras.Variable([1.0, 0.0], name=name) for name in ("stays", "leaves", "comes"))
    optimizer = keras.optimizers.Nadam(0.1, use_ema=True)
    optimizer.build([leaves, stays])
    optimizer.apply([tf.ones(2), tf.ones(2)], [leaves, stays])
    kept = {x.path: x.numpy().tolist() for x in optimizer.variables if "stays" in x.path}
    product = float(optimizer._u_product)
    private.build_again(optimizer, [stays, comes])
    fresh = keras.optimizers.Nadam(0.1, use_ema=True)
    fresh.build([stays, comes])
    assert [x.shape for x in optimizer.variables] == [x.shape for x in fresh.variables]
    assert [optimizer._get_variable_index(x) for x in (stays, comes)] == [0, 1]
    assert kept.items() <= {x.path: x.numpy().tolist() for x in optimizer.variables}.items()
    assert float(optimizer._u_product) == product
    averages = [x.numpy().tolist() for x in optimizer._model_variables_moving_average]
    assert averages[1] == comes.numpy().tolist()
    assert not np.any(optimizer._momentums[1].numpy())


def test_an_optimizer_knows_other_variables() -> None:
    optimizer, (old, new) = keras.optimizers.SGD(0.1), (keras.Variable([1.0]) for _ in range(2))
    optimizer.build([old])
    private.know(optimizer, [new, old])
    assert [optimizer._get_variable_index(x) for x in (old, new)] == [1, 0]
    assert list(of_keras.built_on(optimizer)) == [new, old]
    assert len(optimizer.variables) == 2
