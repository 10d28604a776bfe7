"""Embedding tables of which only touched rows travel, in Keras: the dense exchange to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import LocalCommunicator
from hvd_periodic.keras import PeriodicExchange
from hvd_periodic.tensorflow.coding import GraphCoding
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.parallel.tiers import thorough
from tests.unit.test_tensorflow_edges import Delegate

pytestmark = pytest.mark.timeout(120)

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "agn": hvdp.AGN,
}
ROWS, WIDTH, STEPS, PERIOD = 20, 4, 11, 3
POLICIES = {"table": "rows"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compression": hvdp.Compression.bf16, "overlap": 1},
    "overlap": {"overlap": 1},
    "fragments": {"fragments": 2},
    "momentum": {"momentum": 0.5},
}


COMPILED = [("diloco", True), ("agn", False)]
"""What every run compiles, with sparse gradients and dense ones."""


def variables() -> list[Any]:
    shapes = {"x": (5,), "table": (ROWS, WIDTH)}
    return [
        keras.Variable(np.sin(np.arange(1, 1 + np.prod(shape))).reshape(shape), name=name)
        for name, shape in shapes.items()
    ]


def made(trained: list[Any], communicator: Any, algorithm: Any, momentum: float = 0.0, **options: Any) -> Any:
    if algorithm == "agn":
        options["outer_optimizer"] = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.1, momentum=momentum),
        None,
        ALGORITHMS[algorithm]() if isinstance(algorithm, str) else algorithm,
        PERIOD,
        process_set=Delegate(communicator),
        **options,
    )
    optimizer.build(trained)
    return optimizer


def trained_by(trained: list[Any], optimizer: Any, rank: int, sparse: bool, compiled: bool = False) -> list[Any]:
    """Return the values after each step, and those of the center."""

    def take(words: Any) -> None:
        x, table = trained
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, words)
            loss = tf.reduce_sum(tf.square(rows)) * (1.0 + rank) + tf.reduce_sum(x.value * (1.0 + rank))
        of_x, of_table = tape.gradient(loss, [x.value, table.value])
        assert isinstance(of_table, tf.IndexedSlices)
        optimizer.apply([of_x, of_table if sparse else tf.convert_to_tensor(of_table)], trained)

    step, seen = tf.function(take) if compiled else take, []
    for i in range(STEPS):
        step(tf.constant([(3 * rank + i) % (ROWS // 2), (5 * rank + 7) % ROWS]))
        seen.append([v.numpy().tolist() for v in trained])
    with optimizer.center():
        seen.append([v.numpy().tolist() for v in trained])
    return [seen, optimizer.synchronizer.counters.bytes_sent]


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_the_dense_exchange_to_the_bit(algorithm: str, way: str) -> None:
    def work(communicator: Any, parameters: Any) -> Any:
        trained = variables()
        optimizer = made(trained, communicator, algorithm, parameters=parameters, **WAYS[way])
        return trained_by(trained, optimizer, communicator.rank, sparse=way != "overlap")

    rows, dense = (run_ranks(2, lambda c, policies=policies: work(c, policies)) for policies in (POLICIES, None))
    assert [seen for seen, _ in rows] == [seen for seen, _ in dense]
    if way in ("plain", "fragments"):
        assert all(fewer < more for (_, fewer), (_, more) in zip(rows, dense, strict=True))


@pytest.mark.parametrize(
    ("algorithm", "sparse"),
    [
        *COMPILED,
        *(thorough(name, sparse) for name in ALGORITHMS for sparse in (True, False) if (name, sparse) not in COMPILED),
    ],
)
def test_compiled_steps(algorithm: str, sparse: bool) -> None:
    found = []
    for parameters, compiled in ((POLICIES, True), (POLICIES, False), (None, True)):
        trained = variables()
        optimizer = made(trained, LocalCommunicator(), algorithm, parameters=parameters)
        found.append(trained_by(trained, optimizer, 0, sparse, compiled))
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]
    assert found[0][1] < found[2][1]


@pytest.mark.parametrize("rate", [None, 0.2])
@pytest.mark.parametrize("way", ["plain", "overlap", "fragments"])
def test_elastic_averaging(way: str, rate: float | None) -> None:
    """The dense exchange within rounding."""

    def work(communicator: Any, parameters: Any) -> Any:
        trained = variables()
        optimizer = made(trained, communicator, hvdp.EASGD(rate), parameters=parameters, **WAYS[way])
        return trained_by(trained, optimizer, communicator.rank, sparse=way != "overlap")

    results = (run_ranks(2, lambda c, policies=policies: work(c, policies)) for policies in (POLICIES, None))
    for (rows, fewer), (dense, more) in zip(*results, strict=True):
        for one, other in zip(rows, dense, strict=True):
            for x, y in zip(one, other, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
        assert fewer < more


@pytest.mark.parametrize("sparse", [True, False])
def test_compiled_steps_of_elastic_averaging(sparse: bool) -> None:
    """The same as eager ones, whose rows are marked outside of graphs."""
    found = []
    for compiled in (True, False):
        trained = variables()
        optimizer = made(trained, LocalCommunicator(), hvdp.EASGD(0.3), parameters=POLICIES)
        found.append(trained_by(trained, optimizer, 0, sparse, compiled))
        untouched = optimizer.synchronizer.tensor_groups.parameters.error_feedback.untouched
        marks, sums = (store.tensors()[0].numpy() for store in untouched.stores().values())
        assert marks.sum() == STEPS % PERIOD * 2 - 1, "one row is touched in each step"
        assert sums.any()
    for one, other in zip(found[0][0], found[1][0], strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
    assert found[0][1] == found[1][1]


def test_tensors_have_the_same_verbs_as_arrays() -> None:
    """Replicas on a GPU are tensors."""
    coding, x = GraphCoding(), tf.constant([[0.0, 0.0], [0.0, 1.0], [np.nan, 0.0]])
    assert coding.nonzero_rows(x).tolist() == [False, True, True]
    places = np.array([0, 1])
    assert coding.take_rows(x, places).numpy().tolist() == [[0.0, 0.0], [0.0, 1.0]]
    put = coding.put_rows(x, places, tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    assert put[:2].numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def network() -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(ROWS, WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("algorithm", [thorough(hvdp.DiLoCo()), hvdp.EASGD(0.3)])
def test_a_model_in_fit_that_is_saved(algorithm: Any, tmp_path: Path) -> None:
    model = network()
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(0.1),
        model,
        algorithm,
        PERIOD,
        process_set=LocalCommunicator(),
        parameters={"*embeddings": "rows"},
    )
    model.compile(optimizer, "mse", jit_compile=False)
    words = np.arange(16).reshape(8, 2) % 5
    model.fit(words, np.ones((8, 1)), batch_size=2, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, process_set=LocalCommunicator())
    if isinstance(algorithm, hvdp.EASGD):
        marks, sums = (
            [each.numpy().tolist() for each in store.tensors()]
            for store in optimizer.synchronizer.tensor_groups.parameters.error_feedback.stores().values()
        )
        assert any(map(any, marks)), "saved in the middle of a period"
        assert np.any(sums)
    for each in (model, loaded):
        each.fit(words, np.ones((8, 1)), batch_size=2, verbose=0, shuffle=False)
    assert [len(each.synchronizer.replica.tables) for each in (optimizer, loaded.optimizer)] == [1, 1]
    assert [x.numpy().tolist() for x in loaded.weights] == [x.numpy().tolist() for x in model.weights]


def test_a_callback_on_any_backend() -> None:
    found = []
    for parameters in ({"*embeddings": "rows"}, None):
        model = network()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        callback = PeriodicExchange(
            model, hvdp.DiLoCo(), PERIOD, process_set=LocalCommunicator(), parameters=parameters
        )
        words = np.arange(16).reshape(8, 2) % 5
        model.fit(words, np.ones((8, 1)), batch_size=2, verbose=0, shuffle=False, callbacks=[callback])
        found.append(([x.numpy().tolist() for x in model.weights], callback.synchronizer.counters.bytes_sent))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": {"x": "rows"}}, r"tensors of two axes and more.*Received: 'x' of shape \(5,\)"),
        ({"center": "sharded"}, r"center='replicated' only"),
        ({"compression": hvdp.Compression.int8}, r"travel with `compression` to 16 bits only"),
        (
            {"algorithm": hvdp.EASGD(0.2), "momentum": 0.5},
            r"leaves rows without gradients alone.*SGD with momentum=0.5",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    def work(communicator: Any) -> None:
        made(variables(), communicator, **{"algorithm": "average", "parameters": POLICIES, **options})

    for kind, text in errors(2, work):
        assert kind is ValueError
        assert re.search(message, text)


@pytest.mark.parametrize(
    ("optimizer", "constraint", "message"),
    [
        (lambda: keras.optimizers.Adam(0.1), None, "Adam, which moves all rows"),
        (lambda: keras.optimizers.Adagrad(0.1, weight_decay=0.1), None, "Adagrad with weight_decay=0.1"),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), None, "gradient_accumulation_steps=2"),
        (lambda: keras.optimizers.SGD(0.1), "non_neg", "the constraint of '.*embeddings'"),
    ],
)
def test_what_moves_all_rows_is_refused_in_elastic_averaging(optimizer: Any, constraint: Any, message: str) -> None:
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(ROWS, WIDTH, embeddings_constraint=constraint)]
    )
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        hvdp.PeriodicOptimizer(
            optimizer(),
            model,
            hvdp.EASGD(0.2),
            PERIOD,
            process_set=LocalCommunicator(),
            parameters={"*embeddings": "rows"},
        ).build(model.trainable_variables)


def test_a_callback_does_not_see_gradients() -> None:
    with pytest.raises(ValueError, match="Received: an optimizer whose gradients are not seen here"):
        PeriodicExchange(
            network(), hvdp.EASGD(0.2), PERIOD, process_set=LocalCommunicator(), parameters={"*embeddings": "rows"}
        )


def test_an_excluded_rank() -> None:
    """All its rows have changed, so that they travel once."""

    def work(communicator: Any, parameters: Any) -> Any:
        trained = variables()
        options = {"parameters": parameters, "nonfinite": "skip"}
        optimizer = made(trained, communicator, hvdp.EASGD(0.2), **options)
        seen = []
        for i in range(STEPS):
            g = np.zeros((ROWS, WIDTH), "f4")
            g[(5 * communicator.rank + i) % ROWS] = 1.0 + communicator.rank
            if i == PERIOD:
                g[3] = np.nan if communicator.rank else 0.0
            optimizer.apply([tf.ones(5), tf.constant(g)], trained)
            seen.append(trained[1].numpy())
        return seen

    results = (run_ranks(2, lambda c, policies=policies: work(c, policies)) for policies in (POLICIES, None))
    for rows, dense in zip(*results, strict=True):
        np.testing.assert_allclose(rows, dense, rtol=0, atol=2e-6)
