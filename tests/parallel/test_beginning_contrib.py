"""The first step of TensorFlow 1 scripts of Horovod on real ranks, with their broadcast and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(240)

JOBS = [
    thorough(("mpirun", "v1")),
    thorough(("horovodrun --gloo", "v2", "sessions", "monitored_sessions", "initializers_built_too_early")),
]
"""Launcher, version, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: " ".join(job[:2]), indirect=True)

NAMES = ("easgd", "easgd_rho", "average", "agn")


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(job[:2]))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, mode, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(
        launcher, 2, "beginning_contrib_scenarios", folder, 200, mode, framework="tensorflow", only=only
    )


@pytest.mark.parametrize("name", NAMES)
def test_all_start_from_the_root_with_a_broadcast_or_without(name: str, ranks: list[dict[str, Any]]) -> None:
    """Gradients −1 and −3, rate 1: x, c, the statistic and skipped updates after one step, on both ranks."""
    first_steps = {
        "without": [[6, 5, 1, 0], [5, 5, 1, 1]],
        "kept": [[6, 5, 1, 0], [8, 5, 2, 0]],
        "root": [[101, 100, 51, 0], [100, 100, 51, 1]],
        "root, kept": [[101, 100, 51, 0], [103, 100, 52, 0]],
        "all": [[101, 100, 51, 0], [103, 100, 52, 0]],
    }
    for case in ranks[0]["sessions"][name]:
        expected, seen = first_steps[case], column(ranks, "sessions", name, case)
        assert [[of_rank[0][key] for key in ("x", "c", "mean", "skipped")] for of_rank in seen] == expected, case
        for step in range(4):
            assert {of_rank[step]["c"] for of_rank in seen} == {seen[0][step]["c"]}, "one center"
            assert [of_rank[step]["step"] for of_rank in seen] == [step + 1] * 2, "a step that is left out counts"
            assert [of_rank[step]["skipped"] for of_rank in seen] == [row[3] for row in expected], "once"


def test_exchanges_after_a_first_step_without_a_broadcast(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 has taken two steps of 1, rank 1 one of 3, from 5; with ρ the second of rank 0 is shorter."""
    found = {name: [of_rank[1] for of_rank in column(ranks, "sessions", name, "without")] for name in NAMES}
    assert [[of_rank["x"], of_rank["c"]] for of_rank in found["easgd"]] == [[6.5, 6.25], [7.25, 6.25]]
    assert [[of_rank["x"], of_rank["c"]] for of_rank in found["easgd_rho"]] == [[6.125, 6.125], [7.25, 6.125]]
    assert [[of_rank["x"], of_rank["c"]] for of_rank in found["average"]] == [[7.5, 7.5]] * 2
    assert [[of_rank["x"], of_rank["c"]] for of_rank in found["agn"]] == [[9, 9]] * 2, "mean gradients 1 and 3"


def test_monitored_sessions_go_on_from_the_checkpoint_that_the_root_alone_has(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["monitored_sessions"]:
        of_ranks = column(ranks, "monitored_sessions", name)
        for rank, (first, second) in enumerate(of_ranks):
            assert [seen["step"] for seen in first + second] == [1, 2, 3, 4, 5, 6]
            assert [seen["skipped"] for seen in first + second] == [rank] * 6
        for first, second in zip(*of_ranks, strict=True):
            assert [seen["c"] for seen in first] == [seen["c"] for seen in second], "one center"
        (_, second), (_, other) = of_ranks
        assert second[0]["mean"] == other[0]["mean"]


@whole
def test_every_rank_goes_on_exactly_from_its_own_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["resumed"]:
        for expected, again in column(ranks, "resumed", name):
            assert again == expected


@whole
def test_a_checkpoint_that_the_root_has_not_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for error in column(ranks, "resumed_by_one"):
        assert "Rank 1 has loaded a state, and the root, rank 0, has none" in error


@whole
def test_a_synchronous_phase(ranks: list[dict[str, Any]]) -> None:
    """The gradients of one rank spoil the mean of all: all leave out the first update; after the phase, one."""
    first, second = (column(ranks, "synchronous_phase", steps) for steps in ("2", "4"))
    for rank, (early, again) in enumerate(first):
        assert [[seen["x"], seen["skipped"]] for seen in early] == [[5, 1], [7, 1]]
        assert [[seen["x"], seen["skipped"]] for seen in again] == [[7, 2], [8 + 2 * rank, 2]], "the phase ends"
    (root, of_root), (_, of_other) = second
    assert [seen["x"] for seen in root] == [5, 7, 9, 10]
    assert [[seen["skipped"] for seen in again] for again in (of_root, of_other)] == [[1, 1], [2, 2]]
    assert [again[0][key] for again in (of_root, of_other) for key in ("x", "c")] == [10.5] * 4, "exchanged"


@whole
def test_each_of_several_optimizers_begins_by_itself(ranks: list[dict[str, Any]]) -> None:
    """What another one trains is left alone, and a frozen weight is the root's."""
    without, kept = (column(ranks, "several_optimizers", case) for case in ("False", "True"))
    assert [step[0] for step in without[0][:3]] == [[1, 0.75, 1], [1, 0.5, 1], [0.875, 0.5, 1]]
    assert [step[0] for step in without[1][:3]] == [[2, 1, 1], [2, 0, 1], [1, 0, 1]]
    assert [step[1] for step in without[0]] == [[0, 0]] * 4
    assert [step[1] for step in without[1]] == [[0, 1], [0, 1], [1, 1], [1, 1]]
    assert [step[0] for step in kept[1][:3]] == [[1, 0.5, 1], [1, 0, 1], [1, 0, 1]]
    assert all(step[1] == [0, 0] for of_rank in kept for step in of_rank)


def test_an_early_initializer_initializes_what_minimize_creates(ranks: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(column(ranks, "initializers_built_too_early")):
        for case, (x, warned) in report.items():
            assert warned == [], case
            assert x == (5 if rank and case.endswith("none") else 6), case


@whole
def test_an_initializer_that_has_run_too_early_is_named(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "initializers_run_too_early"):
        for kind, error in report.items():
            assert "An initializer initializes what exists when it is built: move the lines" in error, kind
