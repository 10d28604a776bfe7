"""Keras's weights that no exchange touches and that differ between ranks are named, but not seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd_periodic import Communicator
from tests.helpers import run_ranks

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from tests.unit.test_keras_adoption import WithPeers  # noqa: E402
from tests.unit.test_tensorflow_edges import Delegate  # noqa: E402

pytestmark = pytest.mark.timeout(90)


class Coded(keras.layers.Layer):
    """Untrained weights of every kind."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.codes = self.add_weight(shape=(8, 2), trainable=False, name="codes", initializer="zeros")
        self.moving_mean = self.add_weight(shape=(2,), trainable=False, name="moving_mean", initializer="zeros")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def coded(communicator: Communicator, **options: object) -> tuple[keras.Model, Coded, hvdp.ModelAverageOptimizer]:
    layer = Coded()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    local = keras.optimizers.SGD(0.1)
    return model, layer, hvdp.ModelAverageOptimizer(local, model, 2, process_set=WithPeers(communicator), **options)


def train(model: keras.Model, optimizer: hvdp.ModelAverageOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)


@pytest.mark.parametrize("call", ["finalize", "audit"])
@pytest.mark.parametrize(("buffers", "named"), [(None, 2), ({"*/codes": "local"}, 1), ({"*": "local"}, 0)])
def test_each_is_named(buffers: object, named: int, call: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        layers = [keras.layers.Dense(2), Coded(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        layers[0].trainable = False
        optimizer = hvdp.ModelAverageOptimizer(
            keras.optimizers.SGD(0.1), model, 2, process_set=Delegate(communicator), buffers=buffers
        )
        rank = communicator.rank
        layers[0].bias.assign(np.full(2, rank, np.float32))
        layers[1].codes.assign(np.full((8, 2), rank, np.float32))
        layers[1].moving_mean.assign(np.full(2, rank, np.float32))
        layers[2].seed_generator.state.assign([rank, rank])
        for _ in range(2):
            optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
        layers[1].codes.assign(np.full((8, 2), rank, np.float32))
        layers[0].bias.assign(np.full(2, rank, np.float32))
        getattr(optimizer.synchronizer, call)()

    run_ranks(2, work)
    assert caplog.text.count("differs between ranks: rank 1 from rank 0. To exchange it, pass buffers={'") == named
    assert ("codes', which no exchange touches" in caplog.text) == (named == 2)
    assert ("bias', which no exchange touches" in caplog.text) == (named > 0)


@pytest.mark.parametrize("call", ["finalize", "audit"])
@pytest.mark.parametrize("options", [{"asynchronous": True}, {"quorum": 2}], ids=str)
def test_each_is_named_where_ranks_do_not_meet(
    options: dict[str, object], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(communicator: Communicator) -> None:
        model, layer, optimizer = coded(communicator, **options)
        train(model, optimizer, 2 + communicator.rank)
        layer.codes.assign(np.full((8, 2), communicator.rank == 1, np.float32))
        getattr(optimizer.synchronizer, call)()
        optimizer.finalize()

    run_ranks(3, work)
    assert caplog.text.count("differs between ranks: rank 1 from rank 0. To exchange it, pass buffers={'") == 1
    assert "codes', which no exchange touches" in caplog.text


def test_ranks_that_resume_compare_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        model, layer, optimizer = coded(communicator)
        train(model, optimizer, 2)
        layer.codes.assign(np.full((8, 2), communicator.rank, np.float32))
        hvdp.save(tmp_path, model, optimizer)
        assert "differs" not in caplog.text
        communicator.allgather_object(None, "saved")
        model, layer, optimizer = coded(communicator)
        hvdp.load(tmp_path, model, optimizer)
        assert "differs" not in caplog.text
        communicator.allgather_object(None, "loaded")
        train(model, optimizer, 1)

    run_ranks(2, work)
    assert caplog.text.count("differs between ranks: rank 1 from rank 0. To exchange it, pass buffers={'") == 1
    assert "codes', which no exchange touches" in caplog.text
