"""Options that sessions of TensorFlow 1 have in common with other front ends; one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

hvd = pytest.importorskip("horovod.tensorflow")
tf = pytest.importorskip("tensorflow").compat.v1

from hvd_periodic.comm.collective_tracker import CollectiveTracker  # noqa: E402
from hvd_periodic.tensorflow import contrib_opt  # noqa: E402
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions  # noqa: E402
from tests.unit.test_contrib_interface import SIGNATURES, make, variable  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    hvd.init()
    with tf.Graph().as_default() as graph:
        yield graph


def minimized(name: str = "ModelAverageOptimizer", **options: Any) -> tuple[Any, Any, Any]:
    """Return a variable that starts at [1, 2], an optimizer of rate 0.5, and a step by a gradient of 1."""
    getter = getattr(contrib_opt, name.replace("Optimizer", "CustomGetter"))("")
    w, optimizer = variable(getter), make(name, getter, **options)
    return w, optimizer, optimizer.minimize(tf.reduce_sum(w), global_step=tf.train.get_or_create_global_step())


@pytest.mark.parametrize("name", SIGNATURES)
def test_an_unknown_keyword_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(name, center_device="cpu")
    text = str(caught.value)
    assert text.startswith(f"{name}() got an unexpected keyword argument 'center_device'. It takes ")
    assert text.endswith(", ".join(SessionOptions.__annotations__))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("ModelAverageOptimizer", {"weight": -1.0}, ValueError, "`weight`.*Received: -1.0"),
        ("ElasticAverageOptimizer", {"weight": 2.0}, ValueError, "`weight` is for algorithms that take the mean"),
        ("AGNOptimizer", {"weight": 2.0}, ValueError, r"AGN with op='average'. Received: AGN\(op='sum'\)"),
        ("AGNOptimizer", {"op": "mean"}, ValueError, r"`AGNOptimizer\(op=...\)` must be 'sum' or 'average'"),
        ("ModelAverageOptimizer", {"audit_every": -1}, ValueError, "`audit_every`.*Received: -1"),
        ("AGNOptimizer", {"asynchronous": True, "audit_every": 2}, ValueError, "there is one center"),
        ("ModelAverageOptimizer", {"timeout_seconds": "soon"}, TypeError, "`timeout_seconds`.*Received: 'soon'"),
    ],
)
def test_refused_options(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        minimized(name, **options)


def test_how_long_ranks_wait_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(CollectiveTracker, "limit", lambda self, seconds: limits.append(seconds))
    minimized(timeout_seconds=1234.5)
    assert {*limits} >= {1234.5}


def test_a_weight_is_asked_for_once_per_exchange() -> None:
    """One that fails then is the error of the step."""
    weights = iter([2.0, 1.0, -1.0])
    w, optimizer, train = minimized(interval_steps=2, weight=lambda: next(weights))
    start = optimizer.get_init_op()
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(start)
        for _ in range(5):
            session.run(train)
        assert session.run(w).tolist() == [-1.5, -0.5]
        with pytest.raises(tf.errors.OpError, match="weight of this rank cannot be used"):
            session.run(train)
