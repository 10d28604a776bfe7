"""Keras parameters in fragments, in real jobs: every loop and place, parts of tensors, models, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(240)

JOBS = [thorough(("mpirun", 2)), ("horovodrun --gloo", 3, "fragments_within_a_tensor", "fragments_refused")]
"""Launcher, ranks, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: f"{job[0]} {job[1]}", indirect=True)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(
        launcher, size, "fragments_tensorflow_scenarios", folder, 200, framework="tensorflow", only=only
    )


def close(ranks: list[dict[str, Any]], values: Any, tolerance: float) -> Any:
    """Three ranks add in an order of Horovod's own."""
    if len(ranks) <= 2:
        return values
    return [pytest.approx(row, rel=tolerance, abs=tolerance) for row in values]


@whole
def test_each_goes_where_it_goes_alone(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(column(ranks, "fragments_of_quadratics")):
        for case, values in report.items():
            alone = report[f"{case.split()[0]} alone"]
            assert values == close(ranks, alone, 1e-12), (case, rank)
            assert (values != report["average alone"]) == (not case.startswith("average")), "as the algorithm has it"


def test_parts_of_a_tensor(ranks: list[dict[str, Any]]) -> None:
    """Eight elements at a time become equal on all ranks, after two, four and five local steps of a period."""
    reports = column(ranks, "fragments_within_a_tensor")
    for case, steps in reports[0].items():
        for rank, report in enumerate(reports):
            for here, eager in zip(report[case], report[f"{case.split()[0]} eager"], strict=True):
                assert here == close(ranks, eager, 1e-12), (case, rank)
        if case.startswith("easgd"):
            continue
        for step in range(len(steps)):
            found = [[value for row in report[case][step] for value in row] for report in reports]
            equal = [all(of_rank[i] == found[0][i] for of_rank in found) for i in range(24)]
            turn = {1: 0, 3: 1, 4: 2}.get(step % 5)
            assert equal == [i // 8 == turn for i in range(24)], (case, step)


@whole
def test_in_fit(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; what was saved and loaded within a period goes on alike."""
    for case, (original, loaded) in ranks[0]["fragments_in_fit"].items():
        reports = column(ranks, "fragments_in_fit", case)
        assert reports == [reports[0]] * len(ranks), case
        assert loaded == (original if len(ranks) <= 2 else pytest.approx(original, rel=1e-3, abs=0.05)), case


@whole
def test_the_rate_of_a_given_outer_optimizer_is_followed(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "fragments_follow_the_outer_rate"):
        assert len(report) == len(ranks[0]["fragments_follow_the_outer_rate"]) > 1
        assert all(center == [[1.0, 2.0], [1.0, 2.0]] for center in report.values())


def test_refused(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    short = "`fragments` must be at most the local steps of a period, one for each. Received: fragments=3, and a period"
    texts = {
        "many": "`fragments` must be at most 3, the number of tensors and buckets that the model can be cut into",
        "type": "`fragments` must be an int >= 1. Received: 1.5",
        "different": "All ranks must run the same optimizer. They differ in schedule",
        "short": f"{short} of 2 at step 0",
        "shrinking": f"{short} of 2 at step 3",
        "outer": "`fragments` must be at most 3, the number of tensors that the model can be cut into",
    }
    for rank, report in enumerate(column(ranks, "fragments_refused")):
        for case, text in texts.items():
            assert text in report[case], case
        assert ("`fragments` must be at most 3" if rank == last else f"Rank {last} failed") in report["on the last"]
