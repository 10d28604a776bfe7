"""What is set on a wrapper, and what cannot be copied for the center. One process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.covering import covering

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer  # noqa: E402

pytestmark = pytest.mark.timeout(90)

WRAPPERS: dict[str, Any] = {
    "easgd": lambda o, p=4: hvdp.ElasticAverageOptimizer(o, None, p, moving_rate=0.4, process_set=LocalCommunicator()),
    "average": lambda o, p=4: hvdp.ModelAverageOptimizer(o, None, p, process_set=LocalCommunicator()),
    "agn": lambda o, p=4: hvdp.AGNOptimizer(o, None, p, process_set=LocalCommunicator()),
    "scaled": lambda o, p=4: WRAPPERS["average"](keras.optimizers.LossScaleOptimizer(o, initial_scale=4.0), p),
    "twice": lambda o, p=4: WRAPPERS["average"](WRAPPERS["average"](o, p), p),
}

SETTINGS: dict[str, Any] = {
    "weight_decay": 0.1,
    "clipnorm": 0.5,
    "clipvalue": 0.5,
    "global_clipnorm": 0.5,
    "gradient_accumulation_steps": 2,
}


def descend(optimizer: Any, variable: Any, steps: int = 3) -> Any:
    optimizer.build([variable])
    scale = float(optimizer.scale_loss(1.0))
    for step in range(steps):
        optimizer.apply([(tf.convert_to_tensor(variable) * 3.0 + float(step)) * scale])
    return variable.numpy()


def parameter(name: str = "w") -> Any:
    return keras.Variable(np.array([1.0, -2.0]), dtype="float32", name=name)


@pytest.mark.parametrize(("name", "setting"), covering(WRAPPERS, SETTINGS, together=1))
def test_settings_act_on_the_optimizer_inside(name: str, setting: str) -> None:
    """The trajectory of the plain optimizer that was constructed with it, and not that without."""
    expected, without = (
        descend(keras.optimizers.SGD(0.1, **o), parameter()) for o in ({setting: SETTINGS[setting]}, {})
    )
    inner = keras.optimizers.SGD(0.1)
    optimizer = WRAPPERS[name](inner)
    setattr(optimizer, setting, SETTINGS[setting])
    assert getattr(optimizer, setting) == getattr(inner, setting) == SETTINGS[setting]
    found = descend(optimizer, parameter())
    assert found == pytest.approx(expected)
    assert found != pytest.approx(without)


def test_moving_averages_set_on_the_wrapper() -> None:
    optimizer = WRAPPERS["average"](keras.optimizers.SGD(1.0))
    optimizer.use_ema, optimizer.ema_momentum = True, 0.5
    variable = parameter()
    optimizer.build([variable])
    for _ in range(2):
        optimizer.apply([tf.ones(2)])
    optimizer.finalize_variable_values([variable])
    assert variable.numpy() == pytest.approx([-0.5, -3.5])  # the mean of 0 and −1, of −3 and −4


@pytest.mark.parametrize("setting", ["weight_decay", "clipnorm", "clipvalue", "global_clipnorm"])
def test_the_copy_for_the_center_follows(setting: str) -> None:
    """One exchange per step: the center is that of a local optimizer constructed with the setting."""
    centers = []
    for constructed in (True, False):
        options = {setting: SETTINGS[setting]}
        optimizer = WRAPPERS["agn"](keras.optimizers.SGD(0.1, **(options if constructed else {})), 1)
        variable = parameter()
        optimizer.build([variable])
        if not constructed:
            setattr(optimizer, setting, SETTINGS[setting])
        centers.append(descend(optimizer, variable))
    assert centers[1] == pytest.approx(centers[0])


@pytest.mark.parametrize("name", WRAPPERS)
def test_variables_spared_weight_decay(name: str) -> None:
    optimizer = WRAPPERS[name](keras.optimizers.SGD(0.1, weight_decay=0.5), 1 if name == "agn" else 4)
    kernel, bias, norm = (parameter(part) for part in ("kernel", "bias", "norm"))
    optimizer.build([kernel, bias, norm])
    optimizer.exclude_from_weight_decay(var_list=[norm], var_names=["bias"])
    optimizer.apply([tf.zeros(2)] * 3)
    assert kernel.numpy() == pytest.approx([0.95, -1.9])
    for spared in (bias, norm):
        assert spared.numpy() == pytest.approx([1.0, -2.0])


def test_weights_are_set_on_all_variables() -> None:
    optimizers = [WRAPPERS["agn"](keras.optimizers.SGD(0.1, momentum=0.5), 2) for _ in range(2)]
    with pytest.raises(ValueError, match="not built"):
        optimizers[1].set_weights([])
    variables = [parameter() for _ in optimizers]
    descend(optimizers[0], variables[0])
    optimizers[1].build([variables[1]])
    optimizers[1].set_weights([variable.numpy() for variable in optimizers[0].variables])
    variables[1].assign(variables[0])
    found = [descend(optimizer, variable, 4) for optimizer, variable in zip(optimizers, variables, strict=True)]
    assert found[1].tolist() == found[0].tolist()
    assert optimizers[1].synchronizer.rounds == 3
    with pytest.raises(ValueError, match="of the shapes"):
        optimizers[1].set_weights([])


def test_a_cut_center_refuses_to_clip_norms() -> None:
    center = CenterOptimizer(keras.optimizers.SGD(0.1))
    center.cut = True
    with pytest.raises(ValueError, match="use center='root'"):
        center.follow("clipnorm", 1.0)
    center.follow("clipvalue", 1.0)
    assert center.optimizer.clipvalue == 1.0


class WithModel(keras.optimizers.SGD):
    """An optimizer whose configuration does not hold all arguments of its constructor."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(**options)
        self.trained = model


