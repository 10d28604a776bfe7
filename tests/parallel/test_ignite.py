"""Ignite on two ranks, of Horovod and of torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.beside import trainers, with_trainers  # noqa: F401
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("with_trainers")]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["mpirun", thorough("torchrun")])
def ranks(request: pytest.FixtureRequest, with_trainers: None, tmp_path_factory: pytest.TempPathFactory) -> Reports:  # noqa: F811
    """What each rank reports."""
    return run_scenarios(
        request.param, 2, "ignite_scenarios", tmp_path_factory.mktemp("job"), 180, framework="trainers"
    )


def test_the_center_is_evaluated_and_left_in_the_model(ranks: Reports) -> None:
    for rank, report in enumerate(column(ranks, "goes_where_the_oracle_goes")):
        assert report["ranks"] == [rank, 2]
        assert max(*report["seen"], report["metric"], report["end"]) < 1e-12
        assert report["logged"] == [4, 8, 12, 13]


def test_the_root_alone_writes_the_center(ranks: Reports) -> None:
    of_root, of_other = column(ranks, "files")
    assert of_root["files"] == ["model_6.pt"]
    assert of_root["saved"] < 1e-12
    assert of_other == {"files": [], "saved": None}


def test_uneven_data(ranks: Reports) -> None:
    for kind in ("iterable", "counted"):
        (steps, end, looks), other = column(ranks, "uneven_data", kind)
        assert (steps, looks) == (16, 2)
        assert other == [steps, end, looks]


def test_evaluators_that_are_attached_later_see_the_center(ranks: Reports) -> None:
    for report in column(ranks, "further_evaluators"):
        assert max(report["attached"], report["other"]) < 1e-12
        assert report["logged"] == [4, 6]


def test_an_evaluation_that_not_all_come_to_is_an_error_on_all(ranks: Reports) -> None:
    for cases in column(ranks, "evaluations_that_not_all_come_to"):
        assert cases.keys() >= {"fewer batches", "sharded", "terminate", "terminate_epoch"}
        for message in cases.values():
            assert message.startswith("RuntimeError: ")
            assert "Not all ranks have reached the" in message
            assert "at Events.EPOCH_COMPLETED" in message


ENDS = {
    "even 5 root": (5, 8, 8),  # At the next exchange, in which the root leaves.
    "even 5 both": (5, 6, 6),
    "even 9 root": (9, 10, 10),  # No exchange is left: at the end of the epoch.
    "even 9 both": (9, 10, 10),
    "even 10 root": (10, 10, 10),
    "even 10 both": (10, 10, 10),
    "even 15 root": (15, 16, 16),
    "even 15 both": (15, 16, 16),
    "uneven 5 root": (5, 13, 13),
    "uneven 5 both": (5, 6, 6),
}
"""Iterations of both ranks, and steps, when training has ended."""


@pytest.mark.parametrize("case", ENDS)
def test_a_rank_that_terminates_ends_all(ranks: Reports, case: str) -> None:
    """In whichever way, and by the same events: all have the same center then."""
    *iterations, steps = ENDS[case]
    of_root, of_other = column(ranks, "terminates_in_an_epoch", case)
    for completed, root, other in zip((1, 0), of_root, of_other, strict=True):
        assert root[0] == [iterations[0], steps, completed]
        assert other[0] == [iterations[1], steps, completed]
        assert root[1:] == other[1:]
        assert root[2] is True


def test_a_rank_that_terminates_ends_all_that_train_asynchronously(ranks: Reports) -> None:
    of_root, of_other = column(ranks, "terminates_asynchronously")
    assert of_root[1:] == of_other[1:]
    assert (of_root[:1], of_other[:1]) in (([5], [10]), ([], []))


def test_early_stopping_ends_all_at_the_same_step(ranks: Reports) -> None:
    assert column(ranks, "stops_early_on_all") == [[3, 9]] * 2


def test_an_evaluator_that_fails_leaves_the_replica(ranks: Reports) -> None:
    assert column(ranks, "an_evaluator_that_fails") == [[True, True, False]] * 2


def test_another_optimizer_is_refused(ranks: Reports) -> None:
    assert all("TypeError: A trainer" in message for message in column(ranks, "what_is_refused"))
