"""Keras jobs that are saved and started again: by as many ranks, to the bit; by others, from the center."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_periodic.ranks import named
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(600)

Reports = list[dict[str, Any]]

CHAINS = [
    (("horovodrun --gloo", 2, "exact"), ("python", 1, "among_others")),
    thorough((("horovodrun --gloo", 2), ("python", 1, "among_others"))),
    thorough((("mpirun, MPI", 2), ("mpirun, MPI", 3, "among_others"))),
    thorough((("mpirun", 3), ("mpirun", 2, "among_others"))),
]
"""Jobs one after another, which find what those before have saved: launcher, ranks, and what they run; default: all."""


def _name(chain: Any) -> str:
    return " ".join(str(word) for job in chain for word in job)


whole = pytest.mark.parametrize("jobs", CHAINS[1:], ids=_name, indirect=True)


@pytest.fixture(scope="module", params=CHAINS, ids=_name)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Reports]:
    """What each rank of each job reports."""
    shared = tmp_path_factory.mktemp("chain") / "shared"
    shared.mkdir()
    reports: list[Reports] = []
    for launcher, size, *only in request.param:
        arguments = (launcher, size, "checkpoint_tensorflow_scenarios", tmp_path_factory.mktemp("job"), 280)
        reports.append(run_scenarios(*arguments, str(shared), framework="tensorflow", only=only))
    return reports


@pytest.fixture
def ranks(jobs: list[Reports]) -> Reports:
    """What the ranks of the first job report."""
    return jobs[0]


def test_training_goes_on_to_the_bit(ranks: Reports) -> None:
    for report in ranks:
        assert len(report["exact"]) >= 4
        for number, (name, seen) in enumerate(report["exact"].items()):
            assert seen["values"] == [number, "default", [1, 2], 5], name
            uninterrupted, resumed = seen["ends"]
            assert resumed == uninterrupted, name


def test_other_numbers_of_ranks_start_from_the_center(jobs: list[Reports]) -> None:
    saved = jobs[0][0]["exact"]
    found = column(jobs[1], "among_others")
    assert [case.partition(" ")[2] for case in found[0]] == list(saved)
    for case in found[0]:
        for rank, seen in enumerate(column(found, case)):
            loaded, steps, error, end = seen
            if not case.endswith(" agn"):  # whose variables are of fewer bits than its center
                assert loaded == saved[case.partition(" ")[2]]["center"], (case, rank)
            assert (steps, error) == (5, ""), case
            assert end == found[0][case][-1], case


@whole
def test_the_file_of_the_root_alone(ranks: Reports) -> None:
    found = column(ranks, "the_file_of_the_root_alone")
    for case in found[0]:
        of_ranks = column(found, case)
        expected = [7] * len(ranks) if "visible" in case else [7, *[None] * (len(ranks) - 1)]
        assert [report[0] for report in of_ranks] == expected, case
        assert [report[1] for report in of_ranks] == [6] * len(ranks), case
        assert len({report[2] for report in of_ranks}) == 1, case


@whole
def test_damage_is_an_error_on_all_ranks(ranks: Reports) -> None:
    last = len(ranks) - 1
    for rank, (other, other_step, loading, step) in enumerate(column(ranks, "damage")):
        assert "ValueError: The local optimizer was saved with" in other
        assert f"Training cannot start: loading the checkpoint failed on {named(range(len(ranks)))}: The " in other_step
        damaged = f"000001-step5/rank-{last}.npz is damaged or belongs to another checkpoint: its SHA-256 differs"
        assert (damaged in loading) == (rank == last)
        assert f"Training cannot start: loading the checkpoint failed on rank {last}: " in step
        assert damaged in step


@whole
def test_the_callback_saves_epochs_and_steps(ranks: Reports) -> None:
    for sets, ends, values in column(ranks, "fit"):
        assert sets[0] == ["000002-step8", "000003-step12", "000004-step16"]
        assert sets[1] == ["000001-step4", "000002-step8"]  # Two steps at once, and a save after three or more.
        (none, uninterrupted), (first, resumed) = ends
        assert (none, first) == (0, 2)
        assert resumed == uninterrupted
        assert values == [0, "mine"]


@whole
def test_a_thread_that_writes_disturbs_no_collectives_of_the_user(ranks: Reports) -> None:
    assert column(ranks, "beside_collectives_of_the_user") == [[[], 3]] * len(ranks)


@whole
def test_an_exchange_of_a_compiled_step_completes_the_set(ranks: Reports) -> None:
    """Steps 3 and 6 exchange while a file is being written, step 9 after it."""
    assert column(ranks, "in_the_background_of_fit") == [[0] * 8 + [1] * 4] * len(ranks)


@whole
def test_loops_of_ones_own(ranks: Reports) -> None:
    for (uninterrupted, none), (resumed, first) in column(ranks, "a_loop_of_its_own"):
        assert (none, first) == (0, 5)
        assert resumed == uninterrupted
