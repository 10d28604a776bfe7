"""Keras variables as host arrays, and the callback that exchanges them: one process, on the backend that Keras has."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

import hvd_periodic.keras as hvdp  # noqa: E402
from hvd_periodic import AGN, LocalCommunicator  # noqa: E402
from hvd_periodic.keras.store import HostStore, Variables  # noqa: E402
from hvd_periodic.vectors.layout import Layout, TensorSpec  # noqa: E402

pytestmark = pytest.mark.timeout(90)


def network(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, **options)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return model


def exchange(model: Any, algorithm: Any, **options: Any) -> Any:
    return hvdp.PeriodicExchange(model, algorithm, 2, process_set=LocalCommunicator(), **options)


def fit(model: Any, *callbacks: Any) -> None:
    model.fit(np.ones((4, 2)), -np.ones((4, 1)), batch_size=1, verbose=0, callbacks=list(callbacks))


class Loads(keras.callbacks.Callback):
    """Loads weights when ``fit`` begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.set_weights([np.full((2, 1), 5.0, np.float32), np.full(1, 5.0, np.float32)])


class Looks(keras.callbacks.Callback):
    """Notes the distance to the center before the first batch."""

    def __init__(self, watched: Any) -> None:
        super().__init__()
        self.watched, self.seen = watched, list[float]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.seen.append(self.watched.synchronizer.distance())


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_another_callback_loads_are_where_training_starts(last: bool) -> None:
    model = network()
    callback = exchange(model, hvdp.EASGD(beta=0.5))
    looks = Looks(callback)
    fit(model, *([callback, Loads(), looks] if last else [Loads(), callback, looks]))
    assert looks.seen == [0.0]


def test_a_new_callback_warns_of_steps_that_a_former_one_has_not_exchanged(caplog: pytest.LogCaptureFixture) -> None:
    def stop(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    model = network()
    former = exchange(model, hvdp.Averaging())
    with pytest.raises(KeyboardInterrupt):
        fit(model, former, keras.callbacks.LambdaCallback(on_train_batch_end=stop))
    with caplog.at_level(logging.WARNING):
        fit(model, exchange(model, hvdp.Averaging()))
    assert "takes over parameters of one that has taken 1 local steps" in caplog.text


def test_variables_that_are_thawed_after_construction() -> None:
    model = network()
    callback = exchange(model, hvdp.DiLoCo())
    fit(model, callback)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(ValueError, match="exchanges the variables that are trainable when it is constructed"):
        fit(model, callback)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_variables_that_span_buckets(dtype: str) -> None:
    """Each bucket holds five elements; variables keep their shape and dtype."""
    shapes = [(2, 2), (3, 3), (), (7,)]
    variables = [keras.Variable(np.full(shape, -1.0), dtype=dtype) for shape in shapes]
    layout = Layout([TensorSpec(f"v{i}", shape, "float32", 4) for i, shape in enumerate(shapes)], bucket_bytes=20)
    store = HostStore(layout, variables, Variables(network()))
    values = np.arange(21, dtype=np.float32)
    for bucket in layout.buckets:
        store.write(bucket, values[bucket.start : bucket.stop])
    assert [float(value) for array in store.tensors() for value in array.reshape(-1)] == values.tolist()
    assert [float(value) for bucket in layout.buckets for value in store.read(bucket)] == values.tolist()
    assert [(tuple(v.shape), v.dtype) for v in variables] == [(shape, dtype) for shape in shapes]


def test_constraints_hold_for_replica_and_center() -> None:
    model = network(kernel_constraint="non_neg", bias_constraint="non_neg")
    model.set_weights([np.full((2, 1), 0.5, np.float32), np.full(1, 0.5, np.float32)])
    callback = exchange(model, hvdp.DiLoCo(outer_learning_rate=3.0))
    fit(model, callback)
    assert all((weight >= 0).all() for weight in model.get_weights())
    with callback.center():
        assert all((weight >= 0).all() for weight in model.get_weights())
    with pytest.raises(ValueError, match="has a constraint, which a center of asynchronous exchange"):
        exchange(model, hvdp.EASGD(), asynchronous=True)


def test_what_cannot_be_exchanged_between_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AGN\(op='sum'\) needs the gradients of every step"):
        exchange(network(), AGN)
    with pytest.raises(TypeError, match=r"`model` must be a keras\.Model\. Received: NoneType"):
        exchange(None, hvdp.Averaging())
    with pytest.raises(ValueError, match=r"with Keras on PyTorch only.*Received: Keras on tensorflow"):
        exchange(network(), hvdp.Averaging(), parameters="present")
    model = network()
    callback = exchange(model, hvdp.Averaging())
    model.compile(keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="compile the model with steps_per_execution=1"):
        fit(model, callback)


def test_an_algorithm_that_needs_the_learning_rate_needs_a_compiled_model() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile the model first"):
        exchange(model, hvdp.SlowMo())
    callback = exchange(model, hvdp.Averaging())
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
    model.compile(keras.optimizers.SGD(rate), loss="mse")
    fit(model, callback)
    assert callback.synchronizer.learning_rate() == 0.25
    assert callback.synchronizer.rounds == 2
