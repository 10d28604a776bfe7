"""Keras exchanges in flight during local steps, in real jobs: every loop, models in ``fit``, files, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import oracle, overlap_oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(240)

JOBS = [("mpirun", 2), thorough(("horovodrun --gloo", 3))]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(*request.param, "overlap_tensorflow_scenarios", folder, 200, framework="tensorflow")


def test_no_local_progress_is_lost(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MOMENTUM", 0.5)  # a number of float32: Keras rounds the momentum
    found = ranks[0]["overlapped_quadratics"]
    for case in found:
        name, overlap, _ = case.split()
        reports = column(ranks, "overlapped_quadratics", case)
        assert [seen[-1] for seen in reports] == [reports[0][-1]] * len(ranks), "one center"
        if name == "easgd":
            for seen, other in zip(reports, column(ranks, "overlapped_quadratics", "easgd 0 function"), strict=True):
                tolerance = 0 if len(ranks) <= 2 else 1e-12
                assert np.array(seen) == pytest.approx(np.array(other), rel=tolerance, abs=tolerance), case
            continue
        steps = overlap_oracle.expected(name, len(ranks), overlap if overlap == "period" else int(overlap))
        for rank, seen in enumerate(reports):
            right = np.array([of_ranks[rank] for of_ranks in steps])
            assert np.array(seen[: len(right)]) == pytest.approx(right, rel=1e-6, abs=1e-6), (case, rank)


def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded in mid-flight goes on alike."""
    for case, (flying, original, *loaded) in ranks[0]["overlapped_in_fit"].items():
        reports = column(ranks, "overlapped_in_fit", case)
        assert flying == (case != "easgd"), "elastic averaging has nothing to take once the center has moved"
        assert reports == [reports[0]] * len(ranks), case
        tolerance = 0 if len(ranks) <= 2 else 1e-4
        for each in loaded:
            assert each == pytest.approx(original, rel=tolerance, abs=tolerance), case


def test_refused(ranks: list[dict[str, Any]]) -> None:
    cases = ranks[0]["overlap_refused"]
    expected = {
        "word": "`overlap` must be an int >= 0 or 'period'. Received: 'step'",
        "type": "`overlap` must be an int",
        "root": "`overlap` needs center='replicated'",
        "groups": "With a function as `process_set`, groups exchange in step",
        "levels": "`overlap` needs a single level",
        "different": "overlap",
        "on the last": "overlap",
    }
    assert cases.keys() == expected.keys()
    for case, text in expected.items():
        for report in column(ranks, "overlap_refused", case):
            assert text in report, case
