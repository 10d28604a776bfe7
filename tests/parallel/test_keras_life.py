"""Whole Keras models in real jobs: placements, constraints, normalization, reproducible runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column

pytest.importorskip("horovod.tensorflow")

from tests.parallel.keras_life_scenarios import ALGORITHMS, PLACES

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_scenarios(
        "mpirun", 2, "keras_life_scenarios", tmp_path_factory.mktemp("job"), 240, framework="tensorflow"
    )


def test_placements_in_every_loop(ranks: list[dict[str, Any]]) -> None:
    """The eager replicated center, in every other place and compiled."""
    sums = set()
    for case in ranks[0]["placements"]:
        found = column(ranks, "placements", case)
        assert found == [found[0]] * len(ranks), case
        assert found[0]["rounds"] == 3, case
        assert found[0]["difference"] < 1e-4, case
        sums.add((case.split(",")[0], round(found[0]["sum"], 2)))
    assert len(ranks[0]["placements"]) == len(ALGORITHMS) * len(PLACES)
    assert len({value for _, value in sums}) >= len(ALGORITHMS), "algorithms differ"


def test_collectives_run_whether_or_not_their_results_are_used(ranks: list[dict[str, Any]]) -> None:
    """Two broadcasts of three ones from the root."""
    assert column(ranks, "last_rank_does_not_look") == [[6.0, 0.0, 6.0, 0.0]] * len(ranks)


def test_constraints_hold_for_replica_and_center(ranks: list[dict[str, Any]]) -> None:
    for case in ranks[0]["constraints"]:
        found = column(ranks, "constraints", case)
        if case.endswith("sharded"):
            assert all("`center='sharded'` cuts it" in error for error in found), case
            continue
        assert max(max(report["replica"], report["center"]) for report in found) < 1e-6, case
        assert len({report["bits"] for report in found}) == 1, case
        for report in found:
            assert report["distance"] > 0 if case.startswith("easgd") else report["distance"] == 0, case


def test_layers_that_derive_from_their_weights_follow_them(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "normalization")
    assert found == [found[0]] * len(ranks)


def test_centers_are_compared_after_every_other_exchange(ranks: list[dict[str, Any]]) -> None:
    """In ``fit`` nobody changes one."""
    for loop in ("function", "eager"):
        for error, rounds in zip(
            column(ranks, "audits", loop), column(ranks, "audits", f"{loop}, rounds"), strict=True
        ):
            assert "The center variables differ between ranks: rank 1 from rank 0, first in" in error
            assert "gamma" in error or "kernel" in error or "beta" in error, error
            assert rounds in (3, 4), loop
    assert column(ranks, "audits", "fit") == [""] * len(ranks)
    assert column(ranks, "audits", "fit, rounds") == [5] * len(ranks)


def test_states_of_static_jobs(ranks: list[dict[str, Any]]) -> None:
    """Of five steps the second and the fourth exchange; the commit of the fourth has four exchanges of groups."""
    expected = {"one level": [2, 4, None], "two levels": [2, 4, 4], "without sync()": [2, 5, None]}
    assert column(ranks, "states_of_static_jobs") == [expected] * len(ranks)


def test_all_ranks_leave_fit_with_the_same_model(ranks: list[dict[str, Any]]) -> None:
    """The center is of what was trained, the model the mean of moving averages, or the root's best center."""
    for case in ranks[0]["ends_of_fit"]["averages"]:
        found = column(ranks, "ends_of_fit", "averages", case)
        assert len({report["bits"] for report in found}) == 1, case
        assert max(report["model"] for report in found) < 1e-6, case
        if case.startswith(("average", "root")):
            assert max(report["center"] for report in found) < 1e-6, case
    for case in ranks[0]["ends_of_fit"]["best"]:
        found = column(ranks, "ends_of_fit", "best", case)
        assert len({whole for _, _, whole in found}) == 1, case
        assert max(difference for difference, _, _ in found) < 1e-6, case
        epochs = [2] + [3 if case.startswith("replicated") else 2] * (len(ranks) - 1)
        assert [count for _, count, _ in found] == epochs, case


def test_runs_with_determinism_are_equal_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "determinism") == [{"easgd": [True, 3, True], "agn": [True, 3, True]}] * len(ranks)


def test_a_rank_that_is_not_finite_is_named_or_left_out(ranks: list[dict[str, Any]]) -> None:
    """With momentum 0.5, the first rank moves by 1, 1.5, 1.75, 1.875; the last by 2, NaN, and from the start 2, 3."""
    moved = {"skip": 1.5 + 1.5 + (1.75 + 2) / 2 + (1.875 + 3) / 2}
    moved["sharded"] = moved["skip"]
    moved["weight"] = (1 + 2 * 2) / 3 + 1.5 + (1.75 + 2 * 2) / 3 + (1.875 + 2 * 3) / 3
    for case in ranks[0]["values_that_count"]:
        name = case.split(", ")[0]
        found = column(ranks, "values_that_count", case)
        for rank, (error, center, finite, left_out, rounds) in enumerate(found):
            last = rank == len(ranks) - 1
            if name == "raise":
                assert "/kernel' is not finite at step 2" in error, case
                assert last or f"Rank {len(ranks) - 1} failed" in error, case
                assert (center, rounds) == ([2.5, 1.5], 1), case
                continue
            assert (error, finite, left_out) == ("", True, last), case
            eager = ranks[0]["values_that_count"][f"{name}, False"][1]
            assert center == pytest.approx(eager, rel=1e-6), case
            if name in moved:
                assert center == pytest.approx([1 + moved[name], moved[name]], rel=1e-6), case
