"""Messages that TensorFlow encodes, in real jobs: a slow oracle, one center on all ranks, places, models, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import compression_oracle as slow
from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.test_compression import WIRES
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(240)

OF_SIZE = ("compressed_quadratics", "not_finite_on_the_last_rank")
"""What the number of ranks makes a difference for."""

JOBS = [thorough(("mpirun", 2)), ("mpirun", 2, *OF_SIZE), thorough(("horovodrun --gloo", 3, *OF_SIZE))]
"""Launcher, ranks, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: f"{job[0]} {job[1]}", indirect=True)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(
        launcher, size, "compression_tensorflow_scenarios", folder, 200, framework="tensorflow", only=only
    )


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are float32 in Keras."""
    monkeypatch.setattr(oracle, "MOMENTUM", 0.5)
    for case in ranks[0]["compressed_quadratics"]:
        name, wire, _ = case.split()
        quantize, hops, tolerance = WIRES[wire]
        steps, center = slow.expected(name, len(ranks), quantize, hops)
        reports = column(ranks, "compressed_quadratics", case)
        assert [report[1] for report in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        assert reports[0][1] == pytest.approx(center, rel=2 * tolerance, abs=2 * tolerance), case
        for rank, (seen, _) in enumerate(reports):
            expected = np.ravel([of_ranks[rank] for of_ranks in steps])
            assert np.ravel(seen) == pytest.approx(expected, rel=2 * tolerance, abs=2 * tolerance), (case, rank)


@whole
def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded, with what was not sent, goes on alike."""
    for case in ranks[0]["compressed_in_fit"]:
        reports = column(ranks, "compressed_in_fit", case)
        assert reports == [reports[0]] * len(ranks), case
        original, loaded = reports[0]
        assert loaded == (original if len(ranks) <= 2 else pytest.approx(original, rel=1e-3, abs=0.05)), case


@whole
def test_a_broadcast_before_training_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    """Of all variables, as Horovod's callbacks do it: they have the same names and shapes on all ranks."""
    for report in column(ranks, "compressed_and_broadcast"):
        for wire in ("int8", "bf16", "topk"):
            assert report[f"{wire} broadcast"] == report[wire]
            assert report[wire] == ranks[0]["compressed_and_broadcast"][wire]


@whole
def test_a_state_holds_what_was_not_sent(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "compressed_and_restored"):
        for wire, (original, restored) in report.items():
            assert restored == original, wire


@whole
def test_the_center_elsewhere(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "compressed_in_other_places")
    assert found == [found[0]] * len(ranks)
    for case, report in found[0].items():
        wire, place = case.split()
        if wire == "fp16":
            assert report == pytest.approx(found[0]["fp16 replicated"], abs=0.02), case
        elif place != "replicated":
            assert report.startswith("ValueError: `compression` as "), report
            assert f"needs center='replicated': with center={place!r}" in report


def test_what_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for case in ranks[0]["not_finite_on_the_last_rank"]:
        for rank, (error, center) in enumerate(column(ranks, "not_finite_on_the_last_rank", case)):
            assert center == [0.0, 0.0], "as it was"
            assert ("parameter 'w' is not finite at step 2" if rank == last else f"Rank {last} failed") in error, case
