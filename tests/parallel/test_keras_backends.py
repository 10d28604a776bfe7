"""Keras on other backends than TensorFlow: a callback exchanges during ``fit``, over MPI and torch.distributed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

if find_spec("keras") is None or find_spec("torch") is None:  # to import them takes as long as a job
    pytest.skip("Keras or torch is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(150)

JOBS = [
    ("torch", "mpirun, MPI"),
    ("jax", "torchrun"),
    thorough(("torch", "torchrun")),
    thorough(("jax", "mpirun, MPI")),
]
"""Backend, and launcher."""


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]}, {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks reports; all tests of a job share it."""
    backend, launcher = request.param
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    if launcher == "mpirun, MPI" and find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", backend)
        shared = "torch alone" if backend == "torch" else None  # Without Horovod.
        folder = tmp_path_factory.mktemp("job")
        return run_scenarios(launcher, 2, "keras_backends_scenarios", folder, 120, framework=shared)


def test_fit_takes_the_steps_of_the_numpy_front_end(ranks: list[dict[str, Any]]) -> None:
    """Every algorithm, placement, wire and overlap; the ranks leave with the same center and statistics."""
    for name in ranks[0]["trained"]:
        reports = column(ranks, "trained", name)
        for report in reports:
            found, expected = report["fit"], report["arrays"]
            assert found["counters"] == expected["counters"], name
            for epoch in (0, 1):
                assert found["epochs"][epoch] == pytest.approx(expected["epochs"][epoch], rel=1e-5, abs=1e-6), name
            assert found["center"] == pytest.approx(expected["center"], rel=1e-5, abs=1e-6), name
        assert reports[0]["fit"]["epochs"][0] != reports[1]["fit"]["epochs"][0], "replicas differ between exchanges"
        for key in ("center", "statistics"):
            assert reports[0]["fit"][key] == reports[1]["fit"][key], (name, key)


def test_steps_stay_compiled(ranks: list[dict[str, Any]]) -> None:
    """Exchanges after the first batch have nothing traced again; with torch, every step runs in Python."""
    if ranks[0]["backend"] == "torch":
        pytest.skip("Keras does not compile steps of torch")
    for report in ranks:
        assert {name: case["fit"]["traced again"] for name, case in report["trained"].items()} == dict.fromkeys(
            report["trained"], 0
        )


def test_present(ranks: list[dict[str, Any]]) -> None:
    """Ranks that have no gradient of a variable in a period do not contribute; nobody has one in one of the periods."""
    first, second = column(ranks, "present")
    for name in first:
        for report in (first[name], second[name]):
            np.testing.assert_allclose(report["fit"], report["arrays"], rtol=1e-5, atol=1e-6, err_msg=name)
        assert first[name]["fit"][-1] == second[name]["fit"][-1]


def test_uneven_data(ranks: list[dict[str, Any]]) -> None:
    (center, rounds), other = column(ranks, "uneven_data")
    assert other == [center, rounds]
    assert rounds == 5


def test_looking_at_the_center_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "looked_at_in_mid_epoch"):
        assert report["looked at"] == report["not looked at"]
        local, center, after, saved, distance = report["seen"]
        assert local == after
        assert center == saved
        assert distance == pytest.approx(sum((x - c) ** 2 for x, c in zip(local, center, strict=True)) ** 0.5, rel=1e-5)
        assert distance > 0.1


def test_resumed(ranks: list[dict[str, Any]]) -> None:
    for straight, resumed, rounds, of_resumed in column(ranks, "resumed"):
        assert resumed == straight
        assert rounds == of_resumed == 6


def test_refused(ranks: list[dict[str, Any]]) -> None:
    texts = {
        "gradients": "needs the gradients of every step, which a callback of Keras never sees",
        "on one rank": "`period`, unless it is a schedule, must be an int >= 1. Received: 0",
        "disagreement": "They differ in schedule: Every(period=3) on rank 0; Every(period=4) on rank 1",
        "moving averages": "with use_ema=True Keras has put moving averages in their place",
        "best weights": "EarlyStopping(restore_best_weights=True) would put weights of this rank alone",
        "another model": "PeriodicExchange is for the model that it was given",
        "state of the optimizer": "`optimizer_state` must be 'local'. Received: 'average'",
        "excluded": "`nonfinite` must be 'raise' or 'ignore'. Received: 'skip'",
        "not built": "The model is not built: give it an input shape, or call it once",
        "several steps": "compile the model with steps_per_execution=1. Received: steps_per_execution=2",
        "present": "with Keras on PyTorch only, where variables keep the gradients of a batch",
        "other front end": "On another backend, fit() exchanges with hvd_periodic.keras",
    }
    for report in column(ranks, "refused"):
        assert report.keys() >= texts.keys() - {"several steps", "present"}
        for case, error in report.items():
            assert texts[case] in error, case


def test_neither_tensorflow_nor_horovod_is_imported(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "imported") == [[], []]
