"""Where the center lives, in real jobs: the same training in every placement, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_periodic.vectors.layout import chunk
from tests.parallel.launch import run_scenarios
from tests.parallel.placement_scenarios import CASES, FROM_ROOT_1, SOME_CASES
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(240)

JOBS = [
    ("mpirun", "torch", 2),
    ("mpirun", "tensorflow", 2, "uneven_data"),
    thorough(("mpirun", "torch", 3)),
    thorough(("torchrun", "torch", 2)),
    thorough(("mpirun, MPI", "torch", 2)),
    thorough(("torchrun", "torch", 3)),
    thorough(("mpirun", "tensorflow", 2)),
    thorough(("mpirun", "tensorflow", 3, "trajectories", "statistics")),
]
"""Launcher, framework, ranks, and what they run; default: everything."""

STATE = {"agn_momentum": 1, "agn_adam": 2}
"""Vectors in the state of the center's optimizer."""

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(map(str, job[:3])))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, framework, size, *scenarios = request.param
    pytest.importorskip(f"horovod.{framework}")
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(
        launcher, size, "placement_scenarios", folder, 200, framework, framework=framework, only=scenarios
    )


def comparisons(ranks: Reports, scenario: str, key: str = "comparison") -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of every case, and how all ranks compared it with the replicated center."""
    for case, report in column(ranks, scenario)[0].items():
        if key in report:
            yield case, column(ranks, scenario, case, key)


Check = Callable[[list[Any], str], None]


@pytest.fixture
def check_equal(ranks: Reports) -> Check:
    """Return what compares a case with the replicated center, as all ranks did: to the bit, but for other sums.

    Those of three ranks and more are taken in another order where they are scattered, and by Gloo, where small messages
    are gathered.
    """

    def check(found: list[Any], case: str) -> None:
        exact = len(found) == 2 or not ("sharded" in case or ranks[0]["gloo"])
        for same, difference in found:
            assert same if exact else difference < 1e-6, (case, found)

    return check


def test_trajectories_are_the_same(ranks: Reports, check_equal: Check) -> None:
    found = dict(comparisons(ranks, "trajectories"))
    for case, compared in found.items():
        check_equal(compared, case)
    kinds = {case.split(",")[0] for case in found}
    assert kinds == set(CASES)
    assert {case.split(",")[0] for case in found if "root 1" in case} == set(FROM_ROOT_1)
    for case, report in ranks[0]["trajectories"].items():
        assert report["rounds"] == 3, case
        if case.startswith(("average", "agn", "diloco", "slowmo")):
            assert report["distances"] == [0.0] * 3, case
        else:
            assert min(report["distances"]) > 0.01, case


def test_the_trainings_that_are_compared_differ(ranks: Reports) -> None:
    """Replicas between exchanges, centers from one to the next, and algorithms, do; loops do not."""
    centers, (trajectories, *_) = set(), column(ranks, "trajectories")
    for case in CASES:
        name, *loops = (name for name in trajectories if name.startswith(f"{case}, replicated, "))
        report = column(ranks, "trajectories", name)
        for other in (loop for loop in loops if "root 1" not in loop and "root 1" not in name):
            assert trajectories[other]["center"] == pytest.approx(report[0]["center"], rel=1e-5), other
        assert len(set(report[0]["center"])) == 3, case
        assert column(report, "center") == [report[0]["center"]] * len(ranks), case
        assert report[0]["replica"][2] != report[1]["replica"][2], case
        centers.add(tuple(report[0]["center"]))
    # ρ changes the replicas' gradients, so also the centers.
    assert len(centers) == len(CASES)


def test_who_holds_what(ranks: Reports) -> None:
    """Elements of the center and of the state of its optimizer."""
    size = len(ranks)
    for case, report in column(ranks, "trajectories")[0].items():
        kind, placement, *_ = case.split(", ")
        replicated = f"{kind}, replicated, {'root 1, ' if 'root 1' in case else ''}{case.split(', ')[-1]}"
        buckets = ranks[0]["trajectories"][replicated]["buckets"]
        for rank, held in enumerate(column(ranks, "trajectories", case, "held")):
            shares = {
                "replicated": sum(buckets),
                "root": sum(buckets) * (rank == int("root 1" in case)),
                "sharded": sum(stop - start for start, stop in (chunk(bucket, rank, size) for bucket in buckets)),
            }
            assert held == {"center": shares[placement], "state": STATE.get(kind, 0) * shares[placement]}, case
            if placement == "sharded":
                assert held["center"] <= sum(buckets) / size + len(buckets), "one n-th, to a whole element per bucket"
        assert report["held"]["center"] >= 0


@pytest.mark.parametrize("scenario", ["uneven_data", "uneven_averages"])
def test_uneven_data(scenario: str, ranks: Reports, check_equal: Check) -> None:
    for case, found in comparisons(ranks, scenario):
        check_equal(found, case)
        counters = column(ranks, scenario, case, "counters")
        assert counters == [counters[0]] * len(ranks), case


def test_resume_to_the_bit(ranks: Reports) -> None:
    """In mid-period on all ranks, and on the root alone."""
    for report in column(ranks, "resume"):
        assert len(report) >= len(SOME_CASES)
        assert {case.split(", ")[-1] for case in report} == {"all", "root"}
        assert all(report.values()), report


def test_resume_in_another_placement(ranks: Reports) -> None:
    """A center may move; the state of its optimizer may not, and says so."""
    for report in column(ranks, "other_placement"):
        refused = report.pop("refused")
        assert "The state of the center optimizer was not saved with center='sharded'" in refused
        assert report == {"replicated, sharded": True, "sharded, root": True, "root, replicated": True}


def test_statistics(ranks: Reports, check_equal: Check) -> None:
    """Batch normalization: all parameters and statistics, locally and in ``center()``."""
    for key in ("local", "center"):
        for case, found in comparisons(ranks, "statistics", key):
            check_equal(found, case)
    for case in ranks[0]["statistics"]:
        sums = column(ranks, "statistics", case, "sums")
        assert sums == [sums[0]] * len(ranks), "one center"


def test_fewer_elements_than_ranks(ranks: Reports, check_equal: Check) -> None:
    for case, found in comparisons(ranks, "tiny"):
        check_equal(found, case)
    for case in ranks[0]["tiny"]:
        held = column(ranks, "tiny", case, "held")
        assert held == [1] * len(ranks) if "replicated" in case else [1, *[0] * (len(ranks) - 1)], case


def test_exports(ranks: Reports, check_equal: Check) -> None:
    for report in column(ranks, "center_state_dict"):
        for case, (compared, inside_is_the_same) in report.items():
            check_equal([compared] * len(ranks), case)
            assert inside_is_the_same, case


def test_deep_copies_go_on_alike(ranks: Reports) -> None:
    for report in column(ranks, "copies"):
        assert len(report) >= len(SOME_CASES)
        assert all(report.values()), report


def test_a_rank_with_an_empty_share_steps_nothing(ranks: Reports) -> None:
    for report in column(ranks, "empty_shares"):
        for case, error in report.items():
            assert error == "", case


def test_optimizers_that_need_whole_tensors(ranks: Reports) -> None:
    """Refused on a sharded center, on all ranks."""
    for report in column(ranks, "not_elementwise"):
        assert len(report) >= 2
        for name, (error, _) in report.items():
            assert error.startswith("ValueError: "), name
            if name != "Muon":  # which itself refuses vectors
                assert "gives other results on parts than on the whole: use center='root'" in error, name


def test_scheduled_rates_of_the_center(ranks: Reports, check_equal: Check) -> None:
    for case in column(ranks, "scheduled_rate")[0]:
        check_equal(column(ranks, "scheduled_rate", case), case)


def test_keras_files(ranks: Reports) -> None:
    """A file per rank goes on to the bit, weights and all variables of the optimizer."""
    for report in column(ranks, "files"):
        assert len(report) == 6
        assert report == {case: [True, True] for case in report}


def test_the_share_of_another_rank_is_noticed(ranks: Reports) -> None:
    for error, right in column(ranks, "file_of_another_rank"):
        assert "was saved by rank 0 of" in error
        assert "save and load a file per rank" in error
        assert not right


def test_all_ranks_save_the_best_center_where_reading_is_collective(ranks: Reports) -> None:
    for rank, report in enumerate(column(ranks, "callbacks")):
        assert report == {"replicated": int(rank == 0), "root": 1, "sharded": 1}
