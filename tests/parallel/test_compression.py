"""Messages that are encoded, in real jobs: a slow oracle, one center on all ranks, places, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import compression_oracle as slow
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(180)

JOBS = [("mpirun", 2), ("horovodrun --gloo", 3), thorough(("mpirun", 4)), thorough(("torchrun", 2))]

WIRES: dict[str, tuple[slow.Quantizer, int, float]] = {
    "fp16": (slow.float16, 1, 2e-3),
    "bf16": (slow.bfloat16, 2, 1e-6),
    "int8": (slow.int8, 2, 1e-6),
    "topk": (slow.top(2), 1, 1e-6),
}
"""Quantizer, hops, and tolerance: Horovod sums float16 by itself, in an order of its own."""


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "compression_scenarios", folder, 150, framework="torch")


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]]) -> None:
    for case in ranks[0]["compressed_quadratics"]:
        name, _, wire = case.partition(" ")
        quantize, hops, tolerance = WIRES[wire]
        steps, center = slow.expected(name, len(ranks), quantize, hops)
        reports = column(ranks, "compressed_quadratics", case)
        assert [report[1] for report in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        assert reports[0][1] == pytest.approx(center, rel=tolerance, abs=tolerance), case
        for rank, (seen, _) in enumerate(reports):
            expected = [of_ranks[rank] for of_ranks in steps]
            assert np.array(seen) == pytest.approx(np.array(expected), rel=tolerance, abs=tolerance), (case, rank)


def test_networks(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; a copy and a checkpoint, with what was not sent, go on alike."""
    for case in ranks[0]["compressed_networks"]:
        reports = column(ranks, "compressed_networks", case)
        assert reports == [reports[0]] * len(ranks), case
        original, *others = reports[0]
        # Statistics and float16 are summed by Horovod, in an order of its own; bytes are summed in that of ranks.
        exact = len(ranks) <= 2 or "fp16" not in case
        for parameters, statistics in others:
            assert parameters == (original[0] if exact else pytest.approx(original[0], abs=0.05)), case
            assert statistics == pytest.approx(original[1], rel=1e-3, abs=1e-3), case


def test_the_center_elsewhere(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "compressed_in_other_places")
    assert found == [found[0]] * len(ranks)
    for wire in WIRES:
        for place in ("root", "sharded"):
            report = found[0][f"{wire} {place}"]
            if wire == "fp16":
                assert report == pytest.approx(found[0][f"{wire} replicated"], abs=0.02), (wire, place)
            else:
                assert report.startswith("ValueError: `compression` as "), report
                assert f"needs center='replicated': with center={place!r}" in report


def test_what_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    for wire in WIRES:
        for rank, (error, center) in enumerate(column(ranks, "not_finite_on_the_last_rank", wire)):
            assert center == [0.0] * 3, "as it was"
            last = rank == len(ranks) - 1
            assert ("parameter 'w' is not finite at step 2" if last else f"Rank {len(ranks) - 1}") in error
            assert "parameter 'w' is not finite at step 2" in error or not last