def several() -> Any:
    parts = {"kernel": keras.optimizers.SGD(0.1), "bias": keras.optimizers.Adam(0.1)}
    return keras.optimizers.MultiOptimizer(lambda variable: parts[variable.name])


@pytest.mark.parametrize("make", [lambda: WithModel(None, learning_rate=0.1), several], ids=["arguments", "several"])
def test_optimizers_that_cannot_be_copied(make: Any) -> None:
    """AGN says so, and takes another for the center; elastic averaging needs no copy."""
    with pytest.raises(TypeError, match=r"cannot be copied .* pass `outer_optimizer`"):
        WRAPPERS["agn"](make())
    others = [
        hvdp.AGNOptimizer(make(), None, 2, keras.optimizers.SGD(0.1), process_set=LocalCommunicator()),
        WRAPPERS["easgd"](make(), 2),
    ]
    for optimizer in others:
        variables = [parameter("kernel"), parameter("bias")]
        optimizer.build(variables)
        for _ in range(2):
            optimizer.apply([tf.ones(2)] * 2)
        assert optimizer.synchronizer.rounds == 1
        assert all((variable.numpy() < [1.0, -2.0]).all() for variable in variables)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Lamb"])
def test_optimizers_that_look_at_names_and_shapes_move_the_center(name: str) -> None:
    """One worker that exchanges at every step: the center is what the plain optimizer makes of the same gradients."""
    kind, found = getattr(keras.optimizers, name), []
    for wrap in (lambda o: o, lambda o: WRAPPERS["agn"](o, 1)):
        with keras.name_scope("embedding"):
            embedding = keras.Variable(np.ones((3, 2)), dtype="float32", name="embeddings")
        kernel = keras.Variable(np.eye(3), dtype="float32", name="kernel")
        optimizer = wrap(kind(0.1))
        optimizer.build([embedding, kernel])
        for step in range(3):
            optimizer.apply([tf.fill([3, 2], 1.0 + step), tf.eye(3) * 0.5 + step])
        found.append(np.concatenate([embedding.numpy().ravel(), kernel.numpy().ravel()]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_an_optimizer_that_copies_the_variables_does_not_move_the_center() -> None:
    optimizer = WRAPPERS["agn"](keras.optimizers.ScheduleFreeAdamW(0.1))
    with pytest.raises(ValueError, match="keeps a copy of the variables in its state"):
        optimizer.build([parameter()])


def test_settings_of_several_optimizers_inside() -> None:
    with pytest.raises(ValueError, match="optimizers that the MultiOptimizer inside consists of"):
        WRAPPERS["average"](several()).clipnorm = 1.0


def test_asynchronous_exchange_refuses_constraints() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_constraint="non_neg")])
    with pytest.raises(ValueError, match="has a constraint, which a center of asynchronous exchange"):
        hvdp.ElasticAverageOptimizer(
            keras.optimizers.SGD(0.1), model, 2, asynchronous=True, process_set=LocalCommunicator()
        )
