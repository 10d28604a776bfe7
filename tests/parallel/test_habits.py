"""What people do around exchanges, out of habit, in PyTorch: it works, or is an error on every rank; nothing waits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(150)

JOBS = [thorough(("mpirun", 2)), thorough(("mpirun", 3)), ("horovodrun --gloo", 2)]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    return run_scenarios(launcher, size, "habits_scenarios", tmp_path_factory.mktemp("job"), 120, framework="torch")


def test_weights_loaded_after_construction_are_what_all_start_from(ranks: Reports) -> None:
    """With the broadcasts of a Horovod script or without them, through the wrapper or in a loop of one's own."""
    found = column(ranks, "weights_loaded_after_construction")
    assert len(found[0]) >= 4
    for case in found[0]:
        _, _, lines, wrapped = case.split()
        for rank, (far, steps, skipped) in enumerate(column(found, case)):
            assert far < 0.01, (case, rank)
            assert steps == 2
            # The gradients of the first step were taken before the root's weights were here.
            assert skipped == (lines == "False" and wrapped == "True" and rank > 0), (case, rank)


def test_frozen_weights_loaded_after_construction(ranks: Reports) -> None:
    for report in column(ranks, "frozen_weights_loaded_after_construction"):
        assert report == [5.0, True]


def test_a_state_loaded_on_the_root_is_what_all_go_on_from(ranks: Reports) -> None:
    found = column(ranks, "resumed_on_the_root")
    for case in found[0]:
        of_ranks = column(found, case)
        for how in ("everywhere", "broadcasts", "alone"):
            assert [report[how][2] for report in of_ranks] == [4] * len(ranks), (case, how)
            skipped = [report[how][3] for report in of_ranks]
            assert skipped == [int(how == "alone" and rank > 0) for rank in range(len(ranks))], (case, how)
        if "asynchronous" in case:
            continue
        for report in of_ranks:
            assert report["broadcasts"] == report["everywhere"], case
            assert report["alone"][1] == of_ranks[0]["alone"][1], case
        if not case.startswith("easgd"):
            continue
        # The center that the root pulled towards, in its step, was the one it has loaded.
        assert of_ranks[0]["alone"][0] == of_ranks[0]["everywhere"][0], case


def test_states_that_do_not_belong_together_are_named(ranks: Reports) -> None:
    found = column(ranks, "states_that_do_not_belong_together")
    last = len(ranks) - 1
    for place in found[0].keys() - {"in training"}:
        for report in column(found, place):
            assert report["together"] == ""
            for case in ("other step", "other run"):
                assert "have loaded states of different runs or steps: run" in report[case], (place, case)
                assert f"on rank {last}" in report[case]
            assert f"Rank {last} has loaded a state, and the root, rank 0, has none" in report["not the root"]
    for error in column(found, "in training"):
        assert re.search(rf"first step of optimizer \d+ on rank {last}", error)
        assert "load a state on every rank or on none" in error


def test_steps_that_make_the_state_of_an_optimizer_count_and_move_nothing(ranks: Reports) -> None:
    for report in column(ranks, "state_makers"):
        assert len(report) == 6
        for case, counted in report.items():
            assert counted == [0, True, 3], case


def test_ranks_that_wait_in_different_optimizers_find_out(ranks: Reports) -> None:
    for report in column(ranks, "two_optimizers"):
        assert report["counted"] == ""
        for case in ("not counted", "uneven"):
            assert "Ranks wait for each other in different places: " in report[case], case
            assert "skip() if there is no update" in report[case]


def test_the_center_takes_the_hyperparameters_of_those_that_train(ranks: Reports) -> None:
    found = column(ranks, "schedulers_and_uneven_steps")
    for case in ("step", "epoch", "one cycle", "overflow"):
        of_ranks = column(found, case)
        assert of_ranks == [["", of_ranks[0][1], 26]] * len(ranks), case


def test_asynchronous_optimizers_are_finalized_in_one_order(ranks: Reports) -> None:
    for error in column(ranks, "asynchronous_in_another_order"):
        assert "All ranks must make the same calls in the same order" in error


def test_a_rank_that_is_not_finite_is_named_or_left_out(ranks: Reports) -> None:
    size = len(ranks)
    mean, others = (size + 1) / 2, size / 2
    found = column(ranks, "values_that_count")
    for case in found[0]:
        where, name = case.split(", ")
        for rank, (error, center, finite, left_out) in enumerate(column(found, case)):
            last = rank == size - 1
            assert finite, case
            if name == "raise":
                tensor = "parameter 'weight'" if where == "gradient" else "statistic 'running_var'"
                assert f"{tensor} is not finite at step 2" in error, case
                assert last or f"Rank {size - 1} failed" in error, case
                assert center == pytest.approx([1 + 1e-3] * 3, rel=1e-5), case  # one step of Adam
                continue
            assert error == "", case
            assert left_out == last, case
            expected = 1 + 3 * mean + others
            if name == "weight":  # Σ w² / Σ w, over all ranks and over all but the last
                expected = 1 + (3 * (2 * size + 1) + 2 * size - 1) / 3
            assert center == pytest.approx([expected] * 3, rel=0.01 if name == "int8" else 1e-6), case
